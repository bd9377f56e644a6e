"""Case 22: ranks under interpreters of their own, since one build of torch cannot drive two vendors.

The runs under two versions of torch need a second environment: `make second-venv`, or

    python tests/integration/make_second_venv.py .venv-second
    HETEXP_SECOND_PYTHON=$PWD/.venv-second/bin/python pytest tests/integration/test_interpreters.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import Train, worst

from hetexp.core.errors import ConfigError, SetupError
from hetexp.launch.processes.members import package_root

VARIABLE = "HETEXP_SECOND_PYTHON"
STEPS = 10
COMMON = (
    "model=mlp",
    "model.hidden_sizes=[32]",
    "data=synthetic",
    "data.num_samples=240",
    "data.num_test_samples=50",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)
ASK = """
import importlib.util, json, sys, torch
sys.path = [path for path in sys.path if path]
spec = importlib.util.find_spec("hetexp")
print(json.dumps([torch.__version__, spec is not None]))
"""


def devices(python: str | Path) -> str:
    return f"hardware.devices=[cpu,{{device: cpu, python: '{python}'}}]"


@pytest.fixture(scope="module")
def second() -> tuple[str, str]:
    """An interpreter with another torch and without hetexp, and its torch's version."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no interpreter; `make second-venv` makes one and tells how to use it")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(
        [python, "-c", ASK], check=True, capture_output=True, text=True, env=environment, cwd="/"
    )
    version, has_hetexp = json.loads(answer.stdout)
    assert version != torch.__version__, f"{VARIABLE} must have another torch than this interpreter"
    assert not has_hetexp, f"{VARIABLE} must not have hetexp installed: it is to come from this clone"
    return python, version


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """An interpreter that has nothing but Python, made of the same binary as ours."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return tmp_path / "bare" / "bin" / "python"


@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_two_versions_of_torch_learn_the_same(train: Train, second: tuple[str, str], method: str) -> None:
    """Also where ranks are forked: a rank of another interpreter never is."""
    python, version = second
    reference = train(*COMMON, "hardware=cpu", "strategy=single")
    options = ("balancing=manual", "balancing.weights=[24,8]", f"launch.start_method={method}")
    mixed = train(*COMMON, *options, devices(python))
    assert [device["torch"] for device in mixed.summary["devices"]] == [torch.__version__, version]
    loss, parameters = worst(mixed, reference, STEPS)
    print(f"loss {loss:.2e}, parameters {parameters:.2e}, torch {torch.__version__} and {version}")
    assert loss <= 1e-12
    assert parameters <= 1e-12


def test_hetexp_comes_from_the_launchers_clone(train: Train, second: tuple[str, str]) -> None:
    """The second environment has no hetexp of its own."""
    assert package_root() == str(Path(__file__).parents[2])
    run = train(*COMMON, "trainer.max_steps=1", devices(second[0]))
    assert run.summary["status"] == "completed"
    assert Path(json.loads((run.folder / "plan.json").read_text())["devices"][1]["python"]) == Path(second[0])


@pytest.mark.parametrize("method", ["subprocess", "forkserver"])
def test_an_interpreter_without_torch(train: Train, bare: Path, tmp_path: Path, method: str) -> None:
    with pytest.raises(SetupError) as caught:
        train(*COMMON, f"launch.start_method={method}", devices(bare), folder=tmp_path / "run")
    message = str(caught.value)
    assert message.startswith("The interpreter of cpu:1 (")
    assert f", {bare}, lacks torch, numpy, " in message
    assert "hetexp," not in message  # it would come from the clone
    assert f"{bare} -m pip install hetexp" in message
    assert not (tmp_path / "run" / "plan.json").exists()  # nothing was started


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        (
            "#!/bin/sh\nexec /bin/false\n",
            0o755,
            "is no Python that can run a rank: it ended with exit code 1.",
        ),
        ("#!/bin/sh\necho not for us >&2; exit 2\n", 0o755, "is no Python that can run a rank: not for us."),
        ("not a program\n", 0o644, "cannot be started: Permission denied"),
        ('#!/bin/sh\necho "[[3, 8], []]"\n', 0o755, "must be Python 3.10 or newer, but is 3.8."),
    ],
)
def test_what_is_no_interpreter(train: Train, tmp_path: Path, text: str, mode: int, told: str) -> None:
    python = tmp_path / "python"
    python.write_text(text)
    python.chmod(mode)
    with pytest.raises(SetupError) as caught:
        train(*COMMON, devices(python))
    assert "The interpreter of cpu:1 (" in str(caught.value)
    assert f", {python}, {told}" in str(caught.value)


def test_an_interpreter_that_is_not_there(train: Train) -> None:
    with pytest.raises(ConfigError) as caught:
        train(*COMMON, devices("/nowhere/python"))
    (problem,) = caught.value.problems
    assert problem.startswith("`hardware.devices[1].python` must be the path of an interpreter")


def test_a_folder_with_modules_of_pythons_names(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person's own `random.py` where they work must not hide Python's from a rank."""
    work = tmp_path / "work"
    work.mkdir()
    for name in ("random", "logging", "torch"):
        (work / f"{name}.py").write_text(f"raise SystemExit('not the {name} that was meant')\n")
    with monkeypatch.context() as patch:
        patch.chdir(work)
        run = train(*COMMON, "trainer.max_steps=1", "hardware=cpu", "launch.start_method=subprocess")
    assert run.summary["status"] == "completed"
