"""BatchNorm over the whole batch, however unequal the ranks' parts of it.

torch's `SyncBatchNorm` refuses tensors of the CPU. Here every rank sends count, mean and variance of its
samples; all combine them alike (Chan, Golub and LeVeque 1979) and normalise by the result. Backward adds up
the two sums that the gradient depends on. So statistics, gradients and running statistics are those of one
device with all samples, and the same on every rank.

If a vendor's library joins all ranks, the devices exchange these numbers themselves: one gather in forward,
one sum in backward. torch's fused kernels combine them, and the host waits for no device. Otherwise the
numbers travel through the host, which combines them in float64.

A rank without samples has no forward pass, but the others wait for it at each layer. It repeats the calls
that one pass over a few samples made (`SynchronisedNorms.record`), and in backward the order of layers and
gradients of that pass, so that the exchanges of all ranks come in one order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.empty_share import zero_with_gradient
from hetexp.comm.forms import sparse_parameters
from hetexp.strategy.batch_norm_kernels import (
    Statistics,
    combined,
    combined_on_host,
    count_of,
    device_row,
    host_row,
    is_fused,
    wide_type,
)
from hetexp.strategy.batch_norm_layer import SynchronisedBatchNorm, synchronised_class
from hetexp.torch_private import BatchNormBase as _BatchNorm
from hetexp.torch_private import lerp_all_
from hetexp.training.measuring.trial_pass import try_out, undisturbed

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Waiting = Callable[[], AbstractContextManager[None]]


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers, by name: torch's, and those of classes that derive from them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


class SynchronisedNorms:
    """All BatchNorm layers of a model that ranks train together.

    Args:
        model: its layers are changed in place.
        communicator: with its own order of collectives, since those of backward come between others.
        waiting: returns a context for waits for other ranks inside a pass.
        leaves_unused: whether parameters unused in the recorded pass get no gradient without samples.
    """

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        waiting: Waiting = nullcontext,
        leaves_unused: bool = False,
    ) -> None:
        self._communicator, self._waiting = communicator, waiting
        self._on_device = is_fused(communicator.device)
        """Whether the devices exchange by themselves."""
        self._leaves_unused = leaves_unused
        layers = batch_norms(model)
        self.names, self.layers = list(layers), list(layers.values())
        self.active = False
        """Whether the ranks are in a step together."""
        self.num_calls = 0
        """Number of layers' statistics so far."""
        self._warned: set[int] = set()
        self._model = model
        self._record: _Record | None = None
        """The order of a pass's exchanges; filled by `record`."""
        self._recording = False
        for index, layer in enumerate(self.layers):
            kind: Any = type(layer)
            layer.__class__ = synchronised_class(kind)
            assert isinstance(layer, SynchronisedBatchNorm)
            layer.norms, layer.index = self, index

    def __deepcopy__(self, memo: Any) -> SynchronisedNorms:
        """Return this object: a copy of the model (an average of its weights) trains in no step."""
        return self

    def warn_once(self, index: int) -> None:
        """Warn of a layer that normalises without torch's `batch_norm`, once."""
        if index not in self._warned and self._communicator.rank == 0:
            log.warning(
                "%s is a %s, which normalises by other means than torch's batch_norm: "
                "its statistics are each rank's own.",
                self.names[index],
                type(self.layers[index]).__name__,
            )
        self._warned.add(index)

    def leave(self) -> None:
        """Leave the other ranks for good; another object of this class may take the layers over."""
        self._communicator = SoloCommunicator()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Surround a forward pass that all ranks do at the same time."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def record(self, inputs: Any) -> None:
        """Run one pass over a few samples on this rank alone, and record the order of its exchanges.

        Weights, gradients, buffers and the CPU's generator stay as they are; the model's own hooks do not
        run.

        Args:
            inputs: of a small batch, on the device.
        """
        record = self._record = _Record()
        trained = [p for p in self._model.parameters() if p.requires_grad]
        hooks = [p.register_hook(lambda _, p=p: record.backward.append(p)) for p in trained]
        self._recording = True
        try:
            with undisturbed(self._model), self.together():
                try_out(self._model, inputs)
        finally:
            self._recording = False
            for hook in hooks:
                hook.remove()

    def without_samples(self) -> Tensor:
        """Take part in a forward pass with no samples.

        Returns:
            A zero whose backward takes part in the other ranks', and gives parameters a zero.
        """
        assert self._record is not None, "record() comes first"
        for call in self._record.forward:
            self.num_calls += 1
            if self._on_device:
                self._exchange_on_device(call, None, None)
            else:
                self._exchange_on_host(call, None, None)
        first, sparse = next(self._model.parameters()), sparse_parameters(self._model)
        zero = torch.zeros((), dtype=first.dtype.to_real(), device=first.device, requires_grad=True)
        used = {id(event) for event in self._record.backward}
        unused = [p for p in self._model.parameters() if p.requires_grad and id(p) not in used]
        if self._leaves_unused:
            unused = []
        # Backward runs in the reverse order.
        for event in [*unused, *reversed(self._record.backward)]:
            if isinstance(event, int):
                zero = self._absent(zero, event)
            else:
                zero = zero_with_gradient(zero, event, 0.0, event in sparse)
        return zero

    def _absent(self, before: Tensor, index: int) -> Tensor:
        zero: Tensor = _Absent.apply(before, self, index)  # type: ignore[no-untyped-call]
        return zero

    def statistics(self, index: int, values: Tensor, eps: float, momentum: float | None = None) -> Statistics:
        """Return the statistics of all ranks' values, and update the layer's running statistics.

        Args:
            index: place of the layer.
            values: this rank's, [batch, channels, …].
            eps: that is added to the variance.
            momentum: of the running statistics, if the layer's own forward has counted the batch.

        Raises:
            ValueError: all ranks together have a single value a channel; the same on each of them.
            RuntimeError: the ranks are at different layers.
        """
        self.num_calls += 1
        one_each = count_of(values) <= len(values)
        call = _Call(index, values.shape[1], eps, wide_type(values.dtype), values.device, one_each)
        if self._recording:
            assert self._record is not None
            self._record.forward.append(call)
            self._record.calls[index] = call
        with torch.no_grad():
            exchange = self._exchange_on_device if self._on_device else self._exchange_on_host
            return exchange(call, values.detach(), momentum)

    def _exchange_on_device(self, call: _Call, values: Tensor | None, momentum: float | None) -> Statistics:
        """Return the statistics of all ranks' values; the host waits for no device."""
        home, layer = self._communicator.device, self.layers[call.index]
        row = device_row(values, call.channels, call.eps, call.dtype, home)
        running: list[Tensor | None] = [None, None]
        if self._recording:
            gathered = row.unsqueeze(0)
        else:
            with self._waiting():
                gathered = self._communicator.all_gather_rows(row)
            running = [layer.running_mean, layer.running_var]
        counts = gathered[:, -1]
        # Only a rank that may have too little waits for the others' counts.
        if not self._recording and (call.one_each if values is None else count_of(values) <= 1):
            self._check_count(call.index, float(counts.sum()))
        factor = 0.0 if running[0] is None else _momentum(layer, momentum)
        mean, invstd = combined(gathered, running, factor, call.eps)
        return Statistics(mean.to(call.device), invstd.to(call.device), counts.to(call.device, torch.int32))

    def _exchange_on_host(self, call: _Call, values: Tensor | None, momentum: float | None) -> Statistics:
        """Return the statistics of all ranks' values, which the host combines."""
        row = host_row(values, call.index, call.channels, call.dtype)
        if self._recording:
            gathered = row.unsqueeze(0)
        else:
            with self._waiting():
                gathered = self._communicator.all_gather_rows(row)
        heads = gathered[:, :2].tolist()
        total = sum(count for _, count in heads)
        if not self._recording:
            self._check_order([int(index) for index, _ in heads])
            self._check_count(call.index, total)
        mean, invstd, variance = (
            combined_on_host(gathered, total, call.eps).to(call.device, call.dtype).chunk(3)
        )
        if not self._recording:
            _follow(self.layers[call.index], mean, variance, total, momentum)
        return Statistics(mean, invstd, variance=variance, total=total)

    def add_up(self, layer_index: int, sums: Tensor | None) -> Tensor | None:
        """Return the sum over the ranks of backward's sums; `None` on a rank without samples.

        Args:
            sums: two numbers a channel, [2 × channels]; `None`: this rank has no samples.
        """
        if self._recording:
            assert self._record is not None
            self._record.backward.append(layer_index)
            return sums
        home = self._communicator.device
        if sums is None:
            assert self._record is not None
            call = self._record.calls[layer_index]
            total = torch.zeros(2 * call.channels, dtype=call.dtype, device=home)
        else:
            total = sums.to(home)
        with self._waiting():
            self._communicator.all_reduce_(total)
        return None if sums is None else total.to(sums.device)

    def _check_count(self, index: int, total: float) -> None:
        """Check that all ranks together have more than one value a channel.

        Raises:
            ValueError: they have not.
        """
        if total < 1.5:
            raise ValueError(
                f"{self.names[index]} normalises over the batch and needs more than one value a channel, but "
                f"all ranks together have {int(total)}. Set trainer.drop_last=true, or a larger batch."
            )

    def _check_order(self, indices: list[int]) -> None:
        """Check that all ranks are at one layer.

        Raises:
            RuntimeError: they are not.
        """
        if len(set(indices)) > 1:
            places = ", ".join(f"{self.names[index]} on rank {rank}" for rank, index in enumerate(indices))
            raise RuntimeError(
                f"the ranks have come to different BatchNorm layers: {places}. If a model's layers depend on "
                "the samples, `strategy.sync_batch_norm` must be false."
            )


