"""How much memory one optimizer step takes on a device, said before the device is touched.

The step really runs, with its forward pass, loss, backward pass and update, but on torch's meta device:
tensors with shapes and without memory. What is alive at each moment is added up as the device's allocator
would (`memory_trace.py`), and functions do what they do on a card (`memory_functions.py`).

Not modelled: recurrent layers, which on a card are one kernel and here one operation a time step (too much),
and which of cuDNN's algorithms is chosen, beyond the rules of `memory_convolution.py`.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from hetexp.core.call import call_model
from hetexp.core.device import GIB
from hetexp.hardware.memory.rules import MIB, MemoryRules

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetexp.hardware.memory.trace import LiveBytes


@dataclass(frozen=True)
class Workload:
    """One optimizer step of one rank."""

    model: nn.Module
    """On any device, in the type that it is trained in; it stays as it is."""
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Any, Any], torch.Tensor]
    """Maps the model's output and the targets to a scalar."""
    sample: tuple[Any, Any]
    """Inputs and targets of a batch of any size, on any device; dimension 0 counts the samples."""
    precision: str = "float32"
    """`float32`, `float64`, or what the model computes in by autocast: `bfloat16`, `float16`."""
    accumulates: bool = False
    """Whether gradients of several microbatches are added up."""
    keeps_gradients: bool = False
    """Whether their memory stays taken from step to step (`hetexp.plan.strategy.Strategy`)."""
    bucket_bytes: Callable[[int, bool], int] = field(default=lambda gradients, accumulates: 0)
    """What the strategy's exchange takes beside the gradients."""


@dataclass(frozen=True)
class MemoryEstimate:
    """What a device must hold for one optimizer step; all fields in bytes, `None` if it is not known."""

    microbatch_size: int
    """Samples of one forward pass."""
    weights: int
    """Parameters, tied ones once, and buffers."""
    gradients: int
    optimizer_state: int | None
    buckets: int
    """Of the strategy's exchange, beside the gradients."""
    activations: int | None
    """What forward and backward hold at their peak beyond weights, all gradients and optimizer state: what
    autograd keeps, inputs, temporaries. As gradients come while activations go, it is less than their sum."""
    update: int | None
    """What the optimizer holds beyond the same at its peak."""
    workspace: int
    """Of the library that multiplies matrices, in both threads."""
    context_bytes: int
    """Of the driver; torch does not count it."""
    fragmentation: float = 1.0
    spared: int = 0
    """How much more is allocated at the peak if there is plenty; if there is less, slower algorithms of
    convolution do without."""
    reason: str | None = None
    """Why activations, or the optimizer's part, are not known."""
    phases: dict[str, int] = field(default_factory=dict, compare=False)
    """For calibration: bytes after the forward pass and the peaks of each phase, optimizer state left out."""

    @property
    def measured(self) -> bool:
        """Whether every part is known; otherwise the sums are of the known ones, the least that is needed."""
        return self.activations is not None and self.optimizer_state is not None

    @property
    def allocated_bytes(self) -> int:
        """What `torch.cuda.max_memory_allocated()` would say of a device with plenty of memory."""
        return self.least_bytes + self.spared

    @property
    def least_bytes(self) -> int:
        """What it would say of a device with just enough."""
        static = self.weights + self.gradients + (self.optimizer_state or 0) + self.buckets
        return static + max(self.activations or 0, self.update or 0) + self.workspace

    @property
    def total_bytes(self) -> int:
        """What the device must have free."""
        return math.ceil(self.least_bytes * self.fragmentation) + self.context_bytes

    def parts(self) -> dict[str, int]:
        """Return the parts of `total_bytes` by name, those that are not zero."""
        above = max(self.activations or 0, self.update or 0)
        named = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer state": self.optimizer_state or 0,
            "buckets": self.buckets,
            "activations" if above == (self.activations or 0) else "update": above,
            "workspace": self.workspace,
            "driver": self.context_bytes,
            "fragmentation": self.total_bytes - self.least_bytes - self.context_bytes,
        }
        return {name: size for name, size in named.items() if size}

    def explain(self) -> str:
        """Return one line for people."""
        state = ", ".join(f"{name} {readable(size)}" for name, size in self.parts().items())
        least = "" if self.measured else "at least "
        samples = "sample" if self.microbatch_size == 1 else "samples at once"
        text = f"{least}{readable(self.total_bytes)} for {self.microbatch_size} {samples} ({state})"
        return text if self.reason is None else f"{text}; the rest is not known: {self.reason}"


def readable(num_bytes: int) -> str:
    """Return bytes in the unit that people read them in."""
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB / 10 else f"{num_bytes / 1024:.1f} KiB"


