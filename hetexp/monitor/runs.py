"""Follows an active run by the files in its folder: devices, steps, load of emulated devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.files import parse_json
from hetexp.core.lines import Appended
from hetexp.core.plan import Plan
from hetexp.hardware.detection.lease import owners
from hetexp.monitor.processes import lives

MOST = 1e30
"""Numbers from here on, and NaN, are no measurements."""
SILENT_SECONDS = 10.0
"""A run without a new line for this time, and for three times its usual pause, counts as idle."""


@dataclass(frozen=True)
class Modelled:
    """The modelled load of an emulated device."""

    utilisation: float | None
    """Fraction of the time in which it computes."""
    memory_bytes: int | None
    """Peak of its rank so far."""


class RunWatch:
    """Follows one run folder.

    Args:
        folder: folder of the run.
        clock: returns seconds; for tests.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self.plan: Plan | None = None
        """The current plan; `None` if there is none yet."""
        self.line: dict[str, Any] = {}
        """The numbers in the newest line of its metrics with a training step."""
        self._plan_path: Path | None = None
        self._metrics = Appended(folder / "metrics.jsonl")
        self._line_at: float | None = None
        self._pause = 0.0

    @property
    def name(self) -> str:
        """The run's id; without a plan its folder's name."""
        return self.plan.run_id if self.plan is not None else self.folder.name

    @property
    def devices(self) -> list[tuple[DeviceSpec, int]]:
        """The run's devices, each with its rank."""
        plan = self.plan
        if plan is None:
            return []
        return [(spec, plan.rank_of(place)) for place, spec in enumerate(plan.all_devices)]

    def look(self) -> None:
        """Read new plans and metrics."""
        self._read_plan()
        for text in reversed(self._metrics.read()):
            with suppress(ValueError):
                line = parse_json(text)
                if isinstance(line, dict) and "train/loss" in line:
                    before, self._line_at = self._line_at, self._clock()
                    self._pause = self._line_at - before if before is not None else 0.0
                    numbers = ((name, v) for name, v in line.items() if isinstance(v, (int, float)))
                    self.line = {name: value for name, value in numbers if abs(value) < MOST}
                    break

    def modelled(self, spec: DeviceSpec) -> Modelled:
        """Return the load of an emulated device, by the run's last line."""
        values = {name: self.line.get(f"device/{spec.id}/{name}") for name in _DEVICE_VALUES}
        gib, speed = values["peak_memory_gib"], values["samples_per_second"]
        memory = round(gib * GIB) if gib is not None else None
        if self.plan is None or self._silent() or len(self.plan.replica_batch_sizes) > 1:
            return Modelled(None, memory)
        # Each stage of a pipeline computes all samples, other devices their share.
        share = 1.0 if self.plan.stages else values["share"]
        if share == 0:
            return Modelled(0.0, memory)
        total = self.line.get("samples_per_second")
        if share is None or not speed or total is None:
            return Modelled(None, memory)
        return Modelled(min(1.0, share * total / speed), memory)

    def close(self) -> None:
        """Close its files."""
        self._metrics.close()

    def _silent(self) -> bool:
        if self._line_at is None:
            return True
        return self._clock() - self._line_at > max(SILENT_SECONDS, 3 * self._pause)

    def _read_plan(self) -> None:
        """Read the newest epoch's plan if membership has changed, else that which the run began with."""
        changed = sorted((self.folder / "plans").glob("epoch_*.json"), key=_epoch)
        path = changed[-1] if changed else self.folder / "plan.json"
        if path != self._plan_path:
            with suppress(OSError, ValueError):  # not there yet, or another version's
                self.plan, self._plan_path = Plan.read_checked(path), path


def leased() -> list[Path]:
    """Return the folders of runs that hold cards of this machine, also of runs without a monitor."""
    return [Path(folder) for folder, pid in owners() if lives(pid)]


_DEVICE_VALUES = ("share", "samples_per_second", "peak_memory_gib")


def _epoch(path: Path) -> int:
    number = path.stem.partition("_")[2]
    return int(number) if number.isdecimal() else -1
