"""A sweep's jobs: how each end is written down, what is skipped, who may start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hetexp.core.errors import ConfigError, RunFailedError, SetupError
from hetexp.core.sweep.folder import SweepRow, append_row, read_rows
from hetexp.launch.sweep import run as module
from hetexp.launch.sweep.end import concluded
from hetexp.launch.sweep.run import Start, as_typed, run_job
from hetexp.plan.planner import run_id
from hetexp.plan.run_spec import Request

TYPED = ("trainer.max_steps=2", "trainer.seed=0,1")


def request_of(sweep: Path, folder: str, *overrides: str) -> Request:
    return Request(sweep / folder, Path.cwd(), overrides=("trainer.max_steps=2", *overrides), sweep=sweep)


def failing(error: BaseException) -> Callable[[], dict[str, Any]]:
    def start() -> dict[str, Any]:
        raise error

    return start


def config_of(folder: Path, *overrides: str, **sweep: Any) -> Any:
    hydra = {"sweep": {"dir": str(folder)}, "overrides": {"task": list(overrides)}}
    return OmegaConf.create({"hydra": hydra, "sweep": sweep})


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Start a sweep as Hydra does, without the end of it."""
    monkeypatch.setattr(module, "_under_way", None)
    monkeypatch.setattr(module, "_typed", [])

    def start(folder: Path, *overrides: str, **sweep: Any) -> None:
        as_typed(["train.py", "-m", *overrides])
        Start().on_multirun_start(config=config_of(folder, *overrides, **sweep))

    return start


