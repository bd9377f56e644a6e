"""A clock that tests turn themselves, and layers whose work takes time on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Clock:
    """Stands in for the `time` module: only sleeping and `work` move it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        if seconds > 0:
            self.slept.append(seconds)
            self.now += seconds

    def work(self, seconds: float) -> None:
        """Pass time as real arithmetic would."""
        self.now += seconds


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, forward: Callable[[], None], backward: Callable[[], None]
    ) -> torch.Tensor:
        ctx.backward_work = backward
        forward()
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.backward_work()
        return gradients[0], None, None


class Working(nn.Module):
    """A layer whose real work takes time on the fake clock, forward and backward."""

    def __init__(self, width: int, clock: Clock) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.clock, self.forward_seconds, self.backward_seconds = clock, 0.0, 0.0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Work.apply(  # type: ignore[no-untyped-call]
            self.linear(value),
            lambda: self.clock.work(self.forward_seconds),
            lambda: self.clock.work(self.backward_seconds),
        )
        return output