def estimate_memory(workload: Workload, microbatch_size: int, rules: MemoryRules) -> MemoryEstimate:
    """Return what a step takes whose largest microbatch has so many samples; 0 means an empty share.

    A model that cannot run without values (`.item()`, numpy, shapes that depend on data) gets an estimate
    without activations and with the reason; nothing is raised for it.
    """
    import torch

    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            with on_meta(workload.model) as model:
                return _measure(workload, model, microbatch_size, rules)
        except Exception as error:  # the copy of the user's own module runs any code
            return _static(workload, microbatch_size, rules, _reason(error))


def _measure(workload: Workload, model: nn.Module, size: int, rules: MemoryRules) -> MemoryEstimate:
    from hetexp.hardware.memory import trace

    block = trace.cuda_block if rules.accelerator else trace.cpu_block
    trainable = [p for p in model.parameters() if p.requires_grad]
    held = [*model.parameters(), *model.buffers()]
    weights = trace.tensor_bytes(held, block)
    reason, output, activations, threads = None, None, None, 0
    phases: dict[str, int] = {}
    if workload.keeps_gradients or not size:
        _fill_gradients(trainable)
    kept = [p.grad for p in trainable if p.grad is not None]
    live = trace.LiveBytes(block, held + kept, rules.accelerator, rules.cudnn)
    with live:
        try:
            if size:
                output, threads = _passes(workload, model, size, rules, live, phases)
        except Exception as error:  # the user's own model or loss raises anything
            reason, output = _reason(error), None
            _fill_gradients(trainable)
    gradients = trace.tensor_bytes([p.grad for p in trainable if p.grad is not None], block)
    came = gradients - trace.tensor_bytes(kept, block)
    if reason is None:
        activations = max(0, max(phases.values(), default=0) - came)
    state, update, failed = _update(workload, model, block, rules, output)
    above = max(activations or 0, update or 0)
    return MemoryEstimate(
        microbatch_size=size,
        weights=weights,
        gradients=gradients,
        optimizer_state=state,
        buckets=workload.bucket_bytes(gradients, workload.accumulates),
        activations=activations,
        update=update,
        workspace=threads * rules.workspace_bytes,
        context_bytes=rules.context_bytes,
        fragmentation=rules.fragmentation,
        spared=max(0, live.with_plenty - came - above) if reason is None else 0,
        reason=reason or failed,
        phases=phases,
    )


def _passes(
    workload: Workload,
    model: nn.Module,
    size: int,
    rules: MemoryRules,
    live: LiveBytes,
    phases: dict[str, int],
) -> tuple[Any, int]:
    """Run the passes in the order of `hetexp.training.step.joint_step`, with the variables that it keeps.

    Returns:
        The last output, which is still held while the optimizer steps, and in how many of the two threads
        matrices were multiplied.
    """
    from hetexp.hardware.memory.functions import CardFunctions

    functions = CardFunctions(workload.precision, rules.fused_attention)
    inputs, targets = workload.sample
    output = total = None
    # The second microbatch has both: the gradients and the output of the one before.
    for _ in range(2 if workload.accumulates else 1):
        live.restart()
        # In backward, too: checkpointing runs parts of the forward pass again.
        with functions:
            output = call_model(model, _sized(inputs, size, workload.precision))
            total = workload.loss(output, _sized(targets, size, workload.precision))
            functions.forget()
            forward = live.multiplies
            phases |= {"after_forward": live.now, "forward": live.peak}
            live.restart()
            (total * 1.0).backward()
        phases["backward"] = live.peak
    return (output, total), int(forward) + int(live.multiplies)


def _update(
    workload: Workload, model: nn.Module, block: Callable[[int], int], rules: MemoryRules, output: Any
) -> tuple[int | None, int | None, str | None]:
    """Return optimizer state, what the update holds beyond it at its peak, and why they are not known."""
    import torch
    from torch.utils._pytree import tree_leaves

    from hetexp.hardware.memory import trace

    kept = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor) and value.is_meta]
    around = [*model.parameters(), *model.buffers(), *kept]
    around += [p.grad for p in model.parameters() if p.grad is not None]
    live = trace.LiveBytes(block, around, rules.accelerator)
    try:
        with live:
            optimizer = workload.build_optimizer(model)
            fused = _as_on_card(optimizer, rules)
            optimizer.step()
        held = [t for state in optimizer.state.values() for t in tree_leaves(state) if _is_meta(t)]
    except Exception as error:  # an optimizer that reads values, or wants a closure
        return None, None, f"the optimizer cannot step without values ({_reason(error)})"
    state = trace.tensor_bytes(held, block)
    temporaries = 0 if fused else max(0, live.peak - state)
    return state, trace.tensor_bytes(kept, block) + temporaries, None


