"""An interpreter is tried in a process of its own, whatever becomes of that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import hetexp
from hetexp.launch.environments import trial
from hetexp.launch.environments.trial import TOLERANCE, Trial, try_interpreter


def program(folder: Path, text: str) -> str:
    """An interpreter that is a shell's script."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_this_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever one stands: a person's own `random.py` there is not Python's."""
    (tmp_path / "random.py").write_text("raise SystemExit('not the one that was meant')\n")
    monkeypatch.chdir(tmp_path)
    told = try_interpreter(sys.executable)
    assert told.problem is None
    assert (told.hetexp_version, told.torch_version) == (hetexp.__version__, torch.__version__)
    assert told.python_version == ".".join(map(str, sys.version_info[:3]))
    assert told.errors is not None
    error = told.errors["cpu"]
    assert isinstance(error, float)
    assert 0 < error < TOLERANCE  # float32 is not float64


def test_what_it_says_of_each_device(tmp_path: Path) -> None:
    answer = '["3.12.1", "0.1.0", "2.13.0+cu130", [["cpu", 2e-7, null], ["cuda:0", null, "no kernel image"]]]'
    told = try_interpreter(program(tmp_path, f"echo '{answer}'"))
    errors: dict[str, float | str] = {"cpu": 2e-7, "cuda:0": "no kernel image"}
    assert told == Trial("3.12.1", "0.1.0", "2.13.0+cu130", errors)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo 'ImportError: no libcudart' >&2; exit 1", "ImportError: no libcudart"),
        ("kill -SEGV $$", "it ended with exit code -11"),
        ("exit 0", "it ended with exit code 0"),
    ],
)
def test_what_goes_wrong(tmp_path: Path, text: str, problem: str) -> None:
    assert try_interpreter(program(tmp_path, text)) == Trial(problem=problem)


def test_what_is_no_program(tmp_path: Path) -> None:
    told = try_interpreter(str(tmp_path / "nowhere"))
    assert told.problem == "it cannot be started: No such file or directory"


def test_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.2)
    assert try_interpreter(program(tmp_path, "exec sleep 60")).problem == "it did not answer within 0.2 s"
