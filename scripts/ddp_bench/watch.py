"""How busy the cards are while a run trains, by the driver's count, and how far the run is meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from benchlib.runs import lines_of

from hetexp.core.device import DeviceSpec
from hetexp.hardware.backends import nvml
from hetexp.hardware.detection.machine import Machine

PERIOD_SECONDS = 0.05


class Watch:
    """Asks in a thread of its own how busy each device is, with the step that the run has come to.

    Args:
        metrics: file to which the run appends a line of JSON with `step` each time that it logs.
        devices: those of the run; only NVIDIA's driver is asked.
    """

    def __init__(self, metrics: Path, devices: Sequence[DeviceSpec]) -> None:
        self._metrics, self._devices = metrics, devices
        self._ended = threading.Event()
        self._samples: list[tuple[int, list[float | None]]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def busy(self, after: int, until: int) -> list[float | None]:
        """Return the mean utilisation of each device, 0 to 1, while the run was between two logged steps."""
        rows = [row for step, row in self._samples if after <= step < until]
        return [_mean([row[place] for row in rows]) for place in range(len(self._devices))]

    def _run(self) -> None:
        with ExitStack() as stack:
            askers = [self._asker(stack, device) for device in self._devices]
            if not any(askers):
                return
            while not self._ended.wait(PERIOD_SECONDS):
                step = last_step(self._metrics)
                self._samples.append((step, [ask() if ask is not None else None for ask in askers]))

    @staticmethod
    def _asker(stack: ExitStack, device: DeviceSpec) -> Callable[[], float | None] | None:
        if device.backend != "cuda":
            return None
        try:
            card = nvml.find(stack.enter_context(nvml.opened(Machine())), device.uuid, device.pci)
        except nvml.NotAnsweringError:
            return None
        return (lambda: utilisation(card)) if card is not None else None


def utilisation(card: nvml.Card) -> float | None:
    """Return the part of the last moments in which a kernel ran, as the driver counts it."""
    percent = getattr(card.ask("nvmlDeviceGetUtilizationRates"), "gpu", None)
    return percent / 100 if percent is not None and 0 <= percent <= 100 else None


def rows_of(metrics: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of metrics that are about steps; none before it is there."""
    return [row for row in lines_of(metrics) if "step_seconds" in row]


def last_step(metrics: Path) -> int:
    """Return the step of the last line, 0 before the first."""
    rows = rows_of(metrics)
    return int(rows[-1]["step"]) if rows else 0


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