def _as_on_card(optimizer: torch.optim.Optimizer, rules: MemoryRules) -> bool:
    """Let torch's optimizers choose what they would choose for parameters on the device.

    Returns:
        Whether the step is one kernel, which has no temporaries; torch refuses to start it on meta tensors.
    """
    fused = False
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"], fused = None, True
        elif rules.foreach and group.get("foreach", False) is None:
            group["foreach"] = True
    return fused


@contextlib.contextmanager
def on_meta(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model without memory, in training mode, without gradients; leave the given one as it was."""
    import torch
    from torch import nn

    tensors = [*model.parameters(), *model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    if not all(tensor.is_meta for tensor in tensors):
        memo: dict[int, Any] = {}
        for tensor in tensors:
            empty = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        model = copy.deepcopy(model, memo)
    try:
        for parameter in model.parameters():
            parameter.grad = None
        yield model.train()
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _static(workload: Workload, size: int, rules: MemoryRules, reason: str) -> MemoryEstimate:
    """Return what can be said of a module that cannot even be copied."""
    from hetexp.hardware.memory import trace

    block = trace.cuda_block if rules.accelerator else trace.cpu_block
    model = workload.model
    gradients = trace.tensor_bytes([p for p in model.parameters() if p.requires_grad], block)
    return MemoryEstimate(
        microbatch_size=size,
        weights=trace.tensor_bytes(chain(model.parameters(), model.buffers()), block),
        gradients=gradients,
        optimizer_state=None,
        buckets=workload.bucket_bytes(gradients, workload.accumulates),
        activations=None,
        update=None,
        workspace=0,
        context_bytes=rules.context_bytes,
        fragmentation=rules.fragmentation,
        reason=reason,
    )


def _fill_gradients(parameters: list[torch.nn.Parameter]) -> None:
    import torch

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def _sized(value: Any, size: int, precision: str) -> Any:
    """Return meta tensors for a batch of `size` samples, of the types that `TrainState.to_device` gives."""
    import torch
    from torch.utils._pytree import tree_map_only

    floating = torch.float64 if precision == "float64" else torch.float32

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        shape = (size, *tensor.shape[1:]) if tensor.dim() else ()
        dtype = floating if tensor.is_floating_point() else tensor.dtype
        return torch.empty(shape, dtype=dtype, device="meta")

    return tree_map_only(torch.Tensor, resized, value)


def _is_meta(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_meta


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def largest_microbatch(
    workload: Workload,
    capacity_bytes: int,
    rules: MemoryRules,
    most: int,
    measure: Callable[[Workload, int, MemoryRules], MemoryEstimate] = estimate_memory,
) -> int | None:
    """Return the largest microbatch whose step fits, up to `most` samples; `None` if not even one does.

    Between a size that fits and one that does not, each part is taken to grow in a line; what follows is
    measured, until neighbours are found of which only the smaller fits. If the line leads only a little
    way, the gap is halved. Every answer was measured to fit.

    Args:
        measure: `estimate_memory`, or what remembers its answers.

    Raises:
        ValueError: the model's activations are not known.
    """
    seen: dict[int, MemoryEstimate] = {}

    def fits(size: int) -> bool:
        seen[size] = estimate = measure(workload, size, rules)
        if not estimate.measured:
            raise ValueError(f"no microbatch can be measured: {estimate.reason}")
        return estimate.total_bytes <= capacity_bytes

    if fits(most):
        return most
    if most == 1:
        return None
    low, high = 1, most
    try:
        if not fits(low):
            return None
    except ValueError:  # normalising over a batch refuses a single sample
        low = 2
        if most == low or not fits(low):
            return None
    halve = False
    while high - low > 1:
        middle = (low + high) // 2 if halve else _foretold(seen[low], seen[high], capacity_bytes)
        if fits(middle):
            halve, low = middle - low < (high - low) // 4, middle
        else:
            halve, high = high - middle < (high - low) // 4, middle
    return low


def _foretold(low: MemoryEstimate, high: MemoryEstimate, capacity_bytes: int) -> int:
    """Return the size to try next, strictly between one that fits and one that does not."""
    first, last = low.microbatch_size, high.microbatch_size

    def total(size: int) -> int:
        weight = (size - first) / (last - first)

        def between(a: int | None, b: int | None) -> int:
            return round((a or 0) + weight * ((b or 0) - (a or 0)))

        activations = between(low.activations, high.activations)
        return replace(low, activations=activations, update=between(low.update, high.update)).total_bytes

    fitting, other = first, last
    while other - fitting > 1:  # bisection on the lines costs nothing
        middle = (fitting + other) // 2
        fitting, other = (middle, other) if total(middle) <= capacity_bytes else (fitting, middle)
    # If the lines say that the neighbour is the end already, or the end is one before: look there.
    return min(max(fitting, first + 1), last - 1)
