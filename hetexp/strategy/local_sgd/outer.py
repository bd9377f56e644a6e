"""The outer optimizer step from the weights of one sync to those of the next (Douillard et al. 2023, DiLoCo).

All ranks compute it on the host from the same numbers in the same order, so that they hold the same weights
after a sync, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from hetexp.comm.communicator import Communicator
from hetexp.comm.forms import as_real
from hetexp.comm.summation import Summation
from hetexp.strategy.local_sgd.settings import LocalSettings

COUNTERS = ("num_batches_tracked",)
"""Integer buffers that become the largest of all ranks at a sync; others become rank 0's."""


class OuterStep:
    """Averages the changes of the ranks' weights, and steps by the mean with an outer SGD.

    Only trained parameters travel. Floating-point buffers (BatchNorm's running statistics) become the ranks'
    weighted mean. Of integer and boolean buffers, `COUNTERS` become the largest, and all others rank 0's.

    Args:
        model: the rank's replica, on its device.
        exchange: sums over all ranks.
    """

    def __init__(
        self, model: nn.Module, settings: LocalSettings, communicator: Communicator, exchange: Summation
    ) -> None:
        self._model, self._settings = model, settings
        self._communicator, self.exchange = communicator, exchange
        self._plain = exchange.plain()  # buffers and moments travel as they are
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._buffers = [b for b in model.buffers() if b.is_floating_point() or b.is_complex()]
        self.momentum: torch.Tensor | None = None
        """Of the outer SGD [trained elements]; `None` before its first step, and without momentum."""
        self._synced = self._synced_buffers = torch.empty(0)
        self.hold()

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent for weights, buffers and moments."""
        return self.exchange.sent_bytes + self._plain.sent_bytes

    def hold(self) -> None:
        """Store the model's present state as the one that all ranks hold."""
        self._synced, self._synced_buffers = flat(self._trained), flat(self._buffers)

    def step(self, weight: float) -> None:
        """Take the outer step on every rank; all of them call it.

        Args:
            weight: this rank's fraction of all ranks' samples since the last sync; the weights sum to 1.
        """
        change = (self._synced - flat(self._trained)).mul_(weight)
        self._synced -= self._settings.outer_lr * self._looked_ahead(self.exchange.sum_(change))
        put(self._synced, self._trained)
        if self._buffers:
            now = flat(self._buffers)
            # Constants, also infinite ones, keep their bits.
            change = torch.where(now == self._synced_buffers, 0.0, self._synced_buffers - now)
            self._synced_buffers = self._synced_buffers - self._plain.sum_(change * weight)
            put(self._synced_buffers, self._buffers)
        self._agree_on_integers()

    def _looked_ahead(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the direction of torch's SGD with momentum for this gradient."""
        momentum = self._settings.outer_momentum
        if momentum == 0.0:
            return gradient
        if self.momentum is None:
            self.momentum = gradient.clone()
        else:
            self.momentum.mul_(momentum).add_(gradient)
        return gradient + momentum * self.momentum if self._settings.outer_nesterov else self.momentum

    def _agree_on_integers(self) -> None:
        named = [(n, b) for n, b in self._model.named_buffers() if not b.is_floating_point()]
        named = [(n, b) for n, b in named if not b.is_complex()]
        counters = [b for n, b in named if n.rpartition(".")[2] in COUNTERS]
        others = [b for n, b in named if n.rpartition(".")[2] not in COUNTERS]
        if counters:
            put(self._communicator.all_reduce(flat(counters, torch.int64), "max"), counters)
        if others:
            values = flat(others, torch.int64)
            values = values if self._communicator.rank == 0 else torch.zeros_like(values)
            put(self._communicator.all_reduce(values), others)

    def begin_together(self) -> None:
        """Give every rank the weights and floating-point buffers of rank 0."""
        broadcast_weights(self._model, self.exchange, self._communicator.rank)

    def average_moments(self, optimizer: torch.optim.Optimizer, weight: float) -> None:
        """Average the optimizer's floating-point state over the ranks; step counters become the largest.

        A rank that has taken no step yet has no state, and goes on without.

        Raises:
            RuntimeError: ranks hold different state, which only happens if they train different parameters.
        """
        moments, counters = _moments(optimizer, self._trained)
        sizes = torch.tensor([len(flat(moments)), len(counters)], dtype=torch.int64)
        length, number = self._communicator.all_reduce(sizes, "max").tolist()
        if moments and (int(sizes[0]), int(sizes[1])) != (length, number):
            raise RuntimeError(
                "`strategy.inner_state` must be keep or reset if ranks train different parameters: their "
                "optimizers hold different state, which has no average."
            )
        if length:
            weighted = flat(moments) * weight if moments else torch.zeros(length, dtype=self._synced.dtype)
            # Ranks without state do not count in the mean.
            parts = torch.tensor([weight if moments else 0.0], dtype=torch.float64)
            whole = float(self._communicator.all_reduce(parts))
            mean = self._plain.sum_(weighted)
            if moments and whole:
                put(mean / whole, moments)
        if number:
            counts = flat(counters, torch.float64) if counters else torch.zeros(number, dtype=torch.float64)
            largest = self._communicator.all_reduce(counts, "max")
            if counters:
                put(largest, counters)


def broadcast_weights(model: nn.Module, exchange: Summation, rank: int) -> None:
    """Send the trained weights and floating-point buffers of rank 0 to every rank; all ranks call it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for tensors in (trained, [b for b in model.buffers() if b.is_floating_point() or b.is_complex()]):
        if tensors:
            values = flat(tensors)
            put(exchange.plain().sum_(values if rank == 0 else torch.zeros_like(values)), tensors)


def _moments(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the optimizer's state, in the parameters' order: moments of any shape, and single numbers."""
    moments: list[torch.Tensor] = []
    counters: list[torch.Tensor] = []
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for _, value in sorted(state.items()):
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
                single = value.numel() == 1 and (not value.dim() or value.shape != parameter.shape)
                (counters if single else moments).append(value)  # Adafactor's moments are rows and columns
    return moments, counters


def flat(tensors: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return all elements in one new vector on the host; a complex one as its real and imaginary part."""
    parts = [as_real(tensor.detach()).to("cpu", dtype).reshape(-1) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0)


@torch.no_grad()
def put(vector: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
    """Copy the elements of a vector into tensors of any device and type."""
    start = 0
    for tensor in map(as_real, tensors):
        part = vector[start : start + tensor.numel()]
        tensor.copy_(part.view(tensor.shape).to(tensor.dtype))
        start += tensor.numel()
