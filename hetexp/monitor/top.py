"""The state of the program `hetexp top`: the content of its screen, and the effects of its keys."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from hetexp.core.config import MonitorConfig
from hetexp.monitor.history import View
from hetexp.monitor.processes import lives
from hetexp.monitor.sample import host_name
from hetexp.monitor.screen import Shown
from hetexp.monitor.store import ACTIVE, KEPT_SECONDS, Store, with_ages
from hetexp.monitor.tables import unreachable

SPAN_SECONDS = 300.0
"""Time span of sparklines."""
POINTS = 60
ENDED_SHOWN = 4
"""Number of ended runs that are shown."""


class Top:
    """The state of the screen.

    Args:
        store: the monitor's database.
        config: the typed section.
        send: sends a signal to a process; for tests.
    """

    def __init__(
        self, store: Store, config: MonitorConfig, send: Callable[[int, int], None] = os.kill
    ) -> None:
        self._store, self._send = store, send
        self._fresh = max(5.0, 3 * config.interval_seconds)
        self.mode: View = config.view
        self.chosen: str | None = None
        self._by_hand = False
        self._asked: str | None = None
        """Id of the run about which the screen asks."""
        self._note: tuple[str, float] | None = None
        """A sentence and the moment until which it stays."""
        self._trainings: list[dict[str, Any]] = []
        self.done = False

    def look(self, now: float | None = None) -> Shown:
        """Return the screen's content now, with a message if the database does not answer."""
        now = now or time.time()
        shown = Shown(host_name(), now, self.mode, message=self._message(now))
        try:
            shown.devices = with_ages(self._store.latest(now - KEPT_SECONDS), now, self._fresh)
            self._trainings = self._listed()
            keys = [row["key"] for row in shown.devices]
            if self.mode == "aggregated":
                keys = [row["key"] for row in shown.devices if row["backend"] != "cpu"] or keys
            if keys:
                series = self._store.history(now - SPAN_SECONDS, now, self.mode, POINTS, keys)
                shown.history = {part.key: part for part in series}
        except SQLAlchemyError as error:
            shown.message = unreachable(error)
        shown.trainings = self._trainings
        self._choose()
        shown.chosen = self.chosen
        return shown

    def press(self, key: str) -> None:
        """Handle a key."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            if key in ("y", "Y"):
                self._stop(asked)
            else:
                self._say("Nothing was stopped.")
        elif key in ("q", "Q"):
            self.done = True
        elif key in ("a", "A"):
            self.mode = "per_gpu" if self.mode == "aggregated" else "aggregated"
        elif key in ("up", "k", "down", "j"):
            self._move(-1 if key in ("up", "k") else 1)
        elif key in ("s", "S", "x", "X"):
            self._ask()

    def _listed(self) -> list[dict[str, Any]]:
        rows = self._store.trainings(limit=50)
        active = [row for row in rows if row["state"] in ACTIVE]
        return active + [row for row in rows if row["state"] not in ACTIVE][:ENDED_SHOWN]

    def _choose(self) -> None:
        """Keep the user's choice; else choose the first run, which goes on if any does."""
        ids = [row["id"] for row in self._trainings]
        if not self._by_hand or self.chosen not in ids:
            self._by_hand = False
            self.chosen = ids[0] if ids else None

    def _move(self, by: int) -> None:
        ids = [row["id"] for row in self._trainings]
        if self.chosen in ids:
            self._by_hand = True
            self.chosen = ids[max(0, min(len(ids) - 1, ids.index(self.chosen) + by))]

    def _ask(self) -> None:
        row = self._of(self.chosen)
        if row is None:
            self._say("No run is chosen.")
        elif row["state"] not in ACTIVE:
            self._say(f"This run has ended already ({row['state']}).")
        elif row["host"] != host_name():
            self._say(f"This run is on {row['host']}: stop it there.")
        else:
            self._asked = row["id"]

    def _stop(self, training_id: str) -> None:
        """End a run as SIGTERM ends it: all ranks, in order, with what `fault.stop_seconds` allows."""
        row = self._of(training_id)
        if row is None or row["pid"] is None or not lives(row["pid"], row["process_mark"]):
            self._say("This run's launcher is gone already.")
            return
        try:
            self._send(row["pid"], signal.SIGTERM)
        except OSError as error:
            self._say(f"It cannot be stopped: {error.strerror or error}.")
        else:
            self._say("It was asked to stop.")

    def _of(self, training_id: str | None) -> dict[str, Any] | None:
        return next((row for row in self._trainings if row["id"] == training_id), None)

    def _say(self, text: str) -> None:
        self._note = (text, time.time() + 5.0)

    def _message(self, now: float) -> str | None:
        row = self._of(self._asked)
        if row is not None:
            name = row["name"] if len(row["name"]) <= 24 else f"{row['name'][:23]}…"
            return f"Stop {name} (process {row['pid']})?   y yes   any other key no"
        if self._note is not None and now < self._note[1]:
            return self._note[0]
        return None
