"""The classes that BatchNorm layers get to normalise over all ranks (`hetexp.strategy.batch_norm`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hetexp.model.recompute import once
from hetexp.strategy.batch_norm_kernels import Backward, Statistics, dense, is_fused, normalised
from hetexp.torch_private import BatchNormBase as _BatchNorm

if TYPE_CHECKING:
    from torch import Tensor


class Group(Protocol):
    """What layers ask of the ranks that train together: `hetexp.strategy.batch_norm.SynchronisedNorms`."""

    active: bool
    num_calls: int

    def statistics(self, index: int, values: Tensor, eps: float, momentum: float | None = None) -> Statistics:
        """Return the statistics of all ranks' values."""

    def add_up(self, layer_index: int, sums: Tensor | None) -> Tensor | None:
        """Return the sum over the ranks of backward's sums."""

    def warn_once(self, index: int) -> None:
        """Warn of a layer that normalises by other means."""


class SynchronisedBatchNorm(_BatchNorm):
    """The class that a BatchNorm layer gets; the object keeps its names, weights and hooks.

    Outside of training steps (in evaluation, or in a trial pass of one rank) it works as before.
    """

    norms: Group
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
        return self._normalised(input, self.weight, self.bias, self.eps)

    def _is_together(self) -> bool:
        # If it is computed again in backward, the ranks are no longer in a forward pass together.
        return once(lambda: self.training and self.norms.active)

    def _normalised(
        self,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        momentum: float | None = None,
    ) -> Tensor:
        if is_fused(values.device):
            values = dense(values)
        statistics = once(lambda: self.norms.statistics(self.index, values, eps, momentum))
        out: Tensor = _Normalise.apply(values, weight, bias, statistics, self, eps)  # type: ignore[no-untyped-call]
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
        return self._normalised(input, weight, bias, eps, momentum)


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
def synchronised_class(layer_class: Any) -> type[SynchronisedBatchNorm]:
    """Return the class that a layer of this class gets."""
    if issubclass(layer_class, SynchronisedBatchNorm):
        return layer_class  # type: ignore[no-any-return]
    if layer_class is nn.SyncBatchNorm or layer_class.forward is _BatchNorm.forward:
        return SynchronisedBatchNorm
    base = _SynchronisedSync if issubclass(layer_class, nn.SyncBatchNorm) else SynchronisedBatchNorm
    # Python's order: the class's own forward, then what is in place of torch's.
    return type(layer_class.__name__, (_OwnForward, layer_class, base), {"__reduce_ex__": _reduced})


def _reduced(layer: SynchronisedBatchNorm, protocol: int) -> Any:
    """Return what pickle and copy need: the class is made, and has no name that they could find."""
    return _remade, (type(layer).__mro__[2],), layer.__dict__


def _remade(layer_class: Any) -> SynchronisedBatchNorm:
    made = synchronised_class(layer_class)
    return made.__new__(made)


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics; the gradient includes their dependence on the values."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        layer: SynchronisedBatchNorm,
        eps: float,
    ) -> Tensor:
        ctx.layer, ctx.eps, ctx.total = layer, eps, statistics.total
        ctx.save_for_backward(
            values, weight, statistics.mean, statistics.invstd, statistics.counts, statistics.variance
        )
        return normalised(values, weight, bias, statistics, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, invstd, counts, variance = ctx.saved_tensors
        layer: SynchronisedBatchNorm = ctx.layer
        statistics = Statistics(mean, invstd, counts, variance, ctx.total)
        passed = Backward(gradients[0], values, weight, statistics, ctx.eps, ctx.needs_input_grad[:3])
        sums, of_values = passed.sums(), None
        if sums is not None:
            total = layer.norms.add_up(layer.index, sums)
            assert total is not None
            of_values = passed.of_values(total)
        return of_values, passed.of_weight, passed.of_bias, None, None, None
