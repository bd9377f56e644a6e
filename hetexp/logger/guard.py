"""Keeps an error in a tracker from ending the training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hetexp.core.summary import modelled
from hetexp.logger.base import Logger, RunInfo

_LOG = logging.getLogger(__name__)


class GuardedLogger(Logger):
    """Passes each call to its trackers. After an error, and one warning, a tracker gets no further calls.

    It does not guard against a tracker that hangs: trackers with a network must limit their calls, as
    `WandbLogger` does.

    Args:
        trackers: trackers, such as the object of `logger._target_`.
    """

    def __init__(self, *trackers: Logger) -> None:
        self.trackers = trackers

    def start(self, run: RunInfo) -> None:
        """Open the run."""
        self._each(lambda tracker: tracker.start(run))

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Record the metrics of a step; speeds of emulated devices are modelled ones."""
        shown = modelled(metrics)
        self._each(lambda tracker: tracker.log(shown, step))

    def retell(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Record the lines that this run has logged before."""
        shown = [modelled(line) for line in lines]
        self._each(lambda tracker: tracker.retell(shown))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the run."""
        self._each(lambda tracker: tracker.finish(summary, exit_code))

    def _each(self, call: Callable[[Logger], None]) -> None:
        for tracker in self.trackers:
            try:
                call(tracker)
            except Exception as error:  # it may be the user's own class
                self.trackers = tuple(other for other in self.trackers if other is not tracker)
                text = next(iter(str(error).splitlines()), "")
                _LOG.warning(
                    "%s is off for the rest of this run: it raised %s%s. The training goes on, its metrics "
                    "are in metrics.jsonl.",
                    type(tracker).__name__,
                    type(error).__name__,
                    f": {text}" if text else "",
                )
