"""BatchNorm over the whole batch, however unequal the ranks' parts of it.

torch's `SyncBatchNorm` refuses tensors of the CPU. Here every rank sends count, mean and sum of squared
deviations of its samples; all combine them alike (Chan, Golub and LeVeque 1979) and normalise by the result.
Backward adds up the two sums that the gradient depends on. So statistics, gradients and running statistics
are those of one device with all samples, and the same on every rank.

A rank without samples has no forward pass, but the others wait for it at each layer. It repeats the calls
that one pass over a few samples made (`SynchronisedNorms.record`), and in backward the order of layers and
gradients of that pass, so that the exchanges of all ranks come in one order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.empty_share import zero_with_gradient
from hetexp.comm.forms import sparse_parameters
from hetexp.strategy.batch_norm_layer import (
    Statistics,
    SynchronisedBatchNorm,
    dims,
    synchronised_class,
    wide,
    wide_type,
)
from hetexp.torch_private import BatchNormBase as _BatchNorm
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
        for index in self._record.forward:
            self.statistics(index, None)
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

    def statistics(self, index: int, values: Tensor | None, momentum: float | None = None) -> Statistics:
        """Return the statistics of all ranks' values, and update the layer's running statistics.

        Args:
            index: place of the layer.
            values: this rank's, [batch, channels, …]; `None`: it has none.
            momentum: of the running statistics, if the layer's own forward has counted the batch.

        Raises:
            ValueError: all ranks together have a single value a channel; the same on each of them.
            RuntimeError: the ranks are at different layers.
        """
        home, layer = self._communicator.device, self.layers[index]
        self.num_calls += 1
        world, rank = self._communicator.world_size, self._communicator.rank
        gathered = torch.zeros(world, 2 + 2 * layer.num_features, dtype=torch.float64, device=home)
        gathered[rank, 0] = index
        count = 0
        if values is not None:
            count = values.numel() // values.shape[1]
            if count:
                variance, mean = torch.var_mean(wide(values.detach()), dims(values), correction=0)
                gathered[rank, 1] = count
                gathered[rank, 2:] = torch.cat([mean, variance * count]).to(home)
        if self._recording:
            assert self._record is not None
            self._record.forward.append(index)
            gathered = gathered[rank : rank + 1]
        else:
            with self._waiting():
                gathered = self._communicator.all_reduce(gathered)
            self._check_order(gathered[:, 0])
        counts, means, squares = gathered[:, 1:2], *gathered[:, 2:].chunk(2, dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        squares = (squares + counts * (means - mean) ** 2).sum(0)
        if count <= 1 and not self._recording and float(total) <= 1:
            raise ValueError(
                f"{self.names[index]} normalises over the batch and needs more than one value a channel, but "
                f"all ranks together have {int(total)}. Set trainer.drop_last=true, or a larger batch."
            )
        if not self._recording:
            _follow(layer, mean, squares / (total - 1), momentum)
        dtype = wide_type(values.dtype) if values is not None else mean.dtype
        device = values.device if values is not None else home
        return Statistics(*(t.to(device, dtype) for t in (total, mean, squares / total)))

    def add_up(self, layer_index: int, sums: Tensor | None) -> Tensor | None:
        """Return the sum over the ranks of backward's sums; `None` on a rank without samples.

        Args:
            sums: two numbers a channel, [2, channels]; `None`: this rank has no samples.
        """
        if self._recording:
            assert self._record is not None
            self._record.backward.append(layer_index)
            return sums
        home = self._communicator.device
        size = 2 * self.layers[layer_index].num_features
        gathered = torch.zeros(1 + size, dtype=torch.float64, device=home)
        gathered[0] = layer_index
        if sums is not None:
            gathered[1:] = sums.flatten().to(home)
        with self._waiting():
            gathered = self._communicator.all_reduce(gathered)
        if sums is None:
            return None
        return gathered[1:].reshape(2, -1).to(sums.device, sums.dtype)

    def _check_order(self, indices: Tensor) -> None:
        """Check that all ranks are at one layer; not on an accelerator, which would have to be waited for."""
        if indices.device.type != "cpu":
            return
        names = [self.names[int(index)] for index in indices]
        if len(set(names)) > 1:
            places = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(names))
            raise RuntimeError(
                f"the ranks have come to different BatchNorm layers: {places}. If a model's layers depend on "
                "the samples, `strategy.sync_batch_norm` must be false."
            )


class _Record:
    """The order of one pass's exchanges."""

    def __init__(self) -> None:
        self.forward: list[int] = []
        """Indices of the layers, in the order of their calls."""
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


def _follow(layer: _BatchNorm, mean: Tensor, unbiased: Tensor, momentum: float | None) -> None:
    """Update the running statistics by the batch's, as `torch.nn.BatchNorm1d` does.

    Args:
        momentum: if the layer has counted the batch; `None`: count it, and take the layer's own.
    """
    if layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    with torch.no_grad():
        if momentum is None:
            layer.num_batches_tracked.add_(1)
            momentum = layer.momentum
            if momentum is None:  # all batches count alike
                momentum = 1.0 / float(layer.num_batches_tracked)
        for running, now in ((layer.running_mean, mean), (layer.running_var, unbiased)):
            running.lerp_(now.to(running.device, running.dtype), momentum)
