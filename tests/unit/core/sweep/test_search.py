"""What a sweep varies, and what a search makes of its runs' folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from hetexp.core.errors import ConfigError
from hetexp.core.sweep.folder import SweepRow, append_row
from hetexp.core.sweep.search import (
    Dimension,
    dimension,
    examples,
    folder_of,
    jobs,
    merged,
    outcome,
    settings_problems,
)


def read(word: str) -> Any:
    return OverridesParser.create().parse_override(word)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a=1,2", Dimension("a", ("1", "2"))),
        ("+a=choice([1,1],[2,1])", Dimension("+a", ("[1,1]", "[2,1]"))),
        ("a=shuffle(3,1,2)", Dimension("a", ("3", "1", "2"))),
        ("a=range(1,6,2)", Dimension("a", (), 1, 5, 2, whole=True)),
        ("a=range(4)", Dimension("a", (), 0, 3, 1, whole=True)),
        ("a=range(5,1,-1)", Dimension("a", (), 2, 5, 1, whole=True)),
        ("a=range(0.5,2,0.5)", Dimension("a", (), 0.5, 1.5, 0.5)),
        ("a=tag(log, range(1,9,4))", Dimension("a", ("1", "5"))),
        ("a=interval(0,1)", Dimension("a", (), 0.0, 1.0)),
        ("a=tag(log, interval(0.1,10))", Dimension("a", (), 0.1, 10.0, log=True)),
        ("a=int(interval(1,8))", Dimension("a", (), 1, 8, whole=True)),
        ("a=tag(log, int(interval(1,8)))", Dimension("a", (), 1, 8, log=True, whole=True)),
    ],
)
def test_what_hydras_grammar_lets_a_search_choose_from(word: str, expected: Dimension) -> None:
    assert dimension(read(word)) == expected


@pytest.mark.parametrize("word", ["a=interval(2,1)", "a=tag(log, interval(0,1))", "a=range(3,3)"])
def test_nothing_to_choose_from(word: str) -> None:
    with pytest.raises(ConfigError, match="`a` must be .*, but is '"):
        dimension(read(word))


def test_what_is_typed_wins_over_params() -> None:
    found = merged({"a": "1,2", "b": "3,4", "c": None, "d": True}, ["+a=9", "e=5,6"])
    assert [examples(one) for one in found] == [
        ["+a=9"],
        ["b=3", "b=4"],
        ["c=null"],
        ["d=true"],
        ["e=5", "e=6"],
    ]
    grid = jobs(found, 64)
    assert grid[:3] == [
        ("+a=9", "b=3", "c=null", "d=true", "e=5"),
        ("+a=9", "b=3", "c=null", "d=true", "e=6"),
        ("+a=9", "b=4", "c=null", "d=true", "e=5"),
    ]
    assert len(grid) == 4
    assert len(jobs(found, 3)) == 3
    assert examples(read("a=interval(0.5,2)")) == ["a=0.5", "a=2.0"]
    assert examples(read("~a")) == ["~a"]


def test_settings_of_a_search() -> None:
    right = {"sampler": "tpe", "direction": "minimize", "n_trials": 1, "n_jobs": 2}
    assert settings_problems(right) == []
    wrong = {"sampler": "tpee", "direction": "up", "n_trials": 0, "n_jobs": -1}
    assert [problem.split("`")[1] for problem in settings_problems(wrong)] == [
        "hydra.sweeper.sampler",
        "hydra.sweeper.direction",
        "hydra.sweeper.n_trials",
        "hydra.sweeper.n_jobs",
    ]


def summary(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = {"status": "completed", "samples_per_s": 10.0, "final": {"eval": {"loss": 0.5}}} | fields
    (folder / "summary.json").write_text(json.dumps(text))
    return folder


def test_the_objective_is_read_from_the_summary(tmp_path: Path) -> None:
    run = summary(tmp_path / "run")
    assert outcome(run, "throughput").value == 10.0
    assert outcome(run, "final.eval.loss").value == 0.5
    paced = summary(tmp_path / "paced", time_scale=8.0, valid=True)
    assert outcome(paced, "throughput").value == 80.0  # in the cards' own time
    assert outcome(paced, "samples_per_s").value == 10.0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"status": "failed", "error": "rank 1 died"}, "rank 1 died"),
        ({"valid": False, "invalid_reason": "this machine was late"}, "not valid: this machine was late"),
        ({"samples_per_s": None}, "None, no number"),
        ({"samples_per_s": float("nan")}, "nan, no number"),
        ({"samples_per_s": True}, "True, no number"),
    ],
)
def test_what_counts_for_nothing(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    found = outcome(summary(tmp_path / "run", **fields), "throughput")
    assert found.value is None
    assert reason in found.reason
    assert outcome(tmp_path, "throughput").reason == "it has no summary.json"


def test_an_objective_that_no_run_has(tmp_path: Path) -> None:
    run = summary(tmp_path / "run")
    with pytest.raises(
        ConfigError, match="`hydra.sweeper.objective` must be throughput or a key .*Did you mean `loss`"
    ):
        outcome(run, "final.eval.los")
    with pytest.raises(ConfigError, match="'status.deep'"):
        outcome(run, "status.deep")


def test_the_folder_is_the_rows(tmp_path: Path) -> None:
    assert folder_of(tmp_path, ["b=2", "a=1"], tmp_path / "0") == tmp_path / "0"
    append_row(tmp_path, SweepRow(0, ("a=1", "b=2"), "0-2", "completed", None, "2026-01-01", 1.0))
    assert folder_of(tmp_path, ["b=2", "a=1"], tmp_path / "0") == tmp_path / "0-2"
    assert folder_of(tmp_path, ["b=3"], tmp_path / "1") == tmp_path / "1"
