"""The stages of a start, of one process and of several."""

from __future__ import annotations

import json
import time

import pytest

from hetexp.core import start_up


@pytest.fixture(autouse=True)
def no_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "_stamps", [])


def test_seconds_of_overlapping_stages_add_up_to_the_whole_start() -> None:
    launcher = [("", 100.0), ("plan", 103.0), ("processes started", 104.0)]
    rank = [("", 101.0), ("imports", 103.5), ("first step", 107.0)]
    rows = start_up.between([*launcher, *rank])
    assert rows == [
        {"stage": "plan", "seconds": 3.0},
        {"stage": "imports", "seconds": 0.5},
        {"stage": "processes started", "seconds": 0.5},
        {"stage": "first step", "seconds": 3.0},
    ]


def test_a_process_counts_from_its_own_start() -> None:
    """The interpreter and its imports belong to the start, too."""
    start_up.ended("tests")
    (row,) = start_up.stages()
    assert row["stage"] == "tests"
    assert row["seconds"] > time.process_time() / 100  # this process has computed before


def test_the_stages_of_another_process_are_put_in_their_order() -> None:
    start_up.ended("one")
    other = json.dumps([("before", time.time() - 1e3), ("after", time.time() + 1e3)])
    assert [row["stage"] for row in start_up.stages(other)] == ["before", "one", "after"]
    start_up.add(other)
    assert [row["stage"] for row in start_up.stages()] == ["before", "one", "after"]


def test_another_run_of_the_same_process_begins_again() -> None:
    start_up.ended("one")
    (before,) = start_up.stages()
    start_up.restart()
    start_up.ended("two")
    (row,) = start_up.stages()
    assert row["stage"] == "two"
    assert row["seconds"] < before["seconds"]  # which began with the process
