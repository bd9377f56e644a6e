"""Lets a rank without samples exchange gradients of zero, and a rank out of memory NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from hetexp.comm.forms import no_rows, sparse_parameters
from hetexp.core.call import call_model
from hetexp.hardware.memory.out_of_memory import first_line, is_out_of_memory
from hetexp.torch_private import uncompiled


class _Given(torch.autograd.Function):
    """A scalar 0 that depends on a parameter, and on the zero before it, with a given gradient.

    A real output times zero would not do: 0 × inf is NaN, and some layers refuse an empty batch.
    """

    @staticmethod
    def forward(
        ctx: Any, before: torch.Tensor | None, parameter: torch.Tensor, gradient: float, sparse: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        ctx.gradient, ctx.sparse = gradient, sparse
        # Real for a complex parameter, too: only a real number can be the end of backward.
        return torch.zeros((), dtype=parameter.dtype.to_real(), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None, None]:
        (parameter,) = ctx.saved_tensors
        before = gradients[0] if ctx.needs_input_grad[0] else None
        given = no_rows(parameter, ctx.gradient) if ctx.sparse else torch.full_like(parameter, ctx.gradient)
        return before, given, None, None


def zero_with_gradient(
    before: torch.Tensor | None, parameter: torch.Tensor, gradient: float, sparse: bool = False
) -> torch.Tensor:
    """Return a zero whose backward gives a parameter this gradient, and then goes on to the zero before.

    Args:
        sparse: whether the gradient is a sparse tensor: without rows, or with one if `gradient` is not 0.
    """
    zero: torch.Tensor = _Given.apply(before, parameter, gradient, sparse)  # type: ignore[no-untyped-call]
    return zero


def given_gradient(
    parameters: Iterable[nn.Parameter], gradient: float, sparse: Container[nn.Parameter] = ()
) -> torch.Tensor | None:
    """Return a zero whose backward gives `gradient` to every element of the trained parameters.

    Args:
        sparse: the parameters whose gradients are sparse (`zero_with_gradient`).
    """
    # A chain, so that gradients come in the order of a real backward: DDP uses rank 0's order on all ranks.
    zero: torch.Tensor | None = None
    for parameter in parameters:
        if parameter.requires_grad:
            zero = zero_with_gradient(zero, parameter, gradient, parameter in sparse)
    return zero


class PassesTogether(Protocol):
    """Collectives of all ranks inside a pass, each with its own samples or without any."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context for a forward pass with samples."""
        ...

    def without_samples(self) -> torch.Tensor:
        """Take part in a forward pass, and return a zero whose backward takes part in the backward pass."""
        ...

    def leave(self) -> None:
        """Leave the other ranks for good."""
        ...


class EmptyShareGuard(nn.Module):
    """Calls the model with inputs; without inputs, returns a zero that is connected to every parameter.

    A wrapper such as DDP goes around it. The wrapper's own forward, with its collectives, then ends even if
    the model runs out of memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        """Parameters that get a gradient in each step."""
        self.sparse = sparse_parameters(model)
        """Parameters whose gradients are sparse."""
        self.iterations: Sequence[Callable[[], None]] = ()
        """Called in a pass without samples: what a pass changes whatever its samples are."""
        self.norms: PassesTogether | None = None
        """The BatchNorm layers, if ranks have common statistics."""
        self.used: list[nn.Parameter] | None = None
        """Parameters that get a zero without samples; `None`: all trained parameters."""
        self.catches = False
        """Whether an out-of-memory error of the model is kept in `shortage` instead of raised."""
        self.shortage: str | None = None
        """First line of the out-of-memory error; until it is `None` again, the model is not called."""

    @property
    def bare_model(self) -> nn.Module:
        """The model; if `torch.compile` has compiled it, the one before."""
        return uncompiled(self.model)

    def forward(self, inputs: Any) -> Any:
        if inputs is not None and self.shortage is None:
            try:
                with self.norms.together() if self.norms is not None else nullcontext():
                    return call_model(self.model, inputs)
            except Exception as error:
                if not self.catches or not is_out_of_memory(error):
                    raise
                self.shortage = first_line(error)
            # Here the error is freed, and with it the frames that held the pass's tensors.
        if self.shortage is None:
            for iterate in self.iterations:
                iterate()
        if self.norms is not None and self.shortage is None:
            return self.norms.without_samples()
        if self.shortage is not None:
            return given_gradient(self.model.parameters(), math.nan, self.sparse)
        used = self.model.parameters() if self.used is None else self.used
        return given_gradient(used, 0.0, self.sparse)
