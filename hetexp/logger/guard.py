"""Keeps what goes wrong in a tracker from ending the training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hetexp.logger.base import Logger, RunInfo

_LOG = logging.getLogger(__name__)


class GuardedLogger(Logger):
    """Hands everything to a tracker until it raises; then to none, after one warning.

    A tracker that hangs is not guarded against: one that talks to a network has limits of its own, as
    `WandbLogger` has.

    Args:
        tracker: whatever `logger._target_` has built.
    """

    def __init__(self, tracker: Logger) -> None:
        self.tracker = tracker
        self._given_up = False

    def start(self, run: RunInfo) -> None:
        """Open the run."""
        self._call(lambda: self.tracker.start(run))

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Record the metrics of a step."""
        self._call(lambda: self.tracker.log(metrics, step))

    def retell(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Record what this run has logged before."""
        self._call(lambda: self.tracker.retell(lines))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the run."""
        self._call(lambda: self.tracker.finish(summary, exit_code))

    def _call(self, call: Callable[[], None]) -> None:
        if self._given_up:
            return
        try:
            call()
        except Exception as error:  # it is anybody's class
            self._given_up = True
            text = next(iter(str(error).splitlines()), "")
            _LOG.warning(
                "%s is off for the rest of this run: it raised %s%s. The training goes on, its metrics are "
                "in metrics.jsonl.",
                type(self.tracker).__name__,
                type(error).__name__,
                f": {text}" if text else "",
            )
