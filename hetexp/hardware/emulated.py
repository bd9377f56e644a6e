"""A card that is not there: real arithmetic on the CPU, paced to the card's modelled compute time.

The model of a pass is `overhead + FLOPs / (peak rate × efficiency)`, times `time_scale`. A forward pass
ends no earlier than that, and during backward no gradient leaves earlier than the share of the work
before it allows, so that an exchange overlaps with backward as it would on the card. What is not modelled
yet: links, memory limits, and kernels bound by memory bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from hetexp.core.call import call_model
from hetexp.core.device import GIB, DeviceSpec
from hetexp.hardware.catalogue import card
from hetexp.hardware.cpu import CpuBackend

if TYPE_CHECKING:
    import torch
    from torch import nn

OUTRUN_TOLERANCE = 0.02
"""Share of its modelled time that a device may run late before its timings are called invalid."""
SCALE_MARGIN = 1.5
"""How much slower than the rehearsed real work emulation runs, so that a busy moment does not outrun it."""


class EmulatedBackend(CpuBackend):
    """Paces the forward and backward passes of one model."""

    computes_on_cpu: ClassVar[bool] = True

    def __init__(self, spec: DeviceSpec) -> None:
        super().__init__(spec)
        assert spec.card is not None
        self.card = card(spec.card)
        self._pacer: Pacer | None = None

    @classmethod
    def detect(cls) -> list[DeviceSpec]:
        return []

    @classmethod
    def describe_card(cls, index: int, name: str) -> DeviceSpec:
        """Return emulated device number `index`, paced to a card of the catalogue."""
        known = card(name)
        return DeviceSpec(
            id=f"emulated:{index}",
            backend="emulated",
            index=index,
            name=f"{known.name} (emulated)",
            vendor=known.vendor,
            memory_bytes=int(known.memory_gib * GIB),
            card=name,
        )

    def peak_memory_bytes(self) -> int | None:
        return None  # the process's own memory says nothing about the card's

    def attach(self, model: nn.Module, inputs: Any) -> None:
        """Count the model's work on `inputs` and hook the passes; nothing is delayed until `start_pacing`."""
        dtype = next(p.dtype for p in model.parameters())
        self._pacer = Pacer(
            model, inputs, self.card.compute_seconds, precision=str(dtype).removeprefix("torch.")
        )

    def rehearsal_scale(self) -> float | None:
        assert self._pacer is not None
        return self._pacer.slowest_ratio * SCALE_MARGIN

    def start_pacing(self, time_scale: float) -> None:
        assert self._pacer is not None
        self._pacer.start(time_scale)

    def invalid_reason(self) -> str | None:
        if self._pacer is None or self._pacer.late_share <= OUTRUN_TOLERANCE:
            return None
        return (
            f"{self.spec}: this machine's real work took {self._pacer.late_share:.0%} longer than the "
            f"emulated card's modelled time; raise `hardware.time_scale` above {self._pacer.time_scale:.3g}"
        )


