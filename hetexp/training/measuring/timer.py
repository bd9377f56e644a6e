"""What a rank measures of itself: its own work, kept apart from waiting for others."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.autograd import Variable

from hetexp.hardware.backend import Backend


@dataclass
class StepTimer:
    """Adds up compute seconds between device marks, and waiting apart from them."""

    backend: Backend
    compute_seconds: float = 0.0
    """Own forward and backward work since the last `reset`."""
    wait_seconds: float = 0.0
    """Time in backward after the last own gradient, the exchange of gradients included."""
    samples: int = 0
    _returned: float = 0.0
    """Of `compute_seconds`, what `since_last` has returned; below 0 after a `take` that came before it."""
    _spans: list[tuple[Any, Any]] = field(default_factory=list)
    _waits: list[tuple[Any, Any]] = field(default_factory=list)
    _within: list[tuple[Any, Any]] = field(default_factory=list)
    """Waits for other ranks in the midst of what `_spans` time."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward and time its own work without the wait for the exchange that ends it.

        DDP waits for its buckets in a callback at the end of backward. A callback that is queued by the
        first hook to run comes before it, when the last own gradient is there.
        """
        own_end: list[Any] = []

        def queue(_: torch.Tensor) -> None:
            Variable._execution_engine.queue_callback(lambda: own_end.append(self.backend.mark()))

        loss.register_hook(queue)
        start = self.backend.mark()
        loss.backward()
        end = self.backend.mark()
        self._spans.append((start, own_end[0]))
        self._waits.append((own_end[0], end))
        self._take_waits()

    def span(self, start: Any, end: Any) -> None:
        """Count the time between two marks as own work; read later, so that nothing waits for it now."""
        self._spans.append((start, end))
        self._take_waits()

    def waited(self, start: Any, end: Any) -> None:
        """Count the time between two marks as spent for others: an exchange between two steps."""
        self._waits.append((start, end))

    def add(self, busy_seconds: float, seconds: float) -> None:
        """Count the own work of a stretch that was measured already; the rest of it was waiting."""
        self.compute_seconds += busy_seconds
        self.wait_seconds += max(seconds - busy_seconds, 0.0)

    def bookmark(self) -> tuple[int, int]:
        """Return where the list of what was timed ends now."""
        return len(self._spans), len(self._waits)

    def back_to(self, bookmark: tuple[int, int]) -> None:
        """Forget what was timed since then: it was for nothing, and no speed of the device."""
        spans, waits = bookmark
        del self._spans[spans:], self._waits[waits:]

    def settle(self) -> None:
        """Wait for the device and read all marks taken so far."""
        self.backend.synchronize()
        self._read_spans()
        self.wait_seconds += sum(self.backend.seconds_between(a, b) for a, b in self._waits)
        self._waits.clear()

    def since_last(self) -> float:
        """Return the own work since the last call, whose end on the device is waited for."""
        if self._spans:
            self.backend.wait(self._spans[-1][1])
            self._read_spans()
        before, self._returned = self._returned, self.compute_seconds
        return self.compute_seconds - before

    def _take_waits(self) -> None:
        self._within += self.backend.waits
        self.backend.waits.clear()

    def _read_spans(self) -> None:
        self.compute_seconds += sum(self.backend.seconds_between(a, b) for a, b in self._spans)
        within = sum(self.backend.seconds_between(a, b) for a, b in self._within)
        self.compute_seconds -= within
        self.wait_seconds += within
        self._spans.clear()
        self._within.clear()

    def take(self) -> tuple[float, float, int]:
        """Settle, return compute seconds, wait seconds and samples, and start again from zero."""
        self.settle()
        taken = self.compute_seconds, self.wait_seconds, self.samples
        self._returned -= self.compute_seconds
        self.compute_seconds, self.wait_seconds, self.samples = 0.0, 0.0, 0
        return taken


@dataclass
class Totals:
    """Sums over a whole run, for the summary."""

    train_seconds: float = 0.0
    """In steps, waiting and logging included, evaluation and checkpoints not."""
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    data_seconds: float = 0.0
    """Waiting for samples to be loaded."""
    local_samples: int = 0
    global_samples: int = 0
    steps: int = 0
    start: Totals | None = None
    """What of it fell into the steps before the first log line."""

    @property
    def settled(self) -> Totals:
        """What follows the first log line; everything where nothing does.

        The first steps load libraries, choose kernels and fill caches: they may take a hundred times as long
        as the others, and say nothing of a device's speed.
        """
        if self.start is None or self.steps == self.start.steps:
            return self
        sums = {one.name for one in fields(self)} - {"start"}
        return Totals(**{name: getattr(self, name) - getattr(self.start, name) for name in sums})
