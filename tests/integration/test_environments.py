"""`hetexp env create` really makes an environment, and its ranks train together with this one's (D7)."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import Train

from hetexp.hardware.detection.builds import own_build, read_builds

pytestmark = pytest.mark.timeout(400)  # once for all tests here: some 200 MB of wheels are unpacked
NOT_TO_BE_HAD = ("No matching distribution found for torch==", "ResolutionImpossible", "No solution found")
"""What pip and uv say where no source that they know has the build for the CPU."""


def hetexp(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hetexp.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with one environment, `cpu`, made as a person would."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEXP_HOME", str(folder))
        # It comes without bytecode: let its torch be compiled once, not by every process that imports it.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        made = hetexp("env", "create", "cpu")
        if any(sign in made.stderr for sign in NOT_TO_BE_HAD):
            pytest.skip(f"torch's build for the CPU cannot be had here: {made.stderr.splitlines()[-1]}")
        assert made.returncode == 0, made.stdout + made.stderr
    yield folder
    shutil.rmtree(folder)  # it has a gigabyte


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let commands and runs find the environment, and return its interpreter."""
    monkeypatch.setenv("HETEXP_HOME", str(home))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    return str(home / "envs" / "cpu" / "bin" / "python")


def test_it_is_recorded_with_the_torch_that_it_has(at_home: str) -> None:
    (build,) = read_builds([at_home])
    public = torch.__version__.partition("+")[0]
    assert (build.version, build.kind, build.problem) == (f"{public}+cpu", "cpu", None)
    own, made = json.loads(hetexp("env", "list", "--json").stdout)
    assert (own["name"], own["python"], own["torch"]) == ("this", sys.executable, own_build().version)
    assert (made["name"], made["python"], made["torch"]) == ("cpu", at_home, build.version)
    assert made["python_version"] == platform.python_version()
    assert made["problem"] is None


def test_a_rank_trains_under_it(train: Train, at_home: str) -> None:
    run = train(
        "model=mlp",
        "model.hidden_sizes=[8]",
        "data=synthetic",
        "data.num_samples=64",
        "data.num_test_samples=8",
        "trainer.max_steps=3",
        "trainer.max_epochs=null",
        "trainer.global_batch_size=16",
        f"hardware.devices=[cpu,{{device: cpu, python: '{at_home}'}}]",
    )
    assert run.summary["status"] == "completed"
    (build,) = read_builds([at_home])
    assert [one["torch"] for one in run.summary["devices"]] == [torch.__version__, build.version]
    plan = json.loads((run.folder / "plan.json").read_text())
    assert [one["python"] for one in plan["devices"]] == [None, at_home]


def test_check_finds_nothing_wrong(at_home: str) -> None:
    told = hetexp("env", "check")
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.splitlines()[-1] == "Nothing is wrong."


def test_it_is_not_made_twice(home: Path, at_home: str) -> None:
    before = (home / "environments.json").read_text()
    again = hetexp("env", "create", "cpu")
    assert again.returncode == 1
    assert "holds an environment already. Add --force" in again.stderr
    assert (home / "environments.json").read_text() == before
    assert os.access(at_home, os.X_OK)
