"""Keeps a run's row in the table of trainings, in the process beside its launcher."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetexp.core.plan import Plan
from hetexp.monitor.processes import started_at
from hetexp.monitor.runs import RunWatch
from hetexp.monitor.sample import host_name
from hetexp.monitor.store import ABANDONED, Store

_STATES = {"completed": "completed", "failed": "failed", "interrupted": "stopped"}
"""Status of a summary → state."""


class Training:
    """Follows one run.

    Args:
        plan: plan of the run.
        pid: process of its launcher.
        created: start of the run, in seconds since the epoch.
    """

    def __init__(self, plan: Plan, pid: int, created: float) -> None:
        self._plan, self._pid, self._created = plan, pid, created
        self._watch = RunWatch(Path(plan.run_dir))
        self._steps: int | None = None
        self._begun = False
        self._written: dict[str, Any] = {}
        self._now: dict[str, Any] = {"state": "pending"}
        self.error: str | None = None
        """Error that ended the run by the launcher's message, for a run without a summary."""
        self.ended_itself = False
        """Whether the launcher ended by itself."""

    def ready(self, steps: int) -> None:
        """Note that all ranks train.

        Args:
            steps: of the whole run; 0 if only the user's script knows.
        """
        self._steps = steps or None
        self._now |= {"state": "running", "started": time.time(), "steps": self._steps}

    def record(self, store: Store) -> None:
        """Write changed values."""
        if not self._begun:
            store.begin(self._row())
            self._begun = True
        if self._now["state"] == "running":
            self._look()
        now = dict(self._now)  # `ready` comes from another thread
        new = {name: value for name, value in now.items() if self._written.get(name) != value}
        if new:
            store.update(self._plan.run_id, **new)
            self._written |= new

    def finish(self) -> None:
        """Note how the run ended, by its summary."""
        self._look()
        summary = self._summary()
        if summary is not None:
            self._now |= {"state": _STATES.get(summary["status"], "failed"), "error": summary["error"]}
        else:
            self._now |= {"state": "failed", "error": self.error or ABANDONED}
            if self.ended_itself and self.error is None:
                self._now["error"] = "it ended without a summary"
        if self._now["state"] == "completed" and self._steps is not None:
            self._now["progress"] = 1.0
        self._now["ended"] = time.time()
        self._watch.close()

    def _look(self) -> None:
        self._watch.look()
        line = self._watch.line
        if not line:
            return
        step = int(line.get("step", 0))
        self._now |= {
            "step": step,
            "progress": min(1.0, step / self._steps) if self._steps else None,
            "loss": _finite(line.get("train/loss")),
            "samples_per_second": line.get("samples_per_second"),
        }
        if self._watch.plan is not None:
            self._now["gpu_ids"] = [spec.id for spec in self._watch.plan.all_devices]

    def _summary(self) -> dict[str, Any] | None:
        """Return the summary of this run; that of an earlier run in its folder does not count."""
        path = Path(self._plan.run_dir) / "summary.json"
        with suppress(OSError, ValueError, KeyError):
            if path.stat().st_mtime >= self._created - 1.0:  # clocks of file systems are coarse
                summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                return summary if summary["run_id"] == self._plan.run_id else None
        return None

    def _row(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "id": plan.run_id,
            "name": plan.name,
            "state": "pending",
            "gpu_ids": [spec.id for spec in plan.all_devices],
            "distributed": len(plan.all_devices) > 1,
            "emulated": plan.emulated,
            "strategy": plan.strategy,
            "run_dir": plan.run_dir,
            "host": host_name(),
            "pid": self._pid,
            "process_mark": started_at(self._pid),
            "created": self._created,
        }


def _finite(value: float | None) -> float | None:
    """Return a number that any database takes; a loss may be NaN or infinite."""
    return value if value is not None and abs(value) < float("inf") else None
