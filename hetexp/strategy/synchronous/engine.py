"""What a rank does under a strategy with an exchange of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from hetexp.comm.forms import as_real
from hetexp.comm.summation import Summation
from hetexp.core.cost.step import Links
from hetexp.strategy.local_sgd.checkpoint import gather_bytes
from hetexp.strategy.synchronous.exchange import ExchangesGradients
from hetexp.training.data_parallel import DataParallel
from hetexp.training.gradient import Gradient
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.nonfinite.loss_scale import all_finite
from hetexp.training.normalizer import LossNormalizer

log = logging.getLogger(__name__)

FILE = "exchange_{}.safetensors"
"""Of one rank, in a checkpoint's folder."""


class _Ranks:
    """All ranks, during one exchange."""

    def __init__(
        self, summation: Summation, rank: int, world_size: int, local_count: float, global_count: float
    ) -> None:
        self._summation = summation
        self.rank, self.world_size = rank, world_size
        self.local_count, self.global_count = local_count, global_count
        self.summed: list[tuple[int, int]] = []
        """Elements of each vector and bytes of an element."""

    def sum_(self, vector: torch.Tensor) -> torch.Tensor:
        self.summed.append((len(vector), vector.element_size()))
        return self._summation.sum_(vector)


class SynchronousSteps(DataParallel):
    """One rank's side of a `hetexp.Synchronous` strategy."""

    exchanges_in_backward = False
    _ranks: _Ranks | None = None
    """Of the last exchange."""

    def __init__(self, strategy: ExchangesGradients) -> None:
        self._strategy = strategy

    def attach_exchange(self, store: dist.Store) -> None:
        state = self.state
        super().attach_exchange(store)
        self._summation = Summation(state.exchange, hook=state.hook, device=state.device)
        self._trained = [p for p in state.model.parameters() if p.requires_grad]

    def gradient(
        self, step: int, microbatches: list[Any], normalizer: LossNormalizer, meter: StepTimer
    ) -> Gradient:
        state = self.state
        gradient = super().gradient(step, microbatches, normalizer, meter)
        start = state.backend.mark()
        parts = [p.grad for p in self._trained if p.grad is not None]
        if normalizer.loss_scale is not None:
            normalizer.loss_scale.unscale(parts)
        bad = gradient.shortage is not None or (state.checks_finite and not all_finite(parts))
        gradient.finite = not state.communicator.all_reduce(torch.tensor([float(bad)]), "max")
        if gradient.finite and state.config.debug.exchange:
            world = state.communicator.world_size
            counts = normalizer.local_count, gradient.global_count
            self._ranks = ranks = _Ranks(self._summation, state.rank, world, *counts)
            gradient.finite = self._exchange(ranks)
        meter.waited(start, state.backend.mark())
        return gradient

    def _exchange(self, ranks: _Ranks) -> bool:
        """Replace the gradients by what all ranks step with; return whether it is finite."""
        strategy, before = self._strategy, self._strategy.state_dict()
        try:
            exchanged = strategy.exchange(_flat(self._trained), ranks)
        except BaseException:  # the step is done again, if another rank was lost
            strategy.load_state_dict(before)
            raise
        finite = not self.state.checks_finite or all_finite([exchanged])  # finite parts may overflow
        if not finite:
            strategy.load_state_dict(before)
        _put(exchanged, self._trained)
        return finite

    def state_files(self) -> dict[str, bytes]:
        kept = {name: t.detach().cpu().contiguous() for name, t in self._strategy.state_dict().items()}
        some = self.state.communicator.all_reduce(torch.tensor([len(kept)]), "max")
        if not int(some):
            return {}
        contents = gather_bytes(self.state, safetensors.torch.save(kept))
        return {FILE.format(rank): content for rank, content in enumerate(contents)}

    def restore(self, folder: Path, extra: Mapping[str, Any]) -> None:
        paths = [folder / FILE.format(rank) for rank in range(self.state.communicator.world_size + 1)]
        if paths[-2].is_file() and not paths[-1].exists():  # of as many ranks
            kept = safetensors.torch.load_file(paths[self.state.rank])
            self._strategy.load_state_dict({name: t.to(self.state.device) for name, t in kept.items()})
        elif paths[0].is_file() and self.state.rank == 0:
            log.warning("resume: what the strategy kept is of another number of ranks: it starts afresh.")

    def forget(self) -> None:
        self._summation.sent_bytes = 0
        self._strategy.load_state_dict({})

    def sent_bytes(self, steps: int) -> float | None:
        return self._summation.sent_bytes / steps if steps else None

    def extra_step_seconds(self) -> float:
        """Return what a step's sums take on emulated links: to the host, the exchange, and back."""
        links = self.state.hook.links
        if links is None or self._ranks is None:
            return 0.0
        return sum(self._seconds(links, *vector) for vector in self._ranks.summed)

    def _seconds(self, links: Links, length: int, element_size: int) -> float:
        num_bytes = length * element_size
        travel = max(links.to_host_seconds(rank, num_bytes) for rank in range(links.world_size))
        return 2 * travel + self._summation.seconds(links, length, element_size)


def _flat(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return all gradients as one vector, zero for a parameter without one."""
    dense = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
    return torch.cat([as_real(g.to_dense() if g.is_sparse else g).reshape(-1) for g in dense])


def _put(vector: torch.Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Give the parameters the elements of a vector as their gradients."""
    shapes = [as_real(p.detach()).shape for p in parameters]
    pieces = vector.split([shape.numel() for shape in shapes])
    for parameter, shape, piece in zip(parameters, shapes, pieces, strict=True):
        part = piece.view(shape)
        parameter.grad = torch.view_as_complex(part) if parameter.is_complex() else part
