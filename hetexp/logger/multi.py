"""Several trackers at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hetexp.logger.guard import GuardedLogger


class MultiLogger(GuardedLogger):
    """Passes each call to several trackers; an error in one of them does not affect the others.

    Args:
        loggers: trackers by any name. A tracker that is null is left out.
    """

    def __init__(self, loggers: dict[str, Any]) -> None:
        super().__init__(*(tracker for tracker in loggers.values() if tracker is not None))

    def retell(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Record the lines that this run has logged before, in every tracker."""
        super().retell(list(lines))
