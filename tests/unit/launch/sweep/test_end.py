"""The end of a sweep: the table, what failed and how to run that again, and the report."""

from __future__ import annotations

import io
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console
from support import plan_on, unbuilt_config

from hetexp.core.device import DeviceSpec
from hetexp.core.summary import blank_summary
from hetexp.core.sweep.folder import SweepRow, append_row, read_rows
from hetexp.launch.sweep import end as sweep_end
from hetexp.launch.sweep.end import again, conclude
from hetexp.launch.sweep.run import UnderWay

CPU = DeviceSpec("cpu:0", "cpu", 0, "CPU", "cpu")
Reports = list[tuple[list[Path], Path, str]]


def end_run(sweep: Path, folder: str, *overrides: str, status: str = "completed", **summary: Any) -> None:
    """Leave what a run of the sweep leaves: its folder and its row."""
    run = sweep / folder
    run.mkdir(parents=True)
    error = None if status == "completed" else f"\n`a` is wrong in {folder}\nand more"
    if status != "refused":
        plan = plan_on([CPU], unbuilt_config(trainer={"seed": 0}))
        plan.write(run / "plan.json")
        whole = blank_summary(plan, status) | summary
        (run / "summary.json").write_text(json.dumps(whole))
    if error is not None:
        (run / "error.txt").write_text(error)
    key = tuple(sorted(("model=mlp", *overrides)))
    append_row(sweep, SweepRow(int(folder[0]), key, folder, status, error, "2026-01-31T12:00:00+00:00", 1.0))


def told(
    sweep: Path, exit_code: int = 0, before: int = 0, report: bool = True, grid: bool = True
) -> tuple[bool, str]:
    rows = read_rows(sweep)
    under_way = UnderWay(sweep, FileLock(sweep / ".sweep.lock"), report, rows[:before], grid)
    screen = io.StringIO()
    return conclude(under_way, exit_code, Console(file=screen, width=110)), screen.getvalue()


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_end, "typed", lambda: ["python", "train.py", "-m", "trainer.seed=0,1,2"])


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    calls: Reports = []

    def write_report(paths: list[Path], folder: Path, title: str) -> Path:
        calls.append((list(paths), folder, title))
        return folder / "report.html"

    module = ModuleType("hetexp.report.write")
    module.write_report = write_report  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hetexp.report.write", module)
    return calls


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of three runs in a person's folder: completed (emulated), refused, failed."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "sweeps" / "mine"
    folder.mkdir(parents=True)
    figures: dict[str, Any] = {
        "samples_per_s": 100.0,
        "time_scale": 20.0,
        "efficiency": 0.875,
        "valid": False,
    }
    end_run(folder, "0", "trainer.seed=0", **figures)
    end_run(folder, "1", "trainer.seed=1", status="refused")
    end_run(folder, "2-2", "trainer.seed=2", status="failed")
    return folder


def test_one_table_and_what_failed(sweep: Path, reports: Reports) -> None:
    failed, screen = told(sweep, exit_code=1, before=1)
    assert failed
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in screen.splitlines() if "│" in line]
    assert lines == [
        ["0", "trainer.seed=0", "completed before, not valid", "2,000", "87.5%"],  # in modelled time
        ["1", "trainer.seed=1", "refused", "", ""],
        ["2-2", "trainer.seed=2", "failed", "", ""],
    ]
    assert "2 of the runs did not complete:\n  1  `a` is wrong in 1\n" in screen
    assert f"     {sweep / '2-2' / 'error.txt'}\n" in screen
    assert "\n  python train.py -m trainer.seed=0,1,2 sweep.name=mine\n" in screen
    assert reports == [([sweep], sweep, "Sweep mine")]
    assert f"Report: {sweep / 'report.html'}\n" in screen


def test_a_search_goes_on_with_other_runs(sweep: Path, reports: Reports) -> None:
    assert "Only these run again with\n" in told(sweep)[1]
    screen = told(sweep, grid=False)[1]
    assert "The search goes on with\n  python train.py" in screen
    assert "Only these" not in screen


def test_what_failed_in_an_earlier_start_is_not_this_ones(sweep: Path, reports: Reports) -> None:
    failed, screen = told(sweep, before=3)
    assert not failed
    assert "refused before" in screen
    assert "did not complete" not in screen
    assert len(reports) == 1


def test_after_a_signal_there_is_nothing_to_compare(sweep: Path, reports: Reports) -> None:
    failed, screen = told(sweep, exit_code=143)
    assert failed
    assert "│" not in screen
    assert screen.endswith("  python train.py -m trainer.seed=0,1,2 sweep.name=mine\n")
    assert reports == []


def test_without_a_report(sweep: Path, reports: Reports) -> None:
    _, screen = told(sweep, report=False)
    assert reports == []
    assert "Report:" not in screen
    assert "could not be written" not in screen


@pytest.mark.parametrize("seeds", [1, 2])
def test_without_a_summary_there_is_no_report(tmp_path: Path, reports: Reports, seeds: int) -> None:
    for seed in range(seeds):
        end_run(tmp_path, str(seed), f"trainer.seed={seed}", status="refused")
    assert told(tmp_path, exit_code=1)[0]
    assert reports == []


def test_a_run_whose_process_was_killed_is_listed(sweep: Path, reports: Reports) -> None:
    for folder, seed in (("3", 3), ("0-2", 0)):  # the second has completed in another attempt
        hydra = sweep / folder / ".hydra"
        hydra.mkdir(parents=True)
        (hydra / "overrides.yaml").write_text(f"- trainer.seed={seed}\n- model=mlp\n- sweep.name=mine\n")
    failed, screen = told(sweep, exit_code=1, before=1)
    assert failed
    assert "3 of the runs did not complete" in screen
    assert "  3  its process ended without a word" in screen
    assert read_rows(sweep)[-1].overrides == ("model=mlp", "trainer.seed=3")
    assert [row.folder for row in read_rows(sweep)] == ["0", "1", "2-2", "3"]


def test_nothing_ran(tmp_path: Path, reports: Reports) -> None:
    assert told(tmp_path, exit_code=1) == (False, "")


def test_a_report_that_cannot_be_written_makes_no_run_worse(
    tmp_path: Path, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(sys.modules["hetexp.report.write"], "write_report", fail)
    end_run(tmp_path, "0", "trainer.seed=0", samples_per_s=1.0)
    failed, screen = told(tmp_path)
    assert not failed
    assert "The report could not be written (OSError: disk full)." in screen
    assert asdict(read_rows(tmp_path)[0])["status"] == "completed"


def test_the_command_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["hetexp", "train", "-m", "resume='a=b'", "name=a b"]
    typed = [*words, "hydra.sweep.dir=out/${now:%H}", "sweep.name=old"]
    assert shlex.split(again(tmp_path / "a", typed)) == [*words, f"hydra.sweep.dir={tmp_path}/a"]
    (last,) = shlex.split(again(tmp_path / "it's a=b", typed))[len(words) :]
    assert OverridesParser.create().parse_override(last).value() == f"{tmp_path}/it's a=b"
    by_time = tmp_path / "outputs/sweeps/2026-11-28/14-03-02-ff8120"
    assert shlex.split(again(by_time, typed)) == [*words, "sweep.name=2026-11-28/14-03-02-ff8120"]
