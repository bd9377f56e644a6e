"""From this rank's microbatches to the exchanged gradient of the global batch, even if memory runs out."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hetexp.comm.empty_share import given_gradient
from hetexp.hardware.memory.out_of_memory import first_line, is_out_of_memory
from hetexp.model.base import WithAuxiliary
from hetexp.model.hooks import Shared
from hetexp.training.compiled import any_batch_size, compile_errors_explained
from hetexp.training.loss import batch_counts, count_of
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.model_hooks import no_tally
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import OutOfMemory, fatal_out_of_memory, sizes_of
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

NO_SAMPLES = (None, None)
"""The only microbatch of a rank whose share is empty."""
Mark = tuple[int, int] | None
"""Address and version of a gradient, which change if a backward pass writes to it."""


@dataclass
class Gradient:
    """The gradient that this rank's parameters hold, with its loss and counts."""

    loss_sum: torch.Tensor
    """Sum over the local elements, on the device: reading it would wait for the device."""
    global_count: float
    losses: list[torch.Tensor] = field(default_factory=list)
    """Each microbatch's part of the sum."""
    factor: float = 1.0
    """Factor of the losses before backward."""
    tally: torch.Tensor | None = None
    """The model's own counts of the local samples, if it counts anything."""
    shortage: OutOfMemory | None = None
    """Memory ran out on this rank: the gradient holds NaN on all ranks, and must not count."""
    finite: bool | None = None
    """Whether the gradient is finite on all ranks that step together; `None`: each rank checks it."""
    updates: bool = True
    """Whether the optimizer steps; not if nothing counts on a rank that steps by itself."""
    norm: torch.Tensor | None = None
    """Norm of the whole gradient, if this rank holds only a part of it."""
    shared: Shared | None = None
    """Facts of all ranks' samples, for a model with hooks between steps."""


class _ShortInForwardError(RuntimeError):
    """Memory ran out in the model, and the forward pass of the strategy's wrapper has ended."""


class _Passes:
    """The forward and backward passes of one step, and their state if one of them breaks off."""

    def __init__(self, state: TrainState, normalizer: LossNormalizer, meter: StepTimer) -> None:
        self._state, self._normalizer, self._meter = state, normalizer, meter
        self.loss_sum = torch.zeros((), dtype=state.dtype, device=state.device)
        self.losses: list[torch.Tensor] = []
        self.tally = no_tally(state)
        self.wrapping = False
        """Whether the strategy's wrapper is in a forward pass."""
        self.exchanging = False
        """Whether the wrapper waits for the gradients of a backward pass, to exchange them."""
        self._checks_finite = state.checks_finite
        self._counted: tuple[float, float] | None = None
        self._before: list[Mark] | None = None
        """Marks of all gradients before the backward pass that exchanges."""

    def factor(self) -> tuple[float, float]:
        """Return the normaliser's factor and the global count; the first call waits for the other ranks."""
        if self._counted is None:
            self._counted = self._normalizer.factor()
            if self._state.loss.num_terms:
                self._state.loss.set_global_counts(*self._normalizer.term_counts)
        return self._counted

    def run(self, microbatches: list[Any]) -> None:
        """Run forward and backward of all microbatches; the last backward pass exchanges."""
        state, meter = self._state, self._meter
        sizes = sizes_of(microbatches)
        for position, ((inputs, targets), size) in enumerate(zip(microbatches, sizes, strict=True)):
            last = position == len(microbatches) - 1
            exchanges = last and state.config.debug.exchange
            with nullcontext() if exchanges else state.strategy.accumulate(state.module):
                start = state.backend.mark()
                with state.autocast():
                    total = self._total(inputs, targets, size, last)
                meter.span(start, state.backend.mark())
                factor, _ = self.factor()
                if last and state.guard is not None:  # before the first pass there are no gradients
                    self._before = [_mark(p) if position else None for p in state.parameters]
                meter.backward(total * (_nan_if_not_finite(total, factor) if self._checks_finite else factor))
                if last:
                    state.strategy.check_exchanged(state.module)
            if inputs is not None:
                self.losses.append(total.detach())
            self.loss_sum += total.detach()

    def _total(self, inputs: Any, targets: Any, size: int, last: bool) -> Any:
        """Return the sum of the loss; the model's output is freed before backward."""
        output = self._forward(self._state.to_device(inputs), last)
        if inputs is None:
            return output
        if self.tally is not None and isinstance(output, WithAuxiliary) and output.tally is not None:
            self.tally += output.tally.sum(0, dtype=torch.int64).to(self.tally.device)
        if self._state.loss.num_terms:  # each is divided by its own count of all ranks
            self.factor()
        total = self._state.local_loss(output, targets, size)
        if total.requires_grad or count_of(self._state.loss.for_samples(size), targets):
            return total
        return self._with_zero_gradients(total)

    def _with_zero_gradients(self, total: torch.Tensor) -> torch.Tensor:
        """Connect a total of nothing, which the model's own loss may be, with the gradients of a step."""
        zero = given_gradient(self._state.model.parameters(), 0.0)
        return total if zero is None else total + zero

    def _forward(self, inputs: Any, last: bool) -> Any:
        self.wrapping = True
        if self._state.compiled is not None:
            any_batch_size(inputs)
        with compile_errors_explained() if self._state.compiled is not None else nullcontext():
            output = self._state.module(inputs)
        self.wrapping, self.exchanging = False, last
        guard = self._state.guard
        if guard is not None and guard.shortage is not None:
            raise _ShortInForwardError(guard.shortage)
        return output

    def missing(self) -> list[torch.nn.Parameter]:
        """Return the trained parameters that still lack a gradient of the pass that exchanges."""
        if self._before is None:
            return [p for p in self._state.parameters if p.requires_grad]
        marked = zip(self._state.parameters, self._before, strict=True)
        return [p for p, before in marked if p.requires_grad and _mark(p) == before]


