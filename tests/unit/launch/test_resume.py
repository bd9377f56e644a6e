"""Which run `resume=auto`, `last`, `best` and `step:N` go on from, and what is told of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import spec_on, unbuilt_config

from hetexp.checkpoint.manifest import write_folder
from hetexp.core.errors import CheckpointError, ConfigError
from hetexp.core.files import lock_folder
from hetexp.launch.resume import FoundRun, find, held
from hetexp.plan.run_spec import RunSpec

NEW = "outputs/2026-02-02/08-00-00-aaaaaa"


def job(folder: Path, resume: str | None, run_dir: str = NEW, **trainer: Any) -> RunSpec:
    raw = unbuilt_config(trainer=trainer, resume=None) | {"resume": resume, "name": None}
    return spec_on([], raw, run_dir=folder / run_dir, working_dir=folder)


def asked(spec: RunSpec, **changes: Any) -> RunSpec:
    return spec.replaced(request=replace(spec.request, **changes))


def ran(
    folder: Path, place: str, steps: tuple[int, ...], age: float, status: str | None = None, **changes: Any
) -> Path:
    """Leave a run behind, which began `age` seconds ago."""
    run = folder / place
    run.mkdir(parents=True)
    trainer = changes.pop("trainer", {})
    raw = unbuilt_config(trainer=trainer) | {"resume": None, "name": None, **changes}
    plan = run / "plan.json"
    plan.write_text(json.dumps({"config": raw, "script": None, "script_arguments": []}))
    os.utime(plan, (1e9 - age, 1e9 - age))
    for step in steps:
        with write_folder(run / "checkpoints", step, evaluation={"loss": float(step)}) as one:
            (one / "part").write_text("")
    if status:
        (run / "summary.json").write_text(json.dumps({"status": status}))
    return run


def test_auto_goes_on_from_the_newest_run_of_the_same_job(tmp_path: Path) -> None:
    ran(tmp_path, "outputs/2026-01-31/12-00-00-a", (1, 2), 30.0)
    mine = ran(tmp_path, "outputs/2026-02-01/12-00-00-b", (3, 4), 20.0, "failed")
    ran(tmp_path, "outputs/2026-02-01/13-00-00-c", (), 10.0)
    ran(tmp_path, "outputs/2026-02-01/14-00-00-d", (9,), 5.0, trainer={"seed": 7})
    ran(tmp_path, "outputs/2026-02-01/15-00-00-e", (9,), 5.0, name="another")
    ran(tmp_path, "outputs/2026-02-01/16-00-00-f", (9,), 5.0, model={"_target_": "another"})
    (tmp_path / "outputs/2026-02-01/17-00-00-g").mkdir()
    (tmp_path / "outputs/2026-02-01/17-00-00-g/plan.json").write_text("{")
    found = find(job(tmp_path, "auto"))
    assert found.path == mine / "checkpoints" / "step_00000004" and not found.in_place
    assert "13-00-00-c' was passed over: it has no complete checkpoint." in found.sentences[0]
    assert "resume: goes on from" in found.sentences[1] and len(found.sentences) == 2
    assert find(job(tmp_path, "best")).path == mine / "checkpoints" / "step_00000003"
    assert find(job(tmp_path, "step:3")).path == mine / "checkpoints" / "step_00000003"
    with pytest.raises(CheckpointError, match=r"step of a checkpoint in .* \(3, 4\)"):
        find(job(tmp_path, "step:1"))
    other_devices = job(tmp_path, "last")
    other_devices.raw["hardware"]["devices"] = ["cpu", "cpu"]
    assert find(other_devices).path == mine / "checkpoints" / "step_00000004"


def test_auto_begins_anew_where_nothing_is_to_be_gone_on_from(tmp_path: Path) -> None:
    assert find(job(tmp_path, None)) == FoundRun(None)
    begun = find(job(tmp_path, "auto"))
    assert begun.path is None and "there is no run of the same job in" in begun.sentences[0]
    assert "A new training begins." in begun.sentences[0]
    run = ran(tmp_path, "outputs/2026-02-01/12-00-00-b", (1,), 20.0, "completed")
    done = find(job(tmp_path, "auto"))
    assert done.path is None and "is complete, and no more steps are asked for" in done.sentences[0]
    more = find(job(tmp_path, "auto", max_steps=5))
    assert more.path == run / "checkpoints" / "step_00000001"
    assert find(job(tmp_path, "last")).path == more.path  # whoever names it gets it
    (run / "checkpoints" / "step_00000001" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="`resume` must be of a run of the same job, but is 'last'"):
        find(job(tmp_path, "last"))


def test_a_run_that_still_runs_is_not_taken(tmp_path: Path) -> None:
    run = ran(tmp_path, "outputs/2026-02-01/12-00-00-b", (1,), 20.0)
    with held(FoundRun(None), run), pytest.raises(ConfigError, match="of a run that has ended"):
        find(job(tmp_path, "auto"))
    assert find(job(tmp_path, "auto")).path is not None


def test_a_fixed_run_folder_goes_on_in_its_place(tmp_path: Path) -> None:
    ran(tmp_path, "runs/other", (9,), 1.0)
    mine = ran(tmp_path, "runs/mine", (1, 2), 20.0, "interrupted")
    (mine / "logs").mkdir()
    found = find(job(tmp_path, "auto", "runs/mine"))
    assert found.path == mine / "checkpoints" / "step_00000002" and found.in_place
    with held(found, mine):
        assert not (mine / "summary.json").exists() and not (mine / "logs").exists()
        assert found.path is not None
        with lock_folder(found.path, wait=False) as free:
            assert not free  # rotation would not delete it
    for resume in (None, "best", "step:1", "runs/other"):
        with pytest.raises(ConfigError, match=r"holds a run already.*With resume=auto it goes on there"):
            find(job(tmp_path, resume, "runs/mine"))
    (mine / "summary.json").write_text(json.dumps({"status": "completed"}))
    finished = find(job(tmp_path, "auto", "runs/mine"))
    assert finished.finished and "Nothing is done." in finished.sentences[0]
    empty = ran(tmp_path, "runs/empty", (), 0.0)
    begun = find(job(tmp_path, "auto", "runs/empty"))
    assert begun.path is None and begun.in_place and f"'{empty}' has no complete" in begun.sentences[0]


def test_jobs_of_a_sweep_go_on_from_themselves(tmp_path: Path) -> None:
    for place, strategy, age in (("sweeps/a/0", "single", 20.0), ("sweeps/a/1", "ddp", 10.0)):
        run = ran(tmp_path, place, (1,), age)
        plan = json.loads((run / "plan.json").read_text())
        overrides = ["resume=auto", f"strategy={strategy}", "sweep.name=a"]
        (run / "plan.json").write_text(json.dumps(plan | {"overrides": overrides}))
    again = asked(
        job(tmp_path, "auto", "sweeps/a/0-2"),
        overrides=("strategy=single", "resume=auto", "sweep.name=a"),
        sweep=tmp_path / "sweeps/a",
    )
    assert find(again).path == tmp_path / "sweeps/a/0/checkpoints/step_00000001"


def test_scripts_are_told_apart(tmp_path: Path) -> None:
    ran(tmp_path, "outputs/2026-02-01/12-00-00-b", (1,), 20.0)
    script = {"script": Path("/a/train.py"), "script_arguments": ("--epochs", "3")}
    of_a_script = asked(job(tmp_path, "auto"), **script)
    assert find(of_a_script).path is None


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """Make a folder another user's; returns the user's number."""

    def given(folder: Path) -> str:
        if os.geteuid():  # who may give nothing away becomes the other user
            monkeypatch.setattr(os, "geteuid", lambda: 54321)
            return str(os.getuid())
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 54321, -1)
        return "54321"

    return given


def test_a_run_of_another_user_is_taken_if_this_user_is_trusted(
    tmp_path: Path, give: Callable[[Path], str]
) -> None:
    """Who owns a folder may change its files, or replace them by links, while a run reads and writes them."""
    theirs = ran(tmp_path, "outputs/2026-02-01/12-00-00-b", (3, 4), 20.0)
    user = give(theirs)
    spec = job(tmp_path, str(theirs))
    with pytest.raises(ConfigError, match=r"`resume` must be a folder of your own, .* add trust_owner="):
        find(spec)
    with pytest.raises(ConfigError, match="must be a folder of your own"):
        find(job(tmp_path, f"{theirs}/step:3"))
    assert find(spec.with_values(trust_owner=user)).path == theirs / "checkpoints" / "step_00000004"
    with pytest.raises(ConfigError, match="must be a folder of your own"):
        find(spec.with_values(trust_owner="54322"))


def test_auto_passes_over_the_runs_of_another_user(tmp_path: Path, give: Callable[[Path], str]) -> None:
    theirs = ran(tmp_path, "outputs/2026-02-01/12-00-00-b", (3, 4), 20.0)
    user = give(theirs)
    found = find(job(tmp_path, "auto"))
    assert found.path is None
    assert "was passed over: `resume` must be a folder of your own" in found.sentences[0]
    assert find(job(tmp_path, "auto").with_values(trust_owner=user)).path is not None


def test_a_run_folder_of_another_user_does_not_go_on_in_its_place(
    tmp_path: Path, give: Callable[[Path], str]
) -> None:
    theirs = ran(tmp_path, NEW, (3, 4), 20.0)
    give(theirs)
    with pytest.raises(ConfigError, match="must be a folder of your own"):
        find(job(tmp_path, "auto"))