class Pacer:
    """Delays the passes of one model to modelled deadlines.

    Args:
        model: hooked as it is; wrappers such as DDP go around it afterwards, so that a gradient is delayed
            before the wrapper may send it.
        inputs: a small batch, to count the floating-point operations a sample.
        seconds: modelled seconds of a pass of so many operations at a precision.
        precision: as the catalogue names it (`float32`).
    """

    def __init__(
        self, model: nn.Module, inputs: Any, seconds: Callable[[float, str], float], precision: str
    ) -> None:
        work = count_work(model, inputs)
        self.forward_flops_per_sample, self.backward_flops_per_sample, by_parameter = work
        self._seconds, self._precision = seconds, precision
        self.time_scale = 0.0
        self.slowest_ratio = 0.0
        """Largest real ÷ modelled time of a pass while nothing was delayed yet."""
        self._modelled = 0.0
        self._late = 0.0
        self._samples = 0
        self._started = 0.0
        self._allowed = 0.0
        self._done = 0.0
        model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        model.register_forward_hook(self._end_forward)
        for parameter, fraction in by_parameter:
            parameter.register_hook(lambda _, fraction=fraction: self._gradient_ready(fraction))

    @property
    def late_share(self) -> float:
        """Seconds past the deadlines ÷ modelled seconds, since pacing started."""
        return self._late / self._modelled if self._modelled else 0.0

    def start(self, time_scale: float) -> None:
        """Delay every pass from now on to `time_scale` times its modelled duration."""
        self.time_scale = time_scale

    def _begin_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._samples = num_samples((args, kwargs))
        self._begin(self.forward_flops_per_sample)

    def _end_forward(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._wait_until(1.0)
        self._end()
        for tensor in tensors(output):
            if tensor.requires_grad:
                # The gradient of the output is the first thing that the backward pass hands to the model.
                tensor.register_hook(lambda _: self._begin_backward())
                break

    def _begin_backward(self) -> None:
        from torch.autograd import Variable

        self._begin(self.backward_flops_per_sample)
        # Runs when all gradients are there and before DDP waits for its exchange, which queues later.
        Variable._execution_engine.queue_callback(self._end_backward)

    def _gradient_ready(self, fraction: float) -> None:
        self._done += fraction
        self._wait_until(min(self._done, 1.0))

    def _end_backward(self) -> None:
        self._wait_until(1.0)  # parameters that took no part left their fraction unused
        self._end()

    def _begin(self, flops_per_sample: float) -> None:
        self._allowed = self._seconds(flops_per_sample * self._samples, self._precision)
        self._done = 0.0
        self._started = time.perf_counter()

    def _wait_until(self, fraction: float) -> None:
        left = self._started + fraction * self._allowed * self.time_scale - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def _end(self) -> None:
        elapsed = time.perf_counter() - self._started
        if self.time_scale == 0.0:
            self.slowest_ratio = max(self.slowest_ratio, elapsed / self._allowed)
            return
        # A sleep ends a little late by itself; only real work beyond a millisecond's grain counts as outrun.
        allowed = self._allowed * self.time_scale
        self._modelled += allowed
        self._late += max(0.0, elapsed - allowed - 1e-3)


def count_work(model: nn.Module, inputs: Any) -> tuple[float, float, list[tuple[torch.nn.Parameter, float]]]:
    """Count the floating-point operations of one sample.

    Returns:
        Operations forward, operations backward, and for each trainable parameter the fraction of the
        backward pass that ends with its gradient (fractions sum to 1).
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    modes, samples = [(m, m.training) for m in model.modules()], num_samples((inputs,))
    trainable = [p for p in model.parameters() if p.requires_grad]
    model.eval()  # no dropout, no running statistics: counting leaves the model as it was
    counter = FlopCounterMode(display=False)
    with torch.random.fork_rng(devices=[]), counter:
        output = call_model(model, inputs)
        forward = counter.get_total_flops()
        total = sum(t.sum() for t in tensors(output) if t.requires_grad)
        if isinstance(total, torch.Tensor):
            torch.autograd.grad(total, trainable, allow_unused=True)
        backward = counter.get_total_flops() - forward
    for module, training in modes:
        module.training = training
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    return forward / samples, backward / samples, list(_fractions(model, counts))


def _fractions(model: nn.Module, counts: dict[str, int]) -> Iterator[tuple[torch.nn.Parameter, float]]:
    """Share each module's operations among its own trainable parameters; all shares sum to 1."""
    root = type(model).__name__
    weights: dict[torch.nn.Parameter, float] = {}
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        work = counts.get(f"{root}.{name}" if name else root, 0) if not list(module.children()) else 0
        for parameter in own:
            weights[parameter] = weights.get(parameter, 0.0) + work / len(own)
    total = sum(weights.values())
    for parameter, weight in weights.items():
        yield parameter, weight / total if total else 1.0 / len(weights)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, dicts and dataclass-like outputs."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def num_samples(args: tuple[Any, ...]) -> int:
    """Return the number of rows of the first tensor among the arguments of a forward call."""
    return next((len(t) for t in tensors(args)), 0)
