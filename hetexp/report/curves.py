"""The logged steps of a run, on a clock that counts training alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from hetexp.report.results import Point
from hetexp.report.runs import RunRecord

_OF_DEVICES = ("share", "samples_per_second", "train_loss", "eval_loss")


def points(run: RunRecord) -> list[Point]:
    """Return the logged steps of a run, with a clock that adds up the durations between log lines.

    A log line has the mean seconds of the steps since the previous line. The clock of a resumed run begins at
    0 at its resume. Time and samples of an evaluation between two log lines are interpolated.
    """
    result: list[Point] = []
    marks = _marks(run)
    steps = [step for step, _, _ in marks]
    for line in run.metrics:
        samples, seconds = _at(marks, steps, int(line["step"]))
        eval_loss = line.get("eval/loss")
        if "step_seconds" not in line and eval_loss is None:
            continue
        values, scale = _by_device(line), _scale(run, line)
        result.append(
            Point(
                step=line["step"],
                samples=samples,
                seconds=seconds,
                train_loss=line.get("train/loss"),
                eval_loss=eval_loss,
                shares=values["share"],
                device_speeds={
                    device: speed * scale for device, speed in values["samples_per_second"].items()
                },
                device_train_losses=values["train_loss"],
                device_eval_losses=values["eval_loss"],
            )
        )
    return result


def _scale(run: RunRecord, line: Mapping[str, Any]) -> float:
    """Return the real seconds of a modelled one in a log line, after the first of which they may change."""
    return float(line.get("time_scale") or run.scale)


def _marks(run: RunRecord) -> list[tuple[int, float, float]]:
    """Return (step, samples, seconds) at the start and at each log line, in modelled time."""
    lines = [line for line in run.metrics if "step_seconds" in line]
    if not lines:
        return []
    step, seconds = run.first_step, 0.0
    first = lines[0]
    in_window = first["samples_per_second"] * first["step_seconds"] * (first["step"] - step)
    marks = [(step, max(first["train/samples"] - in_window, 0.0) if step else 0.0, 0.0)]
    for line in lines:
        seconds += (line["step"] - step) * line["step_seconds"] / _scale(run, line)
        step = line["step"]
        marks.append((step, float(line["train/samples"]), seconds))
    return marks


def _at(marks: Sequence[tuple[int, float, float]], steps: Sequence[int], step: int) -> tuple[int, float]:
    """Return samples and seconds at a step, interpolated between the marks around it."""
    if not marks:
        return 0, 0.0
    place = bisect_left(steps, step)
    if place in (0, len(steps)) or steps[place] == step:
        _, samples, seconds = marks[min(place, len(steps) - 1)]
        return round(samples), seconds
    before, after = marks[place - 1], marks[place]
    part = (step - before[0]) / (after[0] - before[0])
    return round(before[1] + part * (after[1] - before[1])), before[2] + part * (after[2] - before[2])


def _by_device(line: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return a line's figures of the devices, by quantity and device id."""
    by_quantity: dict[str, dict[str, float]] = {quantity: {} for quantity in _OF_DEVICES}
    for key, value in line.items():
        quantity, device = _of_device(key)
        if quantity is not None and value is not None:
            by_quantity[quantity][device] = value
    return by_quantity


@cache
def _of_device(key: str) -> tuple[str | None, str]:
    """Return quantity and device id of a metric's name; no quantity if no report shows it by device."""
    if not key.startswith("device/"):
        return None, ""
    device, _, quantity = key.removeprefix("device/").rpartition("/")
    return (quantity, device) if quantity in _OF_DEVICES else (None, "")
