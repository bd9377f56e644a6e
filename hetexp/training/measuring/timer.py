"""Times a rank's own work, separately from its waits for other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from hetexp.core.errors import ConfigError
from hetexp.hardware.backend import Backend
from hetexp.torch_private import queue_after_backward

SPARSE_ELSEWHERE = (
    "`model` must get sparse gradients from torch.nn.Embedding or torch.nn.EmbeddingBag (sparse=True) alone "
    "if ranks exchange them, but another part gives one, as functional.embedding(sparse=True) and "
    "torch.sparse.mm do. A hook makes it dense: parameter.register_hook(lambda grad: grad.to_dense())."
)


@dataclass
class StepTimer:
    """Adds up this rank's compute seconds and wait seconds between marks of the device."""

    backend: Backend
    compute_seconds: float = 0.0
    """Forward and backward work since the last `take`."""
    wait_seconds: float = 0.0
    """Time in backward after this rank's last gradient, the exchange of gradients included."""
    samples: int = 0
    _returned: float = 0.0
    """The part of `compute_seconds` that `since_last` has returned; below 0 after a `take` before it."""
    _spans: list[tuple[Any, Any]] = field(default_factory=list)
    _waits: list[tuple[Any, Any]] = field(default_factory=list)
    _within: list[tuple[Any, Any]] = field(default_factory=list)
    """Waits for other ranks inside `_spans`."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; time its work, and separately the wait for the exchange that ends it.

        DDP waits for its buckets in a callback at the end of backward. The first hook to run queues another
        callback, which runs before DDP's, when this rank's last gradient is there.
        """
        work_end: list[Any] = []

        def queue(_: torch.Tensor) -> None:
            queue_after_backward(lambda: work_end.append(self.backend.mark()))

        loss.register_hook(queue)
        start = self.backend.mark()
        try:
            loss.backward()
        except NotImplementedError as error:
            if "SparseTensorImpl" not in str(error):
                raise
            raise ConfigError(SPARSE_ELSEWHERE) from error
        end = self.backend.mark()
        self._spans.append((start, work_end[0]))
        self._waits.append((work_end[0], end))
        self._take_waits()

    def span(self, start: Any, end: Any) -> None:
        """Count the time between two marks as own work; the marks are read later, without a wait now."""
        self._spans.append((start, end))
        self._take_waits()

    def waited(self, start: Any, end: Any) -> None:
        """Count the time between two marks as a wait for other ranks."""
        self._waits.append((start, end))

    def add(self, busy_seconds: float, seconds: float) -> None:
        """Count `busy_seconds` of work and the rest of `seconds` as waiting."""
        self.compute_seconds += busy_seconds
        self.wait_seconds += max(seconds - busy_seconds, 0.0)

    def bookmark(self) -> tuple[int, int]:
        """Return a position for `back_to`."""
        return len(self._spans), len(self._waits)

    def back_to(self, bookmark: tuple[int, int]) -> None:
        """Forget the times since a bookmark: their step is done again."""
        spans, waits = bookmark
        del self._spans[spans:], self._waits[waits:]

    def read_marks(self) -> None:
        """Wait for the device and read all marks taken so far."""
        self.backend.synchronize()
        self._read_spans()
        self.wait_seconds += sum(self.backend.seconds_between(a, b) for a, b in self._waits)
        self._waits.clear()

    def since_last(self) -> float:
        """Return the seconds of work since the last call; waits until the device has done it."""
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
        """Read all marks, return compute seconds, wait seconds and samples, and start again from zero."""
        self.read_marks()
        taken = self.compute_seconds, self.wait_seconds, self.samples
        self._returned -= self.compute_seconds
        self.compute_seconds, self.wait_seconds, self.samples = 0.0, 0.0, 0
        return taken


@dataclass
class Totals:
    """Sums over a whole run, for the summary."""

    train_seconds: float = 0.0
    """Time in steps, with waiting and logging, without evaluation and checkpoints."""
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    data_seconds: float = 0.0
    """Time of waiting for samples to be loaded."""
    ahead_seconds: float = 0.0
    """Time of loading samples while a step waited for the device."""
    local_samples: int = 0
    global_samples: int = 0
    steps: int = 0
    start: Totals | None = None
    """The sums over the steps before the first log line."""

    @property
    def after_warmup(self) -> Totals:
        """The sums after the first log line; all sums if no step follows it.

        The first steps load libraries, choose kernels and fill caches: they may take a hundred times as long
        as the others, and do not show a device's speed.
        """
        if self.start is None or self.steps == self.start.steps:
            return self
        names = {sum_.name for sum_ in fields(self)} - {"start"}
        return Totals(**{name: getattr(self, name) - getattr(self.start, name) for name in names})