@pytest.mark.parametrize(
    ("error", "status", "told", "written"),
    [
        (
            ConfigError(["`a` must be 1.", "`b` must be 2."]),
            "refused",
            "`a` must be 1. (and 1 more)",
            "2. `b` must be 2.",
        ),
        (
            RunFailedError("rank 1 failed: no", details="Traceback\n  here"),
            "failed",
            "rank 1 failed: no",
            "  here",
        ),
        (RunFailedError("stopped by SIGTERM", 143), "interrupted", "stopped by SIGTERM", None),
        (SetupError("no port"), "failed", "no port", "no port"),
        (ZeroDivisionError("oh"), "failed", "ZeroDivisionError: oh", "in failing"),
        (KeyboardInterrupt(), "interrupted", "stopped by KeyboardInterrupt", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_end_has_a_row(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: str,
    told: str,
    written: str | None,
) -> None:
    with pytest.raises(type(error)):
        run_job(3, request_of(tmp_path, "3-2", "trainer.seed=1"), failing(error))
    (row,) = read_rows(tmp_path)
    assert (row.job, row.folder, row.status, row.error) == (3, "3-2", status, told)
    assert row.overrides == ("trainer.max_steps=2", "trainer.seed=1")
    path = tmp_path / "3-2" / "error.txt"
    assert path.exists() == (written is not None)
    if written is not None:
        expected = "in start" if written == "in failing" else written
        assert expected in path.read_text()
        assert told in capsys.readouterr().out


def test_a_completed_run_is_skipped_when_the_sweep_starts_again(
    tmp_path: Path, begin: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path, *TYPED)
    summary = {"status": "completed", "samples_per_s": 3.0}
    first = request_of(tmp_path, "0", "trainer.seed=0")
    first.run_dir.mkdir()
    (first.run_dir / "summary.json").write_text(json.dumps(summary))
    assert run_job(0, first, lambda: summary) == summary
    assert run_job(1, request_of(tmp_path, "1", "trainer.seed=0"), lambda: {"twice": 1}) == {"twice": 1}
    module.finished()
    begin(tmp_path, *TYPED)
    again = request_of(tmp_path, "0", "sweep.name=x", "trainer.seed=0")
    assert run_job(5, again, failing(AssertionError("it must not run"))) == summary
    assert "Run 5 (trainer.seed=0) completed before: skipped.\n" in capsys.readouterr().out
    assert len(read_rows(tmp_path)) == 2
    module.finished()


def test_the_start_is_noted_and_the_first_one_kept(tmp_path: Path, begin: Callable[..., None]) -> None:
    begin(tmp_path, *TYPED)
    module.finished()
    begin(tmp_path, "trainer.seed=0,1,2", "resume='a=b'")
    module.finished()
    note = json.loads((tmp_path / "sweep.json").read_text())
    assert note["command"] == ["python", "train.py", "-m", *TYPED]
    assert note["overrides"] == list(TYPED)
    assert note["process"] == os.getpid()
    assert note["started_at"].endswith("+00:00")
    (later,) = note["continued"]
    assert later["overrides"] == ["trainer.seed=0,1,2", "resume='a=b'"]


def test_a_sweep_that_another_process_runs_is_refused(
    tmp_path: Path, begin: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import sys\n"
        "from omegaconf import OmegaConf\n"
        "from hetexp.launch.sweep.run import Start\n"
        "hydra = {'sweep': {'dir': sys.argv[1]}, 'overrides': {'task': []}}\n"
        "Start().on_multirun_start(config=OmegaConf.create({'hydra': hydra}))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(SystemExit) as ended:
            begin(tmp_path)
        owner.kill()  # and nobody holds it any more
        owner.stdin.close()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"{tmp_path} is run by process {owner.pid} since 20" in told
    begin(tmp_path)
    module.finished()


@pytest.mark.parametrize("ending", [None, SystemExit(1), SystemExit(143), KeyboardInterrupt()])
def test_the_end_is_told_whatever_it_is(
    tmp_path: Path, begin: Callable[..., None], monkeypatch: pytest.MonkeyPatch, ending: BaseException | None
) -> None:
    told: list[tuple[Path, int]] = []

    def conclude(sweep: module.UnderWay, exit_code: int) -> bool:
        told.append((sweep.folder, exit_code))
        return True  # one did not complete

    monkeypatch.setattr("hetexp.launch.sweep.end.conclude", conclude)

    def sweep() -> None:
        with concluded():
            begin(tmp_path, report=False)
            if ending is not None:
                raise ending

    with pytest.raises((SystemExit, KeyboardInterrupt)) as raised:
        sweep()
    codes = {None: 0, "1": 1, "143": 143, "": 130}
    assert told == [(tmp_path, codes[None if ending is None else str(ending)])]
    assert ending is None or raised.value is ending
    if ending is None:
        assert isinstance(raised.value, SystemExit)
        assert raised.value.code == 1  # though whoever ran the jobs let it pass


def test_without_a_sweep_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetexp.launch.sweep.end.conclude", failing(AssertionError()))
    with concluded():
        pass
    with pytest.raises(SystemExit, match="3"), concluded():
        raise SystemExit(3)


def test_hetexp_train_is_typed_so() -> None:
    as_typed(["/home/me/.venv/bin/hetexp", "-m", "a=1,2"])
    assert module.typed() == ["hetexp", "train", "-m", "a=1,2"]


def test_attempts_at_a_run_are_runs_of_their_own() -> None:
    sweep = Path("/work/outputs/sweeps/2026-11-28/14-03-02-ff8120")
    assert run_id(sweep / "1") != run_id(sweep / "1-2")
    named = Path("/work/outputs/sweeps/mine/1-2")
    assert run_id(named) != run_id(named)


def test_a_row_of_a_folder_elsewhere(tmp_path: Path) -> None:
    """`hydra.sweep.subdir` may be a person's own."""
    sweep, run = tmp_path / "sweep", tmp_path / "sweep" / "seeds" / "0"
    run.mkdir(parents=True)
    run_job(0, Request(run, tmp_path, overrides=("a=1",), sweep=sweep), dict)
    append_row(sweep, SweepRow(1, ("a=2",), "1", "failed", None, "", 0.0))
    assert [row.folder for row in read_rows(sweep)] == ["seeds/0", "1"]
