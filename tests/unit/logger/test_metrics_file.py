"""The metrics file keeps every line, shows NaN, and survives a kill in the middle of a line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetexp.logger.base import NoLogger, RunInfo
from hetexp.logger.jsonl import MetricsFile


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_read_back_as_they_were_and_flushed_each(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.log({"loss": 0.1 + 0.2, "count": 3, "phase": "train", "eta": None, "step": 99}, step=1)
    assert lines(path) == [{"step": 1, "loss": 0.1 + 0.2, "count": 3, "phase": "train", "eta": None}]
    file.log({"loss": math.nan, "high": math.inf, "low": -math.inf}, step=2)
    last = lines(path)[1]
    assert list(last) == ["step", "loss", "high", "low"]
    assert math.isnan(last["loss"]) and (last["high"], last["low"]) == (math.inf, -math.inf)
    file.finish({}, 0)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
        (torch.tensor(3, requires_grad=False), 3),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (torch.tensor([1, 2]), "tensor([1, 2])"),
        (Path("/a"), "/a"),
    ],
)
def test_values_become_plain(value: Any, plain: object, tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log({"value": value}, step=0)
    file.finish({}, 0)
    read = lines(file.path)[0]["value"]
    assert read == plain and type(read) is type(plain)


@pytest.mark.parametrize("rest", ["", '{"step": 3, "lo', "x" * 10_000])
def test_a_resumed_run_appends_after_the_last_whole_line(rest: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in (1, 2):
        first.log({"loss": step}, step)
    first.finish({}, 1)
    with path.open("a") as file:
        file.write(rest)
    second = MetricsFile(path)
    second.log({"loss": 3}, 3)
    second.finish({}, 0)
    assert [line["step"] for line in lines(path)] == [1, 2, 3]


def test_a_file_of_half_a_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("x" * 5000)
    MetricsFile(path).finish({}, 0)
    assert path.read_text() == ""


def test_no_logger_takes_everything(tmp_path: Path) -> None:
    logger = NoLogger()
    logger.start(RunInfo("id", tmp_path, "name", None, "train", (), {}))
    logger.log({"loss": 1.0}, 1)
    logger.finish({}, 0)
    assert not list(tmp_path.iterdir())
