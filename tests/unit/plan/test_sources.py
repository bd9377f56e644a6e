"""An edited model is another model: its files are found and read, and nothing is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hetexp.plan.sources import source_hashes


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "hx_net.py": "import numpy\nfrom hx_blocks import parts\nraise SystemExit('imported')\n",
        "hx_blocks/__init__.py": "from . import deeper\n",
        "hx_blocks/parts.py": "from .deeper.layer import Layer\nfrom ... import beyond\n",
        "hx_blocks/deeper/__init__.py": "",
        "hx_blocks/deeper/layer.py": "class Layer: ...\n",
        "hx_other.py": "import hx_net\n",
        "hx_broken.py": "def (:\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return tmp_path


NET = {"_target_": "hx_net.Net", "layers": [{"kind": "hx_broken.Layer"}, 3, None], "path": "/data/x.txt"}


def test_own_modules_and_what_they_import_count(project: Path) -> None:
    found = source_hashes([NET], [str(project)])
    modules = ["hx_blocks", "hx_blocks.deeper", "hx_blocks.deeper.layer", "hx_blocks.parts"]
    assert list(found) == [*modules, "hx_broken", "hx_net"]
    assert not {name for name in sys.modules if name.startswith("hx_")}


@pytest.mark.parametrize("edited", ["hx_net.py", "hx_blocks/deeper/layer.py", "hx_blocks/__init__.py"])
def test_an_edit_shows(project: Path, edited: str) -> None:
    before = source_hashes([NET], [str(project)])
    (project / "hx_other.py").write_text("")
    assert source_hashes([NET], [str(project)]) == before  # the model does not use it
    path = project / edited
    path.write_text(path.read_text() + "# another thought\n")
    assert source_hashes([NET], [str(project)]) != before


def test_nothing_is_found_of_what_is_nowhere(project: Path) -> None:
    assert source_hashes(["no_such.Thing", "cross_entropy", "0.5", ""], [str(project)]) == {}


def test_a_shipped_class_is_looked_up_without_torch() -> None:
    code = (
        "import sys; from hetexp.plan.sources import source_hashes\n"
        "print(sorted(source_hashes([{'_target_': 'hetexp.model.mlp.MLP', 'o': 'torch.optim.AdamW'}], [])))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout
