"""What the fork server imports for all ranks, and what it must leave alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched import TINY, TRAIN
from support import Train

from hetexp.commands.doctor import main
from hetexp.launch.processes.process import PRELOADED

LISTING = """
import sys
from pathlib import Path

from hetexp.logger.base import Logger


class Listing(Logger):
    def __init__(self, file: str):
        self.file = file

    def start(self, run):
        pass

    def log(self, metrics, step):
        pass

    def finish(self, summary, exit_code):
        Path(self.file).write_text("\\n".join(sys.modules))
"""
# Libraries come first: what they do is not hetexp's.
LOOKING = """
import _collections_abc, json, os, sys, threading
import hydra.utils, numpy, rich, safetensors.torch, sklearn.datasets, sklearn.model_selection
import torch._dynamo, torch.distributed.pipelining, torch.utils.flop_counter
import hetexp

PACKAGE = os.path.dirname(hetexp.__file__) + os.sep
PYTHONS = ("<frozen", os.__file__, _collections_abc.__file__)

def state():
    tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    return [dict(os.environ), threading.active_count(), tasks, torch.cuda.is_initialized()]

class Watched(dict):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(PYTHONS):
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(PACKAGE):
            read.append(f"{frame.f_code.co_filename} reads {key}")
        return super().__getitem__(key)

read, before = [], state()
os.environ._data = Watched(os.environ._data)
for name in sys.argv[1:]:
    __import__(name)
print(json.dumps([before == state(), read, sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def looked() -> tuple[bool, list[str], set[str]]:
    """Whether importing changed the process, who read its environment, and the modules that it then has."""
    names = [name for name in PRELOADED if name.startswith("hetexp")]
    command = [sys.executable, "-c", LOOKING, *names]
    root = Path(__file__).parents[2]
    unchanged, read, modules = json.loads(subprocess.check_output(command, cwd=root, text=True))
    return unchanged, read, set(modules)


def test_it_leaves_threads_devices_and_environment_alone(looked: tuple[bool, list[str], set[str]]) -> None:
    """A rank's threads, visible cards and variables are its own; the server has none of them."""
    unchanged, read, _ = looked
    assert (unchanged, read) == (True, [])


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_a_forked_rank_imports_no_module_of_hetexp(
    looked: tuple[bool, list[str], set[str]],
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
) -> None:
    (tmp_path / "listing.py").write_text(LISTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    listed = tmp_path / "modules.txt"
    train(
        *("hardware.devices=[cpu,cpu]", "hardware.check_memory=false", f"strategy={strategy}"),
        *("model=mlp", "data=synthetic", "trainer.global_batch_size=8"),
        *("trainer.max_steps=4", "trainer.max_epochs=null"),
        *("logger._target_=listing.Listing", f"+logger.file={listed}"),
    )
    imported = {name for name in listed.read_text().splitlines() if name.partition(".")[0] == "hetexp"}
    assert "hetexp.worker" in imported
    assert imported - looked[2] == set()


def test_another_hetexp_in_the_current_folder_is_not_imported(tmp_path: Path) -> None:
    """The fork server would search that folder first; a rank that is a subprocess does not."""
    (tmp_path / "hetexp").mkdir()
    (tmp_path / "hetexp/__init__.py").write_text("raise RuntimeError('another hetexp')")
    words = [*TINY, f"hydra.run.dir={tmp_path}/run", "launch.start_method=forkserver", "trainer.max_steps=1"]
    ended = subprocess.run([sys.executable, TRAIN, *words], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_doctor_shows_the_stages_of_a_start(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--start-up", *TINY, "--json"]) == 0
    stages = json.loads(capfd.readouterr().out)
    assert stages[0]["stage"] == "interpreter"
    assert stages[-1]["stage"] == "rank 0: first step"
    assert all(row["seconds"] >= 0 for row in stages)


def test_the_doctor_shows_why_a_start_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--start-up", "trainer.max_step=3"]) == 2
    assert "`trainer.max_step`" in capfd.readouterr().err
