"""`hetexp env`: what it prints and when it says that something is wrong; making one is tested elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hetexp.cli import main
from hetexp.commands import env
from hetexp.commands.support import env_check
from hetexp.commands.support.env_check import CheckResult, check, result_table, selected
from hetexp.commands.support.interpreters import Interpreter, interpreters, repair_command
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import RunFailedError, SetupError
from hetexp.hardware.backend import backend_class
from hetexp.hardware.detection.builds import TorchBuild
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.inventory import Inventory
from hetexp.launch.environments.record import record, records
from hetexp.launch.environments.trial import Trial

CUDA_0 = DetectedCard(
    DeviceSpec("cuda:0", "cuda", 0, "NVIDIA A100", "nvidia", driver="580.65.06", architecture="sm_80")
)
CUDA_1 = DetectedCard(DeviceSpec("cuda:1", "cuda", 1, "Tesla V100", "nvidia", architecture="sm_70"))
OWN = Interpreter("this", "/own/python", TorchBuild(None, "2.13.0+cpu"), "3.11.7")
CUDA = Interpreter(
    "fast",
    "/envs/fast/bin/python",
    TorchBuild("/envs/fast/bin/python", "2.13.0+cu130", cuda="13.0"),
    "3.12.1",
)
GONE = Interpreter("rocm", "/gone/bin/python", TorchBuild("/gone/bin/python", problem="No such file"))
GOOD = Trial("3.12.1", "0.1.0", "2.13.0+cu130", {"cpu": 2e-7, "cuda:0": 3e-7})
LOSSES = [2.0, 1.0, 0.5, 0.25]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("hetexp.commands.support.interpreters.detect", lambda **_: Inventory())
    monkeypatch.setattr(env, "detect", lambda **_: Inventory([CUDA_0, CUDA_1]))
    return tmp_path / "home"


def text_of(parts: Any, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        for part in parts:
            console.print(part)
        return console.export_text()


# ---------------------------------------------------------------- list


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    record("gone", Path("/gone/bin/python"))
    assert main(["env", "list", "--json"]) == 0
    own, gone = json.loads(capsys.readouterr().out)
    assert (own["name"], own["python"], own["problem"], own["devices"]) == ("this", sys.executable, None, [])
    assert own["python_version"] == ".".join(map(str, sys.version_info[:3]))
    assert gone == {
        "name": "gone",
        "python": "/gone/bin/python",
        "python_version": None,
        "torch": None,
        "built_for": None,
        "devices": [],
        "problem": "it cannot be started: No such file or directory",
    }


@pytest.mark.parametrize("words", [["env", "list"], ["env", "create", "cpu", "--dry-run"]])
def test_torch_is_not_imported(words: list[str]) -> None:
    """It takes seconds, and may be the very thing that is broken."""
    program = (
        "import sys; from hetexp.cli import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules, code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    assert ended.stdout.endswith("False 0\n"), ended.stderr


def test_list_without_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list"]) == 0
    screen = capsys.readouterr().out
    assert f"this: {sys.executable}" in screen
    assert "No environment is recorded. To make one: hetexp env create cuda" in screen


def test_the_table_in_terminals_of_all_widths() -> None:
    found = [OWN, replace(CUDA, devices=["cuda:0"]), GONE]
    for width in (80, 100, 140):
        screen = text_of(env.listed(found, width), width)
        assert "2.13.0+cu130" in screen
        assert "CUDA 13.0" in screen
        assert "cuda:0" in screen
        assert "none: CPU only" in screen
        assert screen.count("/envs/fast/bin/python") == 1
        assert "rocm cannot be used: No such file" in screen
        assert "   hetexp env create rocm --force\n" in screen


def test_the_cards_that_each_can_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are busy or hidden; not those that are lost or without a driver."""
    spec = CUDA_0.spec
    cards = [
        DetectedCard(spec, hidden_by="CUDA_VISIBLE_DEVICES=", busy="somebody"),
        DetectedCard(CUDA_1.spec, lost="GPU is lost"),
        DetectedCard(CUDA_1.spec, undriven="no driver"),
    ]
    asked = []

    def problem(cls: type, spec: DeviceSpec, build: TorchBuild) -> str | None:
        asked.append(spec.id)
        return None

    monkeypatch.setattr(backend_class("cuda"), "build_problem", classmethod(problem))
    (own,) = interpreters(Inventory(cards))
    assert own.devices == asked == ["cuda:0"]
    assert own.visible == []


@pytest.mark.parametrize(
    ("one", "command"),
    [
        (OWN, "/own/python -m pip install torch"),
        (GONE, "hetexp env create rocm --force"),
        (CUDA, "hetexp env create cuda --name fast --force"),
        (Interpreter("x", "/x", TorchBuild("/x", problem="?")), "hetexp env create cpu --name x --force"),
    ],
)
def test_repair_command(one: Interpreter, command: str) -> None:
    assert repair_command(one) == command


