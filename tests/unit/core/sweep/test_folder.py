"""A sweep's folder: names, keys of runs, folders of attempts, rows that survive a kill."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from hetexp.core.sweep.folder import (
    SWEEP_FILE,
    SWEEP_NOTE,
    SweepRow,
    append_row,
    completed_row,
    job_folder,
    key_of,
    name_problem,
    of_a_run,
    read_rows,
    sweep_name,
    unfinished,
)

AWKWARD = (
    "resume='runs/epoch=9-step=7.ckpt'",
    "hardware.devices=[cpu,{device: cpu, slow: 2}]",
    "balancing.weights=[0.5,0.5]",
    "name='a, b; c=d'",
    "+started=2026-01-31",
    "+later=2026-01-31 12:00:00",
    "+note=???",
    "~data.root",
)
"""Values with `=`, commas, lists, dates, `???`."""


def row(job: int, *overrides: str, status: str = "completed", folder: str | None = None) -> SweepRow:
    return SweepRow(
        job, key_of(overrides), folder or str(job), status, None, "2026-01-31T12:00:00+00:00", 1.0
    )


def test_the_key_of_a_run_is_what_it_computes() -> None:
    first = ("trainer.seed=1", "strategy=ddp", "+x=1")
    again = (
        "sweep.name=mine",
        "+x=1",
        "strategy=ddp",
        "hydra.verbose=true",
        "hydra/launcher=joblib",
        "trainer.seed=1",
    )
    assert key_of(first) == key_of(again)
    assert of_a_run(again) == ("+x=1", "strategy=ddp", "trainer.seed=1")
    assert key_of(["hydraulics=1", "sweeping.name=a"]) == ("hydraulics=1", "sweeping.name=a")
    assert key_of(first) != key_of(("trainer.seed=2", "strategy=ddp", "+x=1"))


def test_awkward_values_are_keys_like_any(tmp_path: Path) -> None:
    for text in AWKWARD:
        OverridesParser.create().parse_override(text)  # Hydra does read each of them
    for number, text in enumerate(AWKWARD):
        append_row(tmp_path, row(number, "trainer.seed=0", text))
    for number, text in enumerate(AWKWARD):
        (tmp_path / str(number)).mkdir()
        found = completed_row(tmp_path, [text, "trainer.seed=0"])
        assert found is not None
        assert (found.job, found.overrides) == (number, key_of(["trainer.seed=0", text]))
        assert completed_row(tmp_path, [text, "trainer.seed=1"]) is None
    assert all("=" not in path.name for path in tmp_path.iterdir())


def test_the_newest_row_of_a_run_counts(tmp_path: Path) -> None:
    append_row(tmp_path, row(1, "a=1", status="failed"))
    append_row(tmp_path, row(0, "a=0"))
    append_row(tmp_path, row(3, "a=1", folder="3-2"))
    append_row(tmp_path, row(2, "a=2", status="interrupted"))
    with (tmp_path / SWEEP_FILE).open("a") as file:
        file.write('{"job": 4, "overri')  # killed while it wrote
    assert [(one.job, one.folder, one.status) for one in read_rows(tmp_path)] == [
        (0, "0", "completed"),
        (2, "2", "interrupted"),
        (3, "3-2", "completed"),
    ]
    assert [one.job for one in unfinished(read_rows(tmp_path))] == [2]


def test_a_run_that_is_asked_for_twice_has_two_rows(tmp_path: Path) -> None:
    for number in (0, 2):
        append_row(tmp_path, row(number, "a=0"))
    append_row(tmp_path, row(1, "a=1", status="failed"))
    assert [one.folder for one in read_rows(tmp_path)] == ["0", "1", "2"]
    append_row(tmp_path, row(2, "a=0"))  # its folder was removed, and it ran again
    assert [one.folder for one in read_rows(tmp_path)] == ["0", "1", "2"]


def test_only_what_completed_before_this_start_is_skipped(tmp_path: Path) -> None:
    append_row(tmp_path, row(0, "a=0"))
    size = (tmp_path / SWEEP_FILE).stat().st_size
    append_row(tmp_path, row(1, "a=1"))
    for name in "01":
        (tmp_path / name).mkdir()
    note = {"rows_bytes": 0, "continued": [{"rows_bytes": 1}, {"rows_bytes": size}]}
    (tmp_path / SWEEP_NOTE).write_text(json.dumps(note))
    assert completed_row(tmp_path, ["a=0"]) is not None
    assert completed_row(tmp_path, ["a=1"]) is None
    assert job_folder(tmp_path, 1, ["a=1"]) == "1-2"
    (tmp_path / SWEEP_NOTE).write_text("{")
    assert completed_row(tmp_path, ["a=1"]) is not None


def test_a_row_after_half_a_row_is_read(tmp_path: Path) -> None:
    (tmp_path / SWEEP_FILE).write_text('{"job": 4, "overri')
    append_row(tmp_path, row(5, "a=5"))
    assert [one.job for one in read_rows(tmp_path)] == [5]


def test_each_attempt_has_a_folder_and_a_completed_run_keeps_its_own(tmp_path: Path) -> None:
    assert job_folder(tmp_path, 0, ["a=0"]) == "0"
    for name in ("0", "1", "1-2"):
        (tmp_path / name).mkdir()
    append_row(tmp_path, row(0, "a=0"))
    append_row(tmp_path, row(1, "a=1", status="failed", folder="1-2"))
    assert job_folder(tmp_path, 0, ["a=0"]) == "0"
    assert job_folder(tmp_path, 7, ["a=0", "sweep.name=mine"]) == "0"  # another number in a longer grid
    assert job_folder(tmp_path, 0, ["a=5"]) == "0-2"  # the number of a run that completed
    assert job_folder(tmp_path, 1, ["a=1"]) == "1-3"
    assert job_folder(tmp_path, 2, ["a=2"]) == "2"
    (tmp_path / "0").rmdir()  # a person wants it once more
    assert job_folder(tmp_path, 0, ["a=0"]) == "0"
    assert completed_row(tmp_path, ["a=0"]) is None


@pytest.mark.parametrize("name", ["a", "first-try", "2026-11-28/14-03-02-ff8120", "v1.2_b", "ünï"])
def test_names(name: str) -> None:
    assert name_problem(name) == ""
    assert sweep_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "a=b", "..", "a/../b", "/tmp/a", "a/", "a//b", ".", "a b", "a,b", 1.5, ["a"], True]
)
def test_what_cannot_name_a_sweep(name: object) -> None:
    assert name_problem(name).startswith("null, or a name of letters")


def test_a_new_sweep_is_named_by_the_time() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[0-9a-f]{6}", sweep_name(None))
    assert name_problem(sweep_name(None)) == ""
    assert sweep_name(None) != sweep_name(None)
