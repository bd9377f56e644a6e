"""The interface of trackers, and the facts that they get of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """The names and the configuration of a run, for a tracker."""

    run_id: str
    run_dir: Path
    """Folder of the run; a tracker writes its files below it."""
    name: str
    group: str | None
    """Group that the runs of a sweep share."""
    job_type: str
    tags: tuple[str, ...]
    config: dict[str, Any]
    """The resolved configuration as plain types."""


class Logger(ABC):
    """A tracker, which only rank 0 calls. Its methods should not raise errors of the tracker's service."""

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Open the run."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Record the metrics of an optimizer step."""

    def retell(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Record the lines that this run logged before this process began, after `start` and before `log`.

        A tracker that already has some of these lines overrides this method.

        Args:
            lines: of `metrics.jsonl`, each with its `step`.
        """
        for line in lines:
            self.log({name: value for name, value in line.items() if name != "step"}, line["step"])

    @abstractmethod
    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the run; an exit code other than 0 marks it as failed."""


class NoLogger(Logger):
    """Tracks nothing; `metrics.jsonl` has the metrics."""

    def start(self, run: RunInfo) -> None:
        """Do nothing."""

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Do nothing."""

    def retell(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Do nothing."""


RUN_FILES = ("config.yaml", "plan.*", "certificate.*", "splits.jsonl")
"""Files of a run folder that a tracker may keep beside the metrics."""

LARGEST_FILE = 8 * 2**20
"""Largest such file, in bytes."""


def run_files(run_dir: Path) -> list[Path]:
    """Return the `RUN_FILES` of a run folder that are not too large."""
    paths = [path for name in RUN_FILES for path in sorted(run_dir.glob(name))]
    return [path for path in paths if path.is_file() and path.stat().st_size <= LARGEST_FILE]


def plain_value(value: object) -> bool | int | float | str | None:
    """Return a metric as a plain Python value.

    Scalars of NumPy and tensors of one element become numbers, by `item()`, so that neither library need be
    imported. Other objects become text.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[return-value]  # the exact types were just checked
    item = getattr(value, "item", None)
    if callable(item):
        try:
            number = item()
        except (RuntimeError, ValueError, TypeError):  # more than one element
            return str(value)
        if type(number) in (bool, int, float, str):
            return number  # type: ignore[no-any-return]
    return str(value)
