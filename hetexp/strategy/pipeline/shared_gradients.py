"""Sums the gradients of parameters on several ranks: replicas of a layer, both ends of a tied weight."""

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
from hetexp.comm.forms import as_real
from hetexp.comm.subgroup import form_subgroup
from hetexp.hardware.emulation.pacing import GRAIN_SECONDS
from hetexp.hardware.links import links_of
from hetexp.strategy.pipeline.cutting import Cut
from hetexp.training.nonfinite.loss_scale import with_values

if TYPE_CHECKING:
    from hetexp.training.state import TrainState


@dataclass
class _Group:
    """Ranks that hold the same parameters."""

    ranks: tuple[int, ...]
    parameters: list[nn.Parameter]
    exchange: Exchange
    feedback: torch.Tensor | None = None
    """The error of compressing this rank's gradients, added in the next step."""


class SharedGradients:
    """Sums the gradients of each parameter over all ranks that hold it, through the host.

    A rank may share different parameters with different ranks: each such set of ranks is a group. A parameter
    that no rank of its group has used keeps no gradient, as on one device.

    Args:
        state: of this rank; all ranks build their objects at the same time.
        sets: ranks of a group in rising order, and the parameters that they hold; each of these ranks lists
            its groups in the same order.
        counted: the parameters that this rank counts in the norm: each has one such rank.
        store: shared by all ranks.
    """

    def __init__(
        self,
        state: TrainState,
        sets: Sequence[tuple[tuple[int, ...], list[nn.Parameter]]],
        counted: list[nn.Parameter],
        store: dist.Store,
    ) -> None:
        self._state, self.counted = state, counted
        self._compressor = compressor_of(state.config.comm.wire)
        self._groups: list[_Group] = []
        for ranks, parameters in sets:
            limit = state.config.comm.timeout_seconds
            exchange = form_subgroup(ranks, state.rank, store, state.plan, state.device, limit)
            self._groups.append(_Group(ranks, parameters, exchange))
        self.num_bytes = 0
        """Sent in the last step, compressed if they are."""
        self.time_scale = 0.0
        self._ratios: list[float] = []
        self._late_seconds = self._modelled_seconds = 0.0

    @classmethod
    def of_stages(cls, state: TrainState, cut: Cut, store: dist.Store) -> SharedGradients:
        """Return the shared gradients of a model in stages."""
        local = parameters_by_name(state.model, cut)
        trained = {name: p for name, p in local.items() if p.requires_grad}
        sets = []
        for ranks in sorted({ranks for ranks in cut.holders.values() if len(ranks) > 1}):
            parameters = [trained[name] for name in sorted(trained) if cut.holders[name] == ranks]
            if parameters:
                sets.append((ranks, parameters))
        counted = [p for name, p in local.items() if min(cut.holders[name]) == state.rank]
        return cls(state, sets, counted, store)

    @property
    def exchanges(self) -> list[Exchange]:
        """The exchange of each group."""
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
            for parameter, users in zip(parameters, flat[:start].tolist(), strict=True):
                part = as_real(parameter.detach())
                if users:
                    summed = flat[start : start + part.numel()].view_as(part).to(part.device, copy=True)
                    parameter.grad = torch.view_as_complex(summed) if parameter.is_complex() else summed
                start += part.numel()

    def sum_over(self, ranks: tuple[int, ...], vector: torch.Tensor) -> None:
        """Replace a vector on the host by its sum over the ranks of one group; all of them call it.

        Raises:
            PeerLostError: one of them is gone.
        """
        self.num_bytes = 0
        (group,) = (group for group in self._groups if group.ranks == ranks)
        self._exchange(group, vector)

    def _flat(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return a 1 for each parameter with a gradient, else 0, then all gradients, zeros if missing."""
        sizes = [as_real(p.detach()).numel() for p in parameters]
        flat = torch.zeros(len(parameters) + sum(sizes), dtype=self._state.dtype)
        start = len(parameters)
        for position, (parameter, size) in enumerate(zip(parameters, sizes, strict=True)):
            if parameter.grad is not None:
                flat[position] = 1.0
                dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                flat[start : start + size].copy_(as_real(dense).reshape(-1))
            start += size
        return flat

    def real_ratio(self) -> float:
        """Return the median of real ÷ modelled time of an exchange before pacing started."""
        return statistics.median(self._ratios) if self._ratios else 0.0

    def late_share(self) -> float:
        """Return the seconds past the due moments ÷ modelled seconds, since pacing started."""
        return self._late_seconds / self._modelled_seconds if self._modelled_seconds else 0.0

    def start(self, time_scale: float) -> None:
        """Delay every exchange from now on; forget the error feedback of the warm-up."""
        self.time_scale = time_scale
        for group in self._groups:
            group.feedback = None

    def _exchange(self, group: _Group, flat: torch.Tensor) -> None:
        """Sum over a group; between emulated devices, take as long as their links would."""
        plan, scale = self._state.plan, self.time_scale
        if not plan.paced:
            self._sum(group, flat)
            return
        links = links_of(plan, [plan.devices[rank] for rank in group.ranks])
        num_bytes = flat.numel() * flat.element_size()  # uncompressed on the way to the host
        to_host = links.to_host_seconds(group.exchange.rank, num_bytes)
        moment = torch.tensor([time.perf_counter() + to_host * scale], dtype=torch.float64)
        moments = group.exchange.gather(moment.view(torch.uint8))
        latest = max(float(arrival.view(torch.float64)) for arrival in moments)
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
        """Sum over a group; only the gradients are compressed, not the flags of used parameters."""
        if self._compressor is None:
            group.exchange.sum_(flat)
            self.num_bytes += flat.numel() * flat.element_size()
            return
        flags, gradients = flat[: len(group.parameters)], flat[len(group.parameters) :]
        if group.feedback is None:
            group.feedback = torch.zeros_like(gradients)
        group.exchange.sum_(flags)
        group.exchange.sum_coded_(gradients, self._compressor, group.feedback)
        self.num_bytes += flags.numel() * flags.element_size() + self._compressor.sent_bytes(len(gradients))

    def agree(self, finite: bool, wants_norm: bool) -> tuple[bool, float | None]:
        """Return whether the gradients of all ranks are finite, and the norm of the whole gradient.

        Args:
            finite: whether this rank's gradients are finite.
            wants_norm: whether to compute the norm, in which each parameter counts once.
        """
        numbers = torch.zeros(2, dtype=torch.float64)
        numbers[0] = 0.0 if finite else 1.0
        if wants_norm:
            gradients = with_values([p.grad for p in self.counted if p.grad is not None])
            numbers[1] = float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0
        numbers = self._state.communicator.all_reduce(numbers)
        return float(numbers[0]) == 0.0, math.sqrt(float(numbers[1])) if wants_norm else None


def parameters_by_name(model: nn.Module, cut: Cut) -> dict[str, nn.Parameter]:
    """Return the parameters of this rank's part by the first name that each has in the whole model."""
    return {cut.whole.parameters[name]: p for name, p in model.named_parameters()}
