"""Gradients of parameters that several ranks hold: replicas of a layer, and both ends of a tied weight."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hetexp.comm.compression import compressor_of
from hetexp.comm.exchange import Exchange
from hetexp.comm.subgroup import form_subgroup
from hetexp.hardware.emulation.pacing import GRAIN_SECONDS
from hetexp.hardware.links import links_of
from hetexp.strategy.pipeline.cutting import Cut

if TYPE_CHECKING:
    from hetexp.training.state import TrainState


@dataclass
class _Group:
    """Ranks that hold the same parameters."""

    ranks: tuple[int, ...]
    parameters: list[nn.Parameter]
    exchange: Exchange
    feedback: torch.Tensor | None = None
    """What the wire has lost of this rank's gradients, to be sent in the next step."""


class SharedGradients:
    """Sums the gradients of each parameter over all ranks that hold it, through the host.

    Ranks hold different sets of parameters with different others: each such set of ranks is a group. A
    parameter that takes part on none of them keeps no gradient at all, as on one device.

    Args:
        state: of this rank; all ranks build theirs at the same time.
        sets: ranks, rising, and what this rank has of the parameters that they hold: on each of these ranks,
            which make their groups in the same order.
        counted: the parameters that this rank counts: each has one such rank.
        store: that all ranks share.
    """

    def __init__(
        self,
        state: TrainState,
        sets: Sequence[tuple[tuple[int, ...], list[nn.Parameter]]],
        counted: list[nn.Parameter],
        store: dist.Store,
    ) -> None:
        self._state, self.counted = state, counted
        self._codec = compressor_of(state.config.comm.wire)
        self._groups: list[_Group] = []
        for ranks, mine in sets:
            limit = state.config.comm.timeout_seconds
            exchange = form_subgroup(ranks, state.rank, store, state.plan, state.device, limit)
            self._groups.append(_Group(ranks, mine, exchange))
        self.num_bytes = 0
        """Handed over in the last step, coded as they travel."""
        self.time_scale = 0.0
        self._ratios: list[float] = []
        self._late_seconds = self._modelled_seconds = 0.0

    @classmethod
    def of_stages(cls, state: TrainState, cut: Cut, store: dist.Store) -> SharedGradients:
        """Return those of a model that is cut."""
        own = parameters_by_name(state.model, cut)
        trained = {name: p for name, p in own.items() if p.requires_grad}
        sets = []
        for ranks in sorted({ranks for ranks in cut.holders.values() if len(ranks) > 1}):
            mine = [trained[name] for name in sorted(trained) if cut.holders[name] == ranks]
            if mine:
                sets.append((ranks, mine))
        counted = [p for name, p in own.items() if min(cut.holders[name]) == state.rank]
        return cls(state, sets, counted, store)

    @property
    def exchanges(self) -> list[Exchange]:
        """Of each group."""
        return [group.exchange for group in self._groups]

    def sum(self) -> None:
        """Replace each shared gradient by the sum over its ranks.

        Raises:
            PeerLostError: one of them is gone.
        """
        self.num_bytes = 0
        for group in self._groups:
            parameters = group.parameters
            flat = self._flat(parameters)
            self._exchange(group, flat)
            start = len(parameters)
            for parameter, takers in zip(parameters, flat[:start].tolist(), strict=True):
                if takers:
                    summed = flat[start : start + parameter.numel()].view_as(parameter)
                    parameter.grad = summed.to(parameter.device, copy=True)
                start += parameter.numel()

    def sum_over(self, ranks: tuple[int, ...], vector: torch.Tensor) -> None:
        """Replace a vector on the host by its sum over the ranks of one of the sets; they all call it.

        Raises:
            PeerLostError: one of them is gone.
        """
        self.num_bytes = 0
        (group,) = (group for group in self._groups if group.ranks == ranks)
        self._exchange(group, vector)

    def _flat(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return a 1 for each parameter that has a gradient, then all gradients, zero where there is none."""
        size = sum(p.numel() for p in parameters)
        flat = torch.zeros(len(parameters) + size, dtype=self._state.dtype)
        start = len(parameters)
        for position, parameter in enumerate(parameters):
            if parameter.grad is not None:
                flat[position] = 1.0
                dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                flat[start : start + parameter.numel()].copy_(dense.reshape(-1))
            start += parameter.numel()
        return flat

    def real_ratio(self) -> float:
        """Return the median of real ÷ modelled time of an exchange while nothing was delayed yet."""
        return statistics.median(self._ratios) if self._ratios else 0.0

    def late_share(self) -> float:
        """Return the seconds past the due moments ÷ modelled seconds, since pacing started."""
        return self._late_seconds / self._modelled_seconds if self._modelled_seconds else 0.0

    def start(self, time_scale: float) -> None:
        """Delay every exchange from now on; forget what a rehearsal has lost by compression."""
        self.time_scale = time_scale
        for group in self._groups:
            group.feedback = None

    def _exchange(self, group: _Group, flat: torch.Tensor) -> None:
        """Sum over a group; between emulated devices it takes as long as it would on their links."""
        plan, scale = self._state.plan, self.time_scale
        if not plan.paced:
            self._sum(group, flat)
            return
        links = links_of(plan, [plan.devices[rank] for rank in group.ranks])
        num_bytes = flat.numel() * flat.element_size()  # they leave the device as they are
        to_host = links.to_host_seconds(group.exchange.rank, num_bytes)
        moment = torch.tensor([time.perf_counter() + to_host * scale], dtype=torch.float64)
        latest = max(
            float(one.view(torch.float64)) for one in group.exchange.gather(moment.view(torch.uint8))
        )
        met, rest = time.perf_counter(), links.bucket_seconds(num_bytes) + to_host
        self._sum(group, flat)
        now = time.perf_counter()
        if scale == 0.0:
            self._ratios.append((now - met) / (to_host + rest))
            return
        due = latest + rest * scale
        self._modelled_seconds += (to_host + rest) * scale
        self._late_seconds += max(0.0, now - due - GRAIN_SECONDS)
        if due > now:
            time.sleep(due - now)

    def _sum(self, group: _Group, flat: torch.Tensor) -> None:
        """Really sum over a group. Which parameters take part is sent as it is, whatever the wire."""
        if self._codec is None:
            group.exchange.sum_(flat)
            self.num_bytes += flat.numel() * flat.element_size()
            return
        flags, gradients = flat[: len(group.parameters)], flat[len(group.parameters) :]
        if group.feedback is None:
            group.feedback = torch.zeros_like(gradients)
        group.exchange.sum_(flags)
        group.exchange.sum_coded_(gradients, self._codec, group.feedback)
        self.num_bytes += flags.numel() * flags.element_size() + self._codec.sent_bytes(len(gradients))

    def agree(self, finite: bool, wants_norm: bool) -> tuple[bool, float | None]:
        """Make one decision and one norm of what every rank knows of its own gradients.

        Args:
            finite: whether this rank's are; all ranks skip the step where one rank's are not.
            wants_norm: whether to compute the norm of the whole gradient, each parameter once.
        """
        numbers = torch.zeros(2, dtype=torch.float64)
        numbers[0] = 0.0 if finite else 1.0
        if wants_norm:
            gradients = [p.grad for p in self.counted if p.grad is not None]
            numbers[1] = float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0
        numbers = self._state.communicator.all_reduce(numbers)
        return float(numbers[0]) == 0.0, math.sqrt(float(numbers[1])) if wants_norm else None


def parameters_by_name(model: nn.Module, cut: Cut) -> dict[str, nn.Parameter]:
    """Return what is left of a model's parameters by the first name that each has in the whole model."""
    return {cut.whole.parameters[name]: p for name, p in model.named_parameters()}
