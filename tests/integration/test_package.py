"""The wheel as people have it: built from the sdist, installed, and used far away from any clone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from own_project import write_project
from safetensors.torch import load_file

import hetexp
from hetexp.app import conf_dir

pytest.importorskip("build", reason="needs build, of the extra dev")
pytest.importorskip("hatchling", reason="needs hatchling, of the extra dev")

ROOT = conf_dir().parent
OPTIONS = {str(path.relative_to(conf_dir())) for path in conf_dir().rglob("*.yaml")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, the wheel that it builds, and in `clone` the wheel that the clone builds."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "build", "--no-isolation", str(ROOT), "--outdir"]
    for words in ([str(folder)], [str(folder / "clone"), "--wheel"]):
        ended = subprocess.run([*build, *words], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.fixture(scope="module")
def programs(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, and all else from this one.

    The folder that this environment's editable hetexp is found by does not come along: it is named in a file
    that Python reads in its own environment's folder only.
    """
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "--quiet"]
    options = ["--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *options, str(wheel)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    elsewhere = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "zz_elsewhere.pth").write_text("\n".join(elsewhere) + "\n")
    return venv / "bin"


def start(programs: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [programs / words[0], *words[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def names(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_what_the_wheel_holds(built: Path) -> None:
    inside = names(built)
    assert {f"hetexp/conf/{name}" for name in OPTIONS} <= inside
    assert {
        "hetexp/py.typed",
        "hetexp/hardware/catalogue.yaml",
        "hetexp/data/corpus/pride_and_prejudice.txt",
        "hetexp/data/corpus/SOURCE.md",
        "hetexp/conf/__init__.py",
        "hydra_plugins/hetexp_search_path.py",
    } <= inside
    assert "hydra_plugins/__init__.py" not in inside  # other plugins' packages have none either
    rooms = {name.split("/")[0] for name in inside}
    assert rooms == {"hetexp", "hydra_plugins", f"hetexp-{hetexp.__version__}.dist-info"}
    assert not any("__pycache__" in name for name in inside)


def test_clone_and_sdist_build_the_same_wheel(built: Path) -> None:
    assert names(built) == names(built / "clone")


def test_what_the_sdist_holds(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"conf/{name}" for name in OPTIONS} <= inside
    assert {"pyproject.toml", "train.py", "README.md", "LICENSE", "hetexp/py.typed"} <= inside
    assert not any(name.startswith(("tests", "outputs", ".venv", ".whl")) for name in inside)


def test_a_project_of_ones_own_trains(programs: Path, tmp_path: Path) -> None:
    project = write_project(tmp_path / "project")
    words = ("experiment=mine", "balancing=equal", f"hydra.run.dir={tmp_path / 'run'}")
    ended = start(programs, project, "hetexp", "train", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == ("completed", 2)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["config"]["model"] == {"_target_": "my_net.Net", "hidden": 16}
    assert plan["config"]["data"] == {"_target_": "my_points.Points"}
    saved = load_file(next((tmp_path / "run").glob("checkpoints/*/model.safetensors")))
    assert {name.split(".")[0] for name in saved} == {"mine"}
    for rank in range(2):
        log = (tmp_path / "run" / "logs" / f"rank_{rank}.log").read_text()
        assert f"a rank's hetexp is {programs.parent}/" in log  # neither the clone's nor this environment's


def test_conf_of_another_folder(programs: Path, tmp_path: Path) -> None:
    project = write_project(tmp_path / "project")
    words = ("--config-dir", str(project / "conf"), "-cn", "job", "--cfg", "job", "--package", "model")
    ended = start(programs, tmp_path, "hetexp", "train", *words)
    assert ended.returncode == 0, ended.stderr
    assert "_target_: my_net.Net" in ended.stdout


OTHER = """
import hydra

@hydra.main(config_path=None, version_base="1.3")
def main(cfg):
    print("their run has", cfg.data.num_samples, cfg.model._target_)

main()
"""


def test_another_hydra_application_can_use_the_options(programs: Path, tmp_path: Path) -> None:
    """It names where they are; nothing of hetexp's is in its way otherwise, not even a folder `conf`."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "digits.yaml").write_text("_target_: theirs\n")
    (tmp_path / "other.py").write_text(OTHER)
    options = ("hydra.searchpath=[pkg://hetexp.conf]", "+data=synthetic", "hydra.run.dir=out")
    ended = start(programs, tmp_path, "python", "other.py", *options, "+model=mlp")
    assert ended.stdout == "their run has 1024 hetexp.model.mlp.MLP\n", ended.stderr
    ended = start(programs, tmp_path, "python", "other.py", *options, "+model=digits")
    assert "Could not find 'model/digits'" in ended.stderr
