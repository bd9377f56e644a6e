"""Gradients of parameters that several ranks hold: replicas of a layer, and both ends of a tied weight."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hetexp.comm.communicator import peer_lost
from hetexp.hardware.links import build_links
from hetexp.hardware.pacing import GRAIN_SECONDS
from hetexp.training.cutting import Cut

if TYPE_CHECKING:
    from hetexp.training.state import Parts


class SharedGradients:
    """Sums the gradients of each parameter over all ranks that hold it, through the host.

    Ranks hold different sets of parameters with different others: each such set of ranks is a group. A
    parameter that takes part on none of them keeps no gradient at all, as on one device.

    Args:
        parts: with the model cut; all ranks build theirs at the same time.
    """

    def __init__(self, parts: Parts, cut: Cut, timeout: timedelta) -> None:
        self._parts = parts
        own = parameters_by_name(parts.model, cut)
        trained = {name: p for name, p in own.items() if p.requires_grad}
        self.counted = [p for name, p in own.items() if min(cut.holders[name]) == parts.rank]
        """The parameters that this rank counts: each has one such rank."""
        shared = sorted({ranks for ranks in cut.holders.values() if len(ranks) > 1})
        self._groups: list[tuple[tuple[int, ...], dist.ProcessGroup, list[nn.Parameter]]] = []
        for ranks in shared:  # all ranks make all groups, in the same order
            group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
            mine = [trained[name] for name in sorted(trained) if cut.holders[name] == ranks]
            if mine:
                self._groups.append((ranks, group, mine))
        self.num_bytes = 0
        """Exchanged in the last step."""
        self.time_scale = 0.0
        self._ratios: list[float] = []
        self._late_seconds = self._modelled_seconds = 0.0

    def sum(self) -> None:
        """Replace each shared gradient by the sum over its ranks.

        Raises:
            PeerLostError: one of them is gone.
        """
        self.num_bytes = 0
        for ranks, group, parameters in self._groups:
            flat = self._flat(parameters)
            try:
                self._exchange(ranks, group, flat)
            except RuntimeError as error:
                raise peer_lost(error) from error
            self.num_bytes += flat.numel() * flat.element_size()
            start = len(parameters)
            for parameter, takers in zip(parameters, flat[:start].tolist(), strict=True):
                if takers:
                    summed = flat[start : start + parameter.numel()].view_as(parameter)
                    parameter.grad = summed.to(parameter.device, copy=True)
                start += parameter.numel()

    def _flat(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Return a 1 for each parameter that has a gradient, then all gradients, zero where there is none."""
        size = sum(p.numel() for p in parameters)
        flat = torch.zeros(len(parameters) + size, dtype=self._parts.dtype)
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

    def _exchange(self, ranks: tuple[int, ...], group: dist.ProcessGroup, flat: torch.Tensor) -> None:
        """Sum over the ranks; between emulated devices it takes as long as it would on their links."""
        plan, scale = self._parts.plan, self.time_scale
        if not plan.paced:
            dist.all_reduce(flat, group=group)
            return
        links = build_links([plan.devices[rank] for rank in ranks], plan.network)
        num_bytes = flat.numel() * flat.element_size()
        to_host = links.to_host_seconds(ranks.index(self._parts.rank), num_bytes)
        moment = torch.tensor([time.perf_counter() + to_host * scale], dtype=torch.float64)
        dist.all_reduce(moment, op=dist.ReduceOp.MAX, group=group)
        met, rest = time.perf_counter(), links.exchange_seconds(num_bytes) + to_host
        dist.all_reduce(flat, group=group)
        now = time.perf_counter()
        if scale == 0.0:
            self._ratios.append((now - met) / (to_host + rest))
            return
        due = float(moment) + rest * scale
        self._modelled_seconds += (to_host + rest) * scale
        self._late_seconds += max(0.0, now - due - GRAIN_SECONDS)
        if due > now:
            time.sleep(due - now)

    def agree(self, finite: bool, wants_norm: bool) -> tuple[bool, float | None]:
        """Make one decision and one norm of what every rank knows of its own gradients.

        Args:
            finite: whether this rank's are; all ranks skip the step where one rank's are not.
            wants_norm: whether to compute the norm of the whole gradient, each parameter once.
        """
        told = torch.zeros(2, dtype=torch.float64)
        told[0] = 0.0 if finite else 1.0
        if wants_norm:
            gradients = [p.grad for p in self.counted if p.grad is not None]
            told[1] = float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0
        told = self._parts.communicator.all_reduce(told)
        return float(told[0]) == 0.0, math.sqrt(float(told[1])) if wants_norm else None


def parameters_by_name(model: nn.Module, cut: Cut) -> dict[str, nn.Parameter]:
    """Return what is left of a model's parameters by the first name that each has in the whole model."""
    return {cut.whole.parameters[name]: p for name, p in model.named_parameters()}
