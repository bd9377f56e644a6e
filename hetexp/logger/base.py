"""What a tracker receives, and the interface through which it does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """What names a run in a tracker."""

    run_id: str
    run_dir: Path
    """Folder of the run; a tracker keeps its files below it."""
    name: str
    group: str | None
    """Runs of one sweep share it."""
    job_type: str
    tags: tuple[str, ...]
    config: dict[str, Any]
    """The resolved configuration as plain types."""


class Logger(ABC):
    """A tracker. Only rank 0 calls it; no method raises for the tracker's own trouble."""

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Open the run."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Record the metrics of an optimizer step."""

    def retell(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Record what this run has logged before this process began, after `start` and before `log`.

        A tracker that has all of it already, or a part, overrides this.

        Args:
            lines: of `metrics.jsonl`, each with its `step`.
        """
        for line in lines:
            self.log({name: value for name, value in line.items() if name != "step"}, line["step"])

    @abstractmethod
    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the run; anything but an exit code of 0 marks it as failed."""


class NoLogger(Logger):
    """Tracks nothing; the metrics are in `metrics.jsonl` all the same."""

    def start(self, run: RunInfo) -> None:
        """Do nothing."""

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Do nothing."""

    def retell(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Do nothing."""


RUN_FILES = ("config.yaml", "plan.*", "certificate.*", "splits.jsonl")
"""Files of a run folder that a tracker may keep beside the metrics, as many of them as there are."""

LARGEST_FILE = 8 * 2**20
"""Bytes of a file that is still small."""


def run_files(run_dir: Path) -> list[Path]:
    """Return the `RUN_FILES` of a run folder that are small."""
    paths = [path for name in RUN_FILES for path in sorted(run_dir.glob(name))]
    return [path for path in paths if path.is_file() and path.stat().st_size <= LARGEST_FILE]


def plain_value(value: object) -> bool | int | float | str | None:
    """Return a metric as a plain Python value.

    Scalars of NumPy and tensors of one element become numbers, through `item()` so that neither library
    need be imported; what is no number becomes text.
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
