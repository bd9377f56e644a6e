"""Paces a model's passes on the CPU to the modelled time of a card.

A step has three phases: forward (with the transfer of inputs to the card), backward, update. A phase begins
with its real work and lasts at least its modelled duration × `time_scale`. In backward, each gradient is
delayed by the share of the work before it, so that an exchange overlaps with the remaining work as on the
card.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from hetexp.core.call import call_model
from hetexp.hardware.emulation.time_scale import least_scale

if TYPE_CHECKING:
    import torch
    from torch import nn

GRAIN_SECONDS = 1e-3
"""A sleep ends a little late by itself; only a later end counts as late."""


MOST_PHASES = 64
"""Most phases of a kind whose real work is kept for the choice of a pace."""
REST_MARGIN = 1.2
"""Time for the work behind a gradient ÷ its time in a rehearsal."""


class PassTimes(Protocol):
    """A card's modelled seconds, before `time_scale`."""

    def forward(self, num_samples: int, num_bytes: int) -> float:
        """Return the time of a forward pass whose inputs have so many bytes."""
        ...

    def backward(self, num_samples: int) -> float:
        """Return the time of a backward pass."""
        ...

    def update(self) -> float:
        """Return the time from the last gradient to the next forward pass."""
        ...


class Pacer:
    """Delays the passes of the modules of one device, which computes one pass at a time."""

    def __init__(self) -> None:
        self._update_seconds: Callable[[], float] | None = None
        self.time_scale = 0.0
        self._work: dict[str, list[tuple[float, float]]] = {}
        """Of each kind of phase since `start`: seconds of real work, modelled seconds."""
        self._arrivals: list[float] = []
        """Seconds of real work until each gradient of the running backward pass, in their order."""
        self._left: list[float] = []
        """Real seconds of work after each gradient ÷ modelled seconds of the pass, before `start`."""
        self._num_models = 0
        self._shortest = math.inf
        self._modelled = self._late = 0.0
        self._modelled_before = 0.0
        """Modelled seconds before the last `start`."""
        self._samples = 0
        self._phase = ""
        self._started = self._allowed = self._slept = 0.0
        self.backward_done = 1.0
        """Fraction of the running backward pass whose modelled time is over."""
        self._updating = False
        self.paced: list[tuple[str, float, float]] = []
        """Name, real time and modelled time × scale of each paced phase, to check the emulation."""

    def follow(
        self, model: nn.Module, times: PassTimes, fractions: list[tuple[torch.nn.Parameter, float]]
    ) -> None:
        """Delay the passes of a module.

        Args:
            model: unwrapped module; DDP wraps it later, so that a gradient is delayed before DDP may send it.
            times: the card's modelled times.
            fractions: share of each trainable parameter in the backward pass (`count_work`).
        """
        self._update_seconds = self._update_seconds or times.update
        self._num_models += 1
        self.backward_done = 0.0
        model.register_forward_pre_hook(partial(self._begin_forward, times), with_kwargs=True)
        model.register_forward_hook(partial(self._end_forward, times))
        for parameter, fraction in fractions:
            parameter.register_hook(lambda _, fraction=fraction: self._gradient_ready(fraction))

    @property
    def late_share(self) -> float:
        """Seconds past the deadlines ÷ modelled seconds, since pacing started."""
        return self._late / self._modelled if self._modelled else 0.0

    @property
    def modelled_seconds(self) -> float:
        """Modelled seconds of all paced phases."""
        running = self._modelled / self.time_scale if self.time_scale else 0.0
        return self._modelled_before + running

    def needed_scale(self, margin: float) -> float:
        """Return the smallest scale at which the phases since `start` are late by `ACCEPTED_LATE` at most.

        A phase takes `margin` times the median of its kind's real work, without the delays: another pass may
        meet a busy moment. The first one, which warms up caches, does not count.
        """
        kinds = []
        for phases in self._work.values():
            later = phases[1:] or phases
            typical = statistics.median(real for real, _ in later)
            kinds.append((typical * margin * len(later), sum(allowed for _, allowed in later)))
        return least_scale(kinds)

    def shortest_pass(self) -> float:
        """Return the seconds of the shortest modelled forward or backward pass so far."""
        return self._shortest

    def start(self, time_scale: float) -> None:
        """Delay every phase from now on to `time_scale` times its modelled duration, and count from 0.

        A gradient is delayed less if the work behind it would not fit into the rest of the pass, as its share
        of the modelled work and of this machine's time differ.
        """
        backward = self._work.get("backward")
        if backward and self._arrivals and self._num_models == 1:
            work, modelled = backward[-1]
            self._left = [(work - until) / modelled for until in self._arrivals]
        self._modelled_before = self.modelled_seconds
        self.time_scale = time_scale
        self._updating = False
        self._modelled = self._late = 0.0
        self._work.clear()
        self.paced.clear()

    def begin_update(self) -> None:
        """Begin the optimizer's phase: all gradients have arrived."""
        if self._update_seconds is not None:
            self._begin("update", self._update_seconds())
            self._updating = True

    def end_update(self) -> None:
        """Wait for the end of the optimizer's phase, if it is running."""
        if self._updating:
            self._updating = False
            self._wait_until(1.0)
            self._end()

    def put_off(self, seconds: float) -> None:
        """Delay the end of the running phase by a wait for other ranks."""
        self._started += seconds

    def forget(self) -> None:
        """Drop the optimizer's phase, as an evaluation or a checkpoint came after it."""
        self._updating = False

    def _begin_forward(
        self, times: PassTimes, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._samples = num_samples((args, kwargs))
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors((args, kwargs)))
        self._begin("forward", times.forward(self._samples, num_bytes))

    def _end_forward(self, times: PassTimes, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._wait_until(1.0)
        self._end()
        samples = self._samples  # of this pass, whose backward may come after other forward passes
        for tensor in tensors(output):
            if tensor.requires_grad:
                # The model's backward pass begins with the gradient of its output.
                tensor.register_hook(lambda _: self._begin_backward(times, samples))
                break

    def _begin_backward(self, times: PassTimes, samples: int) -> None:
        from hetexp.torch_private import queue_after_backward

        self._begin("backward", times.backward(samples))
        self._arrivals = []
        self.backward_done = 0.0
        # Runs after all gradients and before DDP waits for its exchange, which DDP queues later.
        queue_after_backward(self._end_backward)

    def _gradient_ready(self, fraction: float) -> None:
        self.backward_done = min(self.backward_done + fraction, 1.0)
        self._arrivals.append(time.perf_counter() - self._started - self._slept)
        until = self.backward_done
        if len(self._arrivals) <= len(self._left) and self.time_scale:
            left = self._left[len(self._arrivals) - 1]
            until = min(until, 1.0 - REST_MARGIN * left / self.time_scale)
        self._wait_until(until)

    def _end_backward(self) -> None:
        self._wait_until(1.0)  # parameters without a gradient left their fraction unused
        self.backward_done = 1.0
        self._end()

    def _begin(self, phase: str, seconds: float) -> None:
        self._phase, self._allowed = phase, seconds
        if phase != "update":
            self._shortest = min(self._shortest, seconds)
        self._slept = 0.0
        self._started = time.perf_counter()

    def _wait_until(self, fraction: float) -> None:
        began = time.perf_counter()
        left = self._started + fraction * self._allowed * self.time_scale - began
        if left > 0:
            time.sleep(left)
            self._slept += time.perf_counter() - began

    def _end(self) -> None:
        elapsed = time.perf_counter() - self._started
        if len(phases := self._work.setdefault(self._phase, [])) < MOST_PHASES:
            phases.append((elapsed - self._slept, self._allowed))
        if self.time_scale == 0.0:
            return
        allowed = self._allowed * self.time_scale
        self._modelled += allowed
        self._late += max(0.0, elapsed - allowed - GRAIN_SECONDS)
        self.paced.append((self._phase, elapsed, allowed))


class Marks(Protocol):
    """The methods of a backend that measure its device's time."""

    def mark(self) -> Any: ...
    def wait(self, mark: Any) -> None: ...
    def seconds_between(self, start: Any, end: Any) -> float: ...


STRETCHES = 8
"""Number of stretches of a backward pass; a slowed device idles after each."""


class Slowdown:
    """Slows a real device: after each stretch of work it idles for a multiple of the stretch's time.

    At each stretch's end, the host waits for the device and the device for the next launch. So stretches are
    few, to add little time beyond the factor. The host waits for the computing stream only: an exchange
    beside it may be waiting for other ranks.

    Args:
        model: unwrapped model.
        factor: returns the factor of the slow-down; called at each stretch.
        device: measures the work.
    """

    def __init__(self, model: nn.Module, factor: Callable[[], float], device: Marks) -> None:
        self._factor, self._device = factor, device
        self._started: Any = None
        model.register_forward_pre_hook(lambda *_: self._begin())
        model.register_forward_hook(self._end_forward)
        for parameter in spread_out([p for p in model.parameters() if p.requires_grad], STRETCHES):
            parameter.register_hook(lambda _: self.catch_up())

    def _begin(self) -> None:
        mark = self._device.mark()
        self._device.wait(mark)
        self._started = mark

    def _end_forward(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.catch_up()
        self._stop()
        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin_backward())
                break

    def _begin_backward(self) -> None:
        from hetexp.torch_private import queue_after_backward

        self._begin()
        queue_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self.catch_up()  # for the work after the last hook
        self._stop()

    def _stop(self) -> None:
        """Count nothing as work until the next pass, not even the gradients of an empty share."""
        self._started = None

    def catch_up(self) -> None:
        """Idle for the time by which the slow-down prolongs the work since the last call."""
        factor = self._factor()
        if factor <= 1.0 or self._started is None:
            return
        mark = self._device.mark()
        self._device.wait(mark)
        time.sleep(self._device.seconds_between(self._started, mark) * (factor - 1.0))
        self._started = self._device.mark()

    def go_on(self) -> None:
        """Count work from now on; the time since `catch_up` was no work."""
        if self._started is not None:
            self._begin()


def spread_out(parameters: Sequence[nn.Parameter], count: int) -> list[nn.Parameter]:
    """Return up to `count` parameters, spread about evenly over the elements, in the order of backward.

    The last parameter is among them.
    """
    backwards = list(reversed(parameters))
    if len(backwards) <= count:
        return backwards
    total = sum(p.numel() for p in backwards)
    chosen: list[nn.Parameter] = []
    done = 0
    for parameter in backwards:
        done += parameter.numel()
        if done * count >= (len(chosen) + 1) * total:
            chosen.append(parameter)
    return chosen


def count_work(
    model: nn.Module, inputs: Any, samples: int | None = None
) -> tuple[float, float, list[tuple[torch.nn.Parameter, float]]]:
    """Count the floating-point operations of one sample.

    Args:
        samples: number of the inputs'; `None`: the rows of their first tensor.
        inputs: those that require a gradient get it in backward, as in a stage after the first.

    Returns:
        Operations forward, operations backward, and for each trainable parameter the fraction of the
        backward pass that ends with its gradient (fractions sum to 1).
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    modes, samples = [(m, m.training) for m in model.modules()], samples or num_samples((inputs,))
    trainable = [p for p in model.parameters() if p.requires_grad]
    model.eval()  # no dropout, no running statistics: counting leaves the model as it was
    counter = FlopCounterMode(display=False)
    with torch.random.fork_rng(devices=[]), counter:
        before = [tensor for tensor in tensors(inputs) if tensor.requires_grad]
        output = call_model(model, _no_leaves(inputs))
        forward = counter.get_total_flops()
        total = sum(t.sum() for t in tensors(output) if t.requires_grad)
        if isinstance(total, torch.Tensor):
            torch.autograd.grad(total, [*trainable, *before], allow_unused=True)
        backward = counter.get_total_flops() - forward
    for module, training in modes:
        module.training = training
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    return forward / samples, backward / samples, list(_fractions(model, counts))


def _no_leaves(inputs: Any) -> Any:
    """Return inputs that require a gradient as non-leaves: the counter's hooks refuse leaves of a graph."""
    if type(inputs) is tuple:
        return tuple(_no_leaves(item) for item in inputs)
    required = getattr(inputs, "requires_grad", False)
    return inputs.view_as(inputs) if required else inputs


def _fractions(model: nn.Module, counts: dict[str, int]) -> Iterator[tuple[torch.nn.Parameter, float]]:
    """Divide each module's operations among its trainable parameters; all fractions sum to 1."""
    root = type(model).__name__
    weights: dict[torch.nn.Parameter, float] = {}
    for name, module in model.named_modules():
        trainable = [p for p in module.parameters(recurse=False) if p.requires_grad]
        work = counts.get(f"{root}.{name}" if name else root, 0) if not list(module.children()) else 0
        for parameter in trainable:
            weights[parameter] = weights.get(parameter, 0.0) + work / len(trainable)
    total = sum(weights.values())
    for parameter, weight in weights.items():
        yield parameter, weight / total if total else 1.0 / len(weights)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
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
