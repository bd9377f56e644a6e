"""Several trackers at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hetexp.logger.base import Logger, RunInfo
from hetexp.logger.guard import GuardedLogger


class MultiLogger(Logger):
    """Tells several trackers the same; what goes wrong in one of them ends none of the others.

    Args:
        loggers: trackers by any name. A tracker that is null is left out.
    """

    def __init__(self, loggers: dict[str, Any]) -> None:
        self.loggers = [GuardedLogger(one) for one in loggers.values() if one is not None]

    def start(self, run: RunInfo) -> None:
        """Open the run everywhere."""
        for one in self.loggers:
            one.start(run)

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Record the metrics of a step everywhere."""
        for one in self.loggers:
            one.log(metrics, step)

    def retell(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Record everywhere what this run has logged before."""
        lines = list(lines)
        for one in self.loggers:
            one.retell(lines)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the run everywhere."""
        for one in self.loggers:
            one.finish(summary, exit_code)
