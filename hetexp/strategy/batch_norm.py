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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.empty_share import zero_with_gradient
from hetexp.model.recompute import once
from hetexp.strategy.trial_pass import try_out, undisturbed

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Waiting = Callable[[], AbstractContextManager[None]]


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers, by name: torch's, and those of classes that derive from them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


class SynchronisedBatchNorm(_BatchNorm):
    """The class that a BatchNorm layer gets; the object keeps its names, weights and hooks.

    Outside of training steps (in evaluation, or in a trial pass of one rank) it works as before.
    """

    norms: SynchronisedNorms
    index: int

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least a 2D input (got {input.dim()}D input)")

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # what ranks do together is no part of a graph
    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input [batch, channels, …]."""
        if not self._is_together():
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        of_batch = once(lambda: self.norms.statistics(self.index, input))
        return self._normalised(input, self.weight, self.bias, of_batch, self.eps)

    def _is_together(self) -> bool:
        # If it is computed again in backward, the ranks are no longer in a forward pass together.
        return once(lambda: self.training and self.norms.active)

    def _normalised(
        self, values: Tensor, weight: Tensor | None, bias: Tensor | None, of_batch: _Statistics, eps: float
    ) -> Tensor:
        out: Tensor = _Normalise.apply(values, weight, bias, of_batch, self, eps)  # type: ignore[no-untyped-call]
        return out


class _SynchronisedSync(SynchronisedBatchNorm, nn.SyncBatchNorm):
    """Comes before torch's own `SyncBatchNorm` for the classes that derive from that."""


class _OwnForward(SynchronisedBatchNorm):
    """Comes before a class with a forward of its own, such as one that includes the activation.

    That forward goes on to torch's forward, which is `SynchronisedBatchNorm`'s here, or calls
    `functional.batch_norm`, whose result is then the one of all ranks.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the class's own forward returns."""
        forward = super().forward
        if not self._is_together():
            return forward(*args, **kwargs)
        first: list[bool] = []
        once(lambda: first.append(True))
        tracked = self.num_batches_tracked
        before = tracked.clone() if tracked is not None and not first else None
        calls = self.norms.num_calls
        try:
            with _Calls(self):
                out = forward(*args, **kwargs)
        finally:  # torch ends a computation in backward by an exception once it has what it needs
            if before is not None and tracked is not None:
                tracked.copy_(before)
        if first and self.norms.num_calls == calls:
            self.norms.warn_once(self.index)
        return out

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Do what `functional.batch_norm` does, by the statistics of all ranks' values."""
        if not training:
            return functional.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        of_batch = once(lambda: self.norms.statistics(self.index, input, momentum))
        return self._normalised(input, weight, bias, of_batch, eps)


class _Calls(TorchFunctionMode):
    """Turns the calls of `functional.batch_norm` within a layer's forward into the layer's own."""

    def __init__(self, layer: _OwnForward) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        called = self._layer.batch_norm if func is functional.batch_norm else func
        return called(*args, **(kwargs or {}))


@cache
def _synchronised(layer_class: type[_BatchNorm]) -> type[SynchronisedBatchNorm]:
    """Return the class that a layer of this class gets."""
    if issubclass(layer_class, SynchronisedBatchNorm):
        return layer_class
    if layer_class is nn.SyncBatchNorm or layer_class.forward is _BatchNorm.forward:
        return SynchronisedBatchNorm
    base = _SynchronisedSync if issubclass(layer_class, nn.SyncBatchNorm) else SynchronisedBatchNorm
    # Python's order: the class's own forward, then what is in place of torch's.
    return type(layer_class.__name__, (_OwnForward, layer_class, base), {"__reduce_ex__": _reduced})


def _reduced(layer: SynchronisedBatchNorm, protocol: int) -> Any:
    """Return what pickle and copy need: the class is made, and has no name that they could find."""
    return _remade, (type(layer).__mro__[2],), layer.__dict__


def _remade(layer_class: type[_BatchNorm]) -> SynchronisedBatchNorm:
    made = _synchronised(layer_class)
    return made.__new__(made)


@dataclass(frozen=True)
class _Statistics:
    """Statistics of the whole batch on the values' device; all but `count` are [channels]."""

    count: Tensor
    mean: Tensor
    variance: Tensor
    """Biased: over the count."""


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
            layer.__class__ = _synchronised(type(layer))
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
        first = next(self._model.parameters())
        zero = first.new_zeros(()).requires_grad_()
        used = {id(event) for event in self._record.backward}
        unused = [p for p in self._model.parameters() if p.requires_grad and id(p) not in used]
        if self._leaves_unused:
            unused = []
        # Backward runs in the reverse order.
        for event in [*unused, *reversed(self._record.backward)]:
            if isinstance(event, int):
                zero = self._absent(zero, event)
            else:
                zero = zero_with_gradient(zero, event, 0.0)
        return zero

    def _absent(self, before: Tensor, index: int) -> Tensor:
        zero: Tensor = _Absent.apply(before, self, index)  # type: ignore[no-untyped-call]
        return zero

    def statistics(self, index: int, values: Tensor | None, momentum: float | None = None) -> _Statistics:
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
                variance, mean = torch.var_mean(_wide(values.detach()), _dims(values), correction=0)
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
        dtype = _wide_type(values.dtype) if values is not None else mean.dtype
        device = values.device if values is not None else home
        return _Statistics(*(t.to(device, dtype) for t in (total, mean, squares / total)))

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


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics; the gradient includes their dependence on the values."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        of_batch: _Statistics,
        layer: SynchronisedBatchNorm,
        eps: float,
    ) -> Tensor:
        ctx.layer, ctx.has_bias, ctx.eps = layer, bias is not None, eps
        ctx.save_for_backward(values, weight, of_batch.count, of_batch.mean, of_batch.variance)
        wide = _wide(values)
        mean, variance = of_batch.mean, of_batch.variance
        weight, bias = (t.to(wide.dtype) if t is not None else None for t in (weight, bias))
        out = functional.batch_norm(wide, mean, variance, weight, bias, training=False, eps=eps)
        return out.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, count, mean, variance = ctx.saved_tensors
        layer: SynchronisedBatchNorm = ctx.layer
        gradient = _wide(gradients[0])
        dims, shape = _dims(values), [1, -1, *[1] * (values.dim() - 2)]
        scale = (variance + ctx.eps).rsqrt()
        centred = _wide(values) - mean.reshape(shape)
        sums = torch.stack([gradient.sum(dims), (gradient * centred).sum(dims)])
        of_weight = (sums[1] * scale).to(weight.dtype) if weight is not None else None
        of_bias = sums[0].to(weight.dtype) if ctx.has_bias else None
        of_values = None
        if ctx.needs_input_grad[0]:
            total = layer.norms.add_up(layer.index, sums)
            assert total is not None
            by_mean, by_scale = (total / count).unbind()
            of_values = gradient - by_mean.reshape(shape) - centred * (by_scale * scale**2).reshape(shape)
            factor = scale * weight if weight is not None else scale
            of_values = (of_values * factor.reshape(shape)).to(values.dtype)
        return of_values, of_weight, of_bias, None, None, None


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


def _dims(values: Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _wide(values: Tensor) -> Tensor:
    return values.to(_wide_type(values.dtype))
