"""From this rank's microbatches to the exchanged gradient of the global batch, also when memory runs out."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hetexp.hardware.memory.out_of_memory import first_line, is_out_of_memory
from hetexp.model.base import WithAuxiliary
from hetexp.model.hooks import Shared
from hetexp.training.compiled import any_batch_size, tells_why_not
from hetexp.training.loss import count_of
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.model_hooks import no_tally
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import OutOfMemory, ends_with_shortage, sizes_of
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

NO_SAMPLES = (None, None)
"""Stands for the only microbatch of a rank whose share is empty."""
Mark = tuple[int, int] | None
"""Tells a gradient before a backward pass from the same after it: address and version."""


@dataclass
class Gradient:
    """What this rank knows of the gradient that its parameters hold."""

    loss_sum: torch.Tensor
    """Sum over the local elements, on the device: reading it would wait for the device."""
    global_count: float
    losses: list[torch.Tensor] = field(default_factory=list)
    """Of these sums, each microbatch's own."""
    factor: float = 1.0
    """What they were multiplied by before backward."""
    tally: torch.Tensor | None = None
    """What the model has counted of the local samples, where it counts anything."""
    shortage: OutOfMemory | None = None
    """Memory ran out on this rank: the gradient is NaN somewhere on all ranks, and must not count."""
    finite: bool | None = None
    """Whether the gradient is finite on all ranks that step together; `None`: each rank finds that out."""
    updates: bool = True
    """Whether the weights follow it; not if nothing of it counts on a rank that steps by itself."""
    norm: torch.Tensor | None = None
    """Of the whole gradient, if this rank holds only a part of it."""
    shared: Shared | None = None
    """What all ranks know of the step's samples, for a model that does something between steps."""


class _ShortInForwardError(RuntimeError):
    """The model's memory ran out inside the strategy's wrapper, whose own forward has ended."""


class _Passes:
    """The passes of one step, and how far they have come."""

    def __init__(self, state: TrainState, normalizer: LossNormalizer, meter: StepTimer) -> None:
        self._state, self._normalizer, self._meter = state, normalizer, meter
        self.loss_sum = torch.zeros((), dtype=state.dtype, device=state.device)
        self.losses: list[torch.Tensor] = []
        self.tally = no_tally(state)
        self.wrapping = False
        """Whether the strategy's wrapper has begun a forward pass and not ended it."""
        self.exchanging = False
        """Whether it waits for the gradients of a backward pass, to exchange them."""
        self._looks = state.looks
        self._counted: tuple[float, float] | None = None
        self._before: list[Mark] | None = None
        """Of all parameters, when the backward pass that exchanges began."""

    def factor(self) -> tuple[float, float]:
        """Return what the normaliser gives; waits for the other ranks the first time."""
        if self._counted is None:
            self._counted = self._normalizer.factor()
        return self._counted

    def run(self, microbatches: list[Any]) -> None:
        """Do forward and backward of all microbatches; the last one exchanges."""
        state, meter = self._state, self._meter
        for position, (inputs, targets) in enumerate(microbatches):
            last = position == len(microbatches) - 1
            exchanges = last and state.config.debug.exchange
            with nullcontext() if exchanges else state.strategy.accumulate(state.module):
                start = state.backend.mark()
                with state.autocast():
                    total = self._total(inputs, targets, last)
                meter.span(start, state.backend.mark())
                factor, _ = self.factor()
                if last and state.guard is not None:  # before the first pass there are no gradients
                    self._before = [_mark(p) if position else None for p in state.parameters]
                meter.backward(total * (_nan_if_not_finite(total, factor) if self._looks else factor))
                if last:
                    state.strategy.check_exchanged(state.module)
            if inputs is not None:
                self.losses.append(total.detach())
            self.loss_sum += total.detach()

    def _total(self, inputs: Any, targets: Any, last: bool) -> Any:
        """Return the sum of the loss; the model's output is not held, so that backward need not hold it."""
        output = self._forward(self._state.to_device(inputs), last)
        if inputs is None:
            return output
        if self.tally is not None and isinstance(output, WithAuxiliary) and output.tally is not None:
            self.tally += output.tally.sum(0, dtype=torch.int64).to(self.tally.device)
        return self._state.local_loss(output, targets)

    def _forward(self, inputs: Any, last: bool) -> Any:
        self.wrapping = True
        if self._state.compiled is not None:
            any_batch_size(inputs)
        with tells_why_not() if self._state.compiled is not None else nullcontext():
            output = self._state.module(inputs)
        self.wrapping, self.exchanging = False, last
        guard = self._state.guard
        if guard is not None and guard.shortage is not None:
            raise _ShortInForwardError(guard.shortage)
        return output

    def missing(self) -> list[torch.nn.Parameter]:
        """Return the trained parameters that the backward pass that exchanges has not come to."""
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
        num_passes: least number of passes; the first ones are without samples where the rank has fewer.

    Raises:
        DeviceMemoryError: memory ran out, and the other ranks cannot learn of it.
    """
    normalizer.start(sum(count_of(state.loss, targets) for _, targets in microbatches))
    state.optimizer.zero_grad(set_to_none=True)
    if state.paced is not None:
        state.paced.begin_step()
    passes = _Passes(state, normalizer, meter)
    with ends_with_shortage(state, step, sizes_of(microbatches), "The step cannot be done again."):
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
        # The error is gone here, and with it the frames that held what the passes had computed.
        log.warning("out of memory: %s", shortage.said)
        _end_with_nan(state, passes, shortage.said)
    nan = torch.full_like(passes.loss_sum, math.nan)
    return Gradient(nan, passes.factor()[1], tally=passes.tally, shortage=shortage)


def _nan_if_not_finite(total: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the factor, and NaN where the loss is not finite: a loss may be infinite and its gradient not.

    So every rank learns of it from the exchanged gradient, without a question and without a wait.
    """
    return total.detach() * 0.0 + factor


def _end_with_nan(state: TrainState, passes: _Passes, said: str) -> None:
    """Take part in what is left of the step's exchange."""
    assert state.guard is not None
    passes.factor()
    if not passes.exchanging:
        state.optimizer.zero_grad(set_to_none=True)  # of earlier microbatches: the memory is needed
    state.backend.release_memory()
    with torch.autograd.set_detect_anomaly(False):  # these NaN are meant
        if not passes.exchanging:
            state.guard.shortage = said
            state.module(None)
        state.strategy.abort_exchange(state.module, passes.missing())
    state.guard.shortage = None


def _mark(parameter: torch.nn.Parameter) -> Mark:
    gradient = parameter.grad
    if gradient is None:
        return None
    # DDP puts its bucket's memory in a gradient's place; a sparse one has no address, and grows in place.
    return 0 if gradient.is_sparse else gradient.data_ptr(), gradient._version