# ---------------------------------------------------------------- create


def test_dry_run_prints_commands_and_changes_nothing(
    capsys: pytest.CaptureFixture[str], own_home: Path
) -> None:
    """V100 beside A100: the build that drives both. The output is a shell script."""
    words = ["--torch", "2.13.0", "--name", "old", "--installer", "pip", "--dry-run"]
    assert main(["env", "create", "cuda", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    folder = own_home / "envs" / "old"
    assert lines[0].startswith("# torch 2.13.0+cu126 from https://download.pytorch.org/whl/cu126 (driver 580")
    assert "2 of 2 NVIDIA cards" in lines[0]
    assert lines[1] == f"# environment 'old' in {folder}, with pip, as --installer says"
    assert lines[2] == f"{sys.executable} -m venv {folder}"
    assert lines[3].endswith("--extra-index-url https://download.pytorch.org/whl/cu126 torch==2.13.0+cu126")
    assert lines[4].endswith(" torch==2.13.0+cu126")
    assert len(lines) == 5
    assert not own_home.exists()


def test_torch_is_this_interpreters_by_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "own_build", lambda: TorchBuild(None, "2.12.1+cu126", cuda="12.6"))
    assert main(["env", "create", "xpu", "--dry-run", "--index", "https://mirror.example/whl"]) == 0
    assert "https://mirror.example/whl torch==2.12.1+xpu\n" in capsys.readouterr().out
    monkeypatch.setattr(env, "own_build", lambda: TorchBuild(None, problem="it has no torch"))
    assert main(["env", "create", "xpu", "--dry-run"]) == 1
    assert "`--torch` must be given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("uv", "own_sources", "wanted", "taken", "why"),
    [
        (None, False, None, None, "pip"),
        ("/bin/uv", False, None, "/bin/uv", "uv"),
        ("/bin/uv", True, None, None, "pip, which is configured with sources that uv does not read"),
        ("/bin/uv", True, "uv", "/bin/uv", "uv, as --installer says"),
        ("/bin/uv", False, "pip", None, "pip, as --installer says"),
    ],
)
def test_the_installer(
    monkeypatch: pytest.MonkeyPatch,
    uv: str | None,
    own_sources: bool,
    wanted: str | None,
    taken: str | None,
    why: str,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: uv)
    monkeypatch.setattr(env, "pip_has_own_sources", lambda: own_sources)
    assert env._installer(wanted) == (taken, why)


def test_uv_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["env", "create", "cpu", "--installer", "uv"]) == 1
    assert "`--installer` must be pip if uv is not installed" in capsys.readouterr().err


