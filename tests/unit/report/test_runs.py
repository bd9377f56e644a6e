"""Run folders read back: whatever became of a run, it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import write_run

from hetexp.core.errors import ConfigError
from hetexp.core.sweep.folder import SweepRow, append_row
from hetexp.report.runs import canonical, differing, read_runs


def row(
    job: int, folder: str, *overrides: str, status: str = "completed", error: str | None = None
) -> SweepRow:
    return SweepRow(job, tuple(sorted(overrides)), folder, status, error, "2026-01-31T12:00:00+00:00", 1.0)


def unstarted(folder: Path, *overrides: str) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(list(overrides)))
    return folder


def test_every_wrong_folder_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_runs([tmp_path / "a", tmp_path / "b"])
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="must be a folder with runs in it"):
        read_runs([tmp_path])


def test_runs_are_found_below_by_the_numbers_of_their_jobs(tmp_path: Path) -> None:
    for name in ("day/10", "day/9", "day/other/x"):
        write_run(tmp_path / name)
    found = read_runs([tmp_path, tmp_path / "day" / "9"])
    assert [run.folder.name for run in found] == ["9", "10", "x"]
    assert all(run.completed and run.seed == 0 for run in found)


def test_runs_without_an_end_say_why(tmp_path: Path) -> None:
    (write_run(tmp_path / "0") / "summary.json").unlink()
    unstarted(tmp_path / "1", "strategy=ddp", "optimizer.lr=-1", "trainer.seed=3")
    (unstarted(tmp_path / "2") / "prediction.json").write_text("{}")  # plan_only: no run
    write_run(unstarted(tmp_path / "3") / "calibration")  # measuring is a part of a run
    (write_run(tmp_path / "4") / "plan.json").write_text('{"half": ')
    (write_run(tmp_path / "5") / "summary.json").write_text("[]")
    found = read_runs([tmp_path])
    assert [run.folder.name for run in found] == ["0", "1", "3", "4", "5"]
    assert {run.status for run in found} == {"unfinished"}
    errors = [run.summary["error"] for run in found]
    assert "it is running, or was killed" in errors[0]
    assert "its configuration was refused" in errors[1]
    assert "it still measures its devices" in errors[2]
    assert "its files cannot be read (JSONDecodeError" in errors[3]
    assert "its files cannot be read" in errors[4]
    assert found[1].setting("optimizer.lr") == "-1"
    assert found[1].seed == 3


def test_a_sweep_has_the_newest_attempt_and_the_runs_under_way(tmp_path: Path) -> None:
    for number, seed in enumerate((0, 0, 1, 2)):
        write_run(tmp_path / str(number), seed=seed, overrides=[f"trainer.seed={seed}"])
    (tmp_path / "3" / "summary.json").unlink()
    append_row(tmp_path, row(0, "0", "trainer.seed=0", status="failed", error="boom"))
    append_row(tmp_path, row(0, "1", "trainer.seed=0"))
    append_row(tmp_path, row(1, "2", "trainer.seed=1"))
    append_row(tmp_path, row(9, "9", "trainer.seed=x", status="refused", error="`trainer.seed` must be …"))
    found = read_runs([tmp_path])
    assert [(run.folder.name, run.status) for run in found] == [
        ("1", "completed"),
        ("2", "completed"),
        ("9", "refused"),
        ("3", "unfinished"),
    ]
    assert found[2].plan is None
    assert found[2].summary["error"] == "`trainer.seed` must be …"


def test_a_log_of_a_run_that_was_killed_and_repeats_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    train = {"train/loss": 1.0, "step_seconds": 1.0, "samples_per_second": 1.0, "train/samples": 1}
    lines = [
        {"step": 2, **train},
        {"step": 4, **train},
        {"step": 4, "eval/loss": 9.0},
        {"step": 6, **train},
        {"step": 4, **train, "train/loss": 5.0},
        {"step": 4, "device/cpu:0/eval_loss": 7.0, "eval/loss": 7.5},
        {"step": 4, "merge/loss": 3.0},
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 8, "tra')
    (run,) = read_runs([folder])
    assert [(line["step"], line.get("train/loss")) for line in run.metrics] == [(2, 1.0), (4, 5.0), (4, None)]
    assert run.metrics[-1]["eval/loss"] == 7.5
    assert run.metrics[-1]["merge/loss"] == 3.0


def test_settings_are_those_that_were_asked_for(tmp_path: Path) -> None:
    fallback = {"from": "local_sgd", "to": "single", "reason": "because"}
    write_run(tmp_path / "0", strategy="single", plan={"fallback": fallback}, fallback=fallback)
    alone = fallback | {"from": "single"}
    write_run(tmp_path / "1", strategy="single", plan={"fallback": alone}, fallback=alone)
    write_run(tmp_path / "2", strategy="ddp", overrides=["strategy=auto", "+model.width=1e-1", "~data"])
    fell, single, picked = read_runs([tmp_path])
    assert fell.setting("strategy") == "local_sgd"
    assert fell.fallback == fallback
    assert single.setting("strategy") == "single"
    assert single.fallback is None  # one of several devices is what it asks for
    assert picked.setting("strategy") == "auto"
    assert picked.setting("model.width") == "0.1"
    assert picked.setting("data") is None


def test_what_differs_does_not_depend_on_how_it_was_written_or_on_refused_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "0", overrides=["trainer.max_steps=4", "balancing.weights=[1, 3]"])
    write_run(tmp_path / "1", overrides=["balancing.weights=[1,3]"], choices={"model": "mlp"})
    write_run(tmp_path / "2", overrides=["balancing.weights=[3,1]"], trainer={"max_steps": 8}, seed=5)
    unstarted(tmp_path / "3", "balancing.weights=[1,x]", "hydra.job.num=1", "sweep.name=other")
    runs = read_runs([tmp_path])
    assert differing(runs[:2]) == ["model"]
    # The group is known of all runs with a plan; of the refused one nobody knows, and nobody asks.
    assert differing(runs) == ["trainer.max_steps", "balancing.weights", "model"]
    assert differing(runs, without=["model"]) == ["trainer.max_steps", "balancing.weights"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[1, 3]", [1, 3]),
        ("1e-3", 0.001),
        ("null", None),
        ("true", True),
        ("ddp", "ddp"),
        ("[a, b]", "[a,b]"),
    ],
)
def test_values_have_one_text(one: object, other: object) -> None:
    assert canonical(one) == canonical(other)
