"""The benchmark of several cards on two CPU ranks: stages are exact, and a lost rank costs no step."""

from __future__ import annotations

import json
from pathlib import Path

import bench_cards
import pytest


def test_stages_and_a_loss_are_measured_beside_one_device(tmp_path: Path) -> None:
    bench_cards.main(
        ["--device", "cpu", "--gpus", "2", "--tiny", "--parts", "stages,loss", "--out", str(tmp_path)]
    )
    stages = json.loads((tmp_path / "stages.json").read_text())
    reference = stages["one device"]["losses"]
    pipeline = stages["pipeline of 2"]
    assert bench_cards.worst(pipeline["losses"], reference) < 1e-6
    assert 0 < pipeline["bubble"]["measured"] < 1 and 0 < pipeline["bubble"]["simulated"] < 1
    loss = json.loads((tmp_path / "loss.json").read_text())
    assert loss.keys() == {"gloo", "shm"}
    for one in loss.values():
        assert [failure["device"] for failure in one["failures"]] == ["cpu:1"]
        assert one["failures"][0]["steps_lost"] == 0
        assert bench_cards.worst(one["losses"], one["undisturbed"]) < 1e-6


def test_each_power_of_two_is_counted_and_all() -> None:
    assert [bench_cards.counts(gpus) for gpus in (2, 4, 6, 8)] == ["1,2", "1,2,4", "1,2,4,6", "1,2,4,8"]


def test_a_step_that_is_missing_differs_by_any_measure() -> None:
    assert bench_cards.worst({1: 1.0, 2: 2.0}, {1: 1.0, 2: 1.0}) == 1.0
    assert bench_cards.worst({1: 1.0}, {1: 1.0, 2: 1.0}) == float("inf")


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_cards.main(["--parts", "stages,speed"])
    known = "scaling, slowed, splits, equal, cpu, stages, loss"
    assert f"--parts: must be of {known}, but is speed instead" in capsys.readouterr().err


def test_parts_for_cards_are_refused_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_cards.main(["--device", "cpu", "--parts", "slowed,stages"])
    assert "slowed need NVIDIA cards" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_cards.main(["--gpus", "2", "--slow", "2,4", "--parts", "slowed"])
    assert "--slow must leave one of --gpus as it is, but has 2 factors" in capsys.readouterr().err