def test_what_cannot_be_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A failure is told on the standard error, and nothing is recorded."""
    words = ["--python", "/nowhere/python", "--path", str(tmp_path / "new"), "--installer", "pip"]
    assert main(["env", "create", "cpu", *words]) == 1
    screen = capsys.readouterr()
    assert screen.err == "/nowhere/python cannot be started: No such file or directory.\n"
    assert f"/nowhere/python -m venv {tmp_path / 'new'}\n" in screen.out
    assert records() == {}
    assert not (tmp_path / "new").exists()


def test_progress_is_one_line_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with env._progress() as show:
        show("nobody looks on")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    with env._progress() as show:
        show("  Downloading torch-2.13.0 (190 MB)")
    assert capsys.readouterr().err == "\r\x1b[2KDownloading torch-2\r\x1b[2K"


@pytest.mark.parametrize("words", [[], ["make"], ["create"], ["create", "nvidia"]])
def test_wrong_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["env", *words])
    assert left.value.code == 2
    assert "hetexp env" in capsys.readouterr().err


# ---------------------------------------------------------------- check


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> dict[str, Trial]:
    """What each interpreter is found to do; runs of their own end with the same losses."""
    found = {OWN.python: Trial("3.11.7", "0.1.0", "2.13.0+cpu", {"cpu": 2e-7}), CUDA.python: GOOD}
    monkeypatch.setattr(env_check, "try_interpreter", lambda python: found[python])
    monkeypatch.setattr(env_check, "_losses", lambda overrides: (LOSSES, None))
    return found


def problems(results: list[CheckResult]) -> list[str]:
    return [problem.text for result in results for problem in result.problems]


def test_all_is_well(trials: dict[str, Trial]) -> None:
    results = check([OWN, CUDA])
    assert problems(results) == []
    assert [result.exchange for result in results] == ["not tried", "ok"]
    screen = text_of(result_table(results))
    assert "cpu ok, cuda:0 ok" in screen
    assert screen.endswith("Nothing is wrong.\n")


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        (Trial(problem="it did not answer"), "it cannot be used: it did not answer."),
        (
            Trial("3.12", "0.1.0", "2.13.0", {"cpu": 2e-7, "cuda:0": "no kernel image"}),
            "cuda:0 cannot compute: no kernel image.",
        ),
        (
            Trial("3.12", "0.1.0", "2.13.0", {"cpu": 2e-7, "cuda:0": 0.5}),
            "cuda:0 computes wrong: its float32 result differs from float64's by 5.0e-01",
        ),
        (Trial("3.12", "0.1.0", "2.13.0", {"cpu": float("nan")}), "cpu computes wrong"),
        (
            Trial("3.12", "0.1.0", "2.13.0", {"cpu": 2e-7}),
            "its torch sees no card, though it should drive cuda:0.",
        ),
    ],
)
def test_what_is_wrong_with_an_interpreter(trials: dict[str, Trial], trial: Trial, told: str) -> None:
    trials[CUDA.python] = trial
    results = check([OWN, replace(CUDA, devices=["cuda:0"], visible=["cuda:0"])])
    assert problems(results)[0].startswith(told)
    assert results[1].exchange == "not tried"
    screen = text_of(result_table(results), 200)
    assert f"1. fast: {told}" in screen
    assert "\n   hetexp " in screen


def test_hidden_cards_need_not_be_seen(trials: dict[str, Trial]) -> None:
    trials[CUDA.python] = Trial("3.12", "0.1.0", "2.13.0", {"cpu": 2e-7})
    assert problems(check([OWN, replace(CUDA, devices=["cuda:0"])])) == []


def test_losses_that_differ(trials: dict[str, Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(overrides: list[str]) -> tuple[list[float], None]:
        return ([2.0, 1.0, 0.5, 0.25000001] if "strategy=ddp" in overrides else LOSSES), None

    monkeypatch.setattr(env_check, "_losses", losses)
    results = check([OWN, CUDA])
    assert results[1].exchange == "wrong"
    (problem,) = problems(results)
    assert problem.startswith(
        "trained together with this interpreter, its losses differ from a single device's by 4.0e-08"
    )


def test_a_run_that_fails(trials: dict[str, Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(overrides: list[str]) -> tuple[list[float], str | None]:
        assert all(isinstance(word, str) for word in overrides)
        return (LOSSES, None) if "strategy=single" in overrides else ([], "rank 1 failed. What it left …")

    monkeypatch.setattr(env_check, "_losses", losses)
    results = check([OWN, CUDA])
    assert results[1].exchange == "failed"
    assert problems(results) == [
        "it cannot train together with this interpreter: rank 1 failed. What it left …"
    ]
    monkeypatch.setattr(env_check, "_losses", lambda overrides: ([], "no room."))
    results = check([OWN, CUDA])
    assert problems(results) == ["Training on the CPU alone failed: no room."]
    assert results[1].exchange == "not tried"


def test_a_run_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, where a person's own `conf/` has another `mlp`; then one that cannot be."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mlp.yaml").write_text("_target_: nowhere.Net\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    losses, problem = env_check._losses(["hardware.devices=[cpu]", "strategy=single"])
    assert problem is None
    assert len(losses) == 4
    # With cards, runs agree there on who uses them; `home` notes which hints were shown.
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("hetexp-leases-")}
    assert left - {"home"} == {"conf"}
    assert Path.cwd() == tmp_path
    python = json.dumps(str(tmp_path / "python"))
    losses, problem = env_check._losses([f"hardware.devices=[cpu,{{device: cpu, python: {python}}}]"])
    assert losses == []
    assert problem is not None
    assert "`hardware.devices[1].python` must be the path of an interpreter" in problem
    assert f"What it left is in {tmp_path}" in problem


def test_ctrl_c_ends_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*_: object) -> None:
        raise RunFailedError("stopped by SIGINT", exit_code=130)

    monkeypatch.setattr("hetexp.app.run", stopped)
    monkeypatch.setattr(env_check, "try_interpreter", lambda python: GOOD)
    record("one", Path(sys.executable))
    assert main(["env", "check"]) == 130


def test_names() -> None:
    assert selected([OWN, CUDA, GONE], []) == [OWN, CUDA, GONE]
    assert selected([OWN, CUDA, GONE], ["rocm"]) == [OWN, GONE]
    with pytest.raises(
        SetupError, match="must be one of this, fast, rocm, but is 'fats' instead. Did you mean `fast`"
    ):
        selected([OWN, CUDA, GONE], ["fats"])


def test_the_exit_code(trials: dict[str, Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "interpreters", lambda: [OWN, CUDA])
    assert main(["env", "check"]) == 0
    trials[CUDA.python] = Trial(problem="it did not answer")
    assert main(["env", "check"]) == 1
    assert main(["env", "check", "this"]) == 0
    assert main(["env", "check", "nobody"]) == 1
