"""Several trackers at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hetexp.logger.guard import GuardedLogger


class MultiLogger(GuardedLogger):
    """Hands everything to several trackers; an error in one of them ends none of the others.

    Args:
        loggers: trackers by any name. A tracker that is null is left out.
    """

    def __init__(self, loggers: dict[str, Any]) -> None:
        super().__init__(*(tracker for tracker in loggers.values() if tracker is not None))

    def retell(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Record everywhere what this run has logged before."""
        super().retell(list(lines))
