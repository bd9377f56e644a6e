"""What a rank does under a strategy with an exchange of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetexp.comm.summation import Summation
from hetexp.hardware.links import links_of
from hetexp.strategy.synchronous.exchange import GradientExchange
from hetexp.training.data_parallel import DataParallel
from hetexp.training.gradient import Gradient
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.nonfinite.loss_scale import all_finite
from hetexp.training.normalizer import LossNormalizer

Exchange = Callable[[torch.Tensor, GradientExchange], torch.Tensor]


class _Ranks:
    """All ranks, during one exchange."""

    def __init__(
        self, summation: Summation, rank: int, world_size: int, local_count: float, global_count: float
    ) -> None:
        self._summation = summation
        self.rank, self.world_size = rank, world_size
        self.local_count, self.global_count = local_count, global_count

    def sum_(self, vector: torch.Tensor) -> torch.Tensor:
        return self._summation.sum_(vector)


class SynchronousSteps(DataParallel):
    """One rank's side of a `hetexp.Synchronous` strategy.

    Args:
        exchange: the strategy's own.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def attach_exchange(self, store: dist.Store) -> None:
        super().attach_exchange(store)
        state = self.state
        links = links_of(state.plan) if state.plan.paced else None
        self._summation = Summation(state.exchange, paced=state.paced, links=links, device=state.device)
        self._trained = [p for p in state.model.parameters() if p.requires_grad]

    def gradient(
        self, step: int, microbatches: list[Any], normalizer: LossNormalizer, meter: StepTimer
    ) -> Gradient:
        state = self.state
        gradient = super().gradient(step, microbatches, normalizer, meter)
        start = state.backend.mark()
        own = [p.grad for p in self._trained if p.grad is not None]
        if normalizer.loss_scale is not None:
            normalizer.loss_scale.unscale(own)
        bad = gradient.shortage is not None or (state.looks and not all_finite(own))
        gradient.finite = not state.communicator.all_reduce(torch.tensor([float(bad)]), "max")
        if gradient.finite:
            world = state.communicator.world_size
            counts = normalizer.local_count, gradient.global_count
            ranks = _Ranks(self._summation, state.rank, world, *counts)
            _put(self._exchange(_flat(self._trained), ranks), self._trained)
        meter.waited(start, state.backend.mark())
        return gradient

    def sent_bytes(self, steps: int) -> float | None:
        return self._summation.sent_bytes / steps if steps else None


def _flat(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return all gradients as one vector, zero for a parameter without one."""
    dense = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
    return torch.cat([(g.to_dense() if g.is_sparse else g).reshape(-1) for g in dense])


def _put(vector: torch.Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Give the parameters the elements of a vector as their gradients."""
    for parameter, piece in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)