def take_gradient(
    state: TrainState,
    step: int,
    microbatches: list[Any],
    normalizer: LossNormalizer,
    meter: StepTimer,
    num_passes: int = 1,
) -> Gradient:
    """Compute this rank's part of the gradient and exchange it.

    Args:
        num_passes: least number of passes; if the rank has fewer microbatches, the first have no samples.

    Raises:
        DeviceMemoryError: memory ran out, and the other ranks cannot learn of it.
    """
    sizes = sizes_of(microbatches)
    normalizer.start(*batch_counts(state.loss, [targets for _, targets in microbatches], sizes))
    state.optimizer.zero_grad(set_to_none=True)
    state.hook.begin_step()
    passes = _Passes(state, normalizer, meter)
    with fatal_out_of_memory(state, step, sizes, "The step cannot be done again."):
        try:
            state.backend.begin_step(step)
            passes.run([NO_SAMPLES] * (num_passes - len(microbatches)) + microbatches)
            factor, global_count = passes.factor()
            return Gradient(passes.loss_sum, global_count, passes.losses, factor, passes.tally)
        except RuntimeError as error:
            short = isinstance(error, _ShortInForwardError) or is_out_of_memory(error)
            if state.guard is None or passes.wrapping or not short:
                raise
            shortage = OutOfMemory(first_line(error), state.backend.free_memory_bytes())
        # Out of the `except`: the error is freed, and with it the frames that held the passes' tensors.
        log.warning("out of memory: %s", shortage.reason)
        _end_with_nan(state, passes, shortage.reason)
    nan = torch.full_like(passes.loss_sum, math.nan)
    return Gradient(nan, passes.factor()[1], tally=passes.tally, shortage=shortage)


def _nan_if_not_finite(total: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the factor, or NaN if the loss is not finite: its gradient may be finite even then.

    So every rank learns of it from the exchanged gradient, without another message.
    """
    return total.detach() * 0.0 + factor


def _end_with_nan(state: TrainState, passes: _Passes, reason: str) -> None:
    """Send NaN for the gradients that are missing in the step's exchange."""
    assert state.guard is not None
    passes.factor()
    if not passes.exchanging:
        state.optimizer.zero_grad(set_to_none=True)  # of earlier microbatches: the memory is needed
    state.backend.release_memory()
    with torch.autograd.set_detect_anomaly(False):  # these NaN are meant
        if not passes.exchanging:
            state.guard.shortage = reason
            state.module(None)
        state.strategy.abort_exchange(state.module, passes.missing())
    state.guard.shortage = None


def _mark(parameter: torch.nn.Parameter) -> Mark:
    gradient = parameter.grad
    if gradient is None:
        return None
    # DDP puts its bucket's memory in a gradient's place; a sparse one has no address, and grows in place.
    return 0 if gradient.is_sparse else gradient.data_ptr(), gradient._version