@dataclass(frozen=True)
class _Call:
    """One call of a layer."""

    index: int
    """Place of the layer."""
    channels: int
    eps: float
    dtype: torch.dtype
    """Of the statistics."""
    device: torch.device
    """Of the values."""
    one_each: bool
    """Whether a sample has one value a channel."""


class _Record:
    """The order of one pass's exchanges."""

    def __init__(self) -> None:
        self.forward: list[_Call] = []
        """In the order of the calls."""
        self.calls: dict[int, _Call] = {}
        """The last call of each layer."""
        self.backward: list[Any] = []
        """Indices of layers that exchange sums, and parameters that get their gradient, in order."""


class _Absent(torch.autograd.Function):
    """Passes a gradient on, and takes part in one layer's exchange without samples."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, norms: SynchronisedNorms, layer_index: int) -> Tensor:
        ctx.norms, ctx.layer_index = norms, layer_index
        return before.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.norms.add_up(ctx.layer_index, None)
        return gradients[0], None, None


def _follow(layer: _BatchNorm, mean: Tensor, variance: Tensor, total: float, momentum: float | None) -> None:
    """Update the running statistics by the batch's, as `torch.nn.BatchNorm1d` does.

    Args:
        variance: biased: over `total` values.
        momentum: as in `_momentum`.
    """
    if layer.running_mean is None or layer.running_var is None:
        return
    running, factor = [layer.running_mean, layer.running_var], _momentum(layer, momentum)
    now = [mean.to(running[0]), (variance * (total / (total - 1))).to(running[1])]
    lerp_all_(running, now, factor)


def _momentum(layer: _BatchNorm, momentum: float | None) -> float:
    """Return the weight of a batch in the running statistics.

    Args:
        momentum: if the layer has counted the batch; `None`: count it, and take the layer's own.
    """
    if momentum is not None:
        return momentum
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    if layer.momentum is not None:
        return layer.momentum
    return 1.0 / float(layer.num_batches_tracked)  # all batches count alike
