"""Estimates the memory of one optimizer step on a device before the device is used.

The step runs with its forward pass, loss, backward pass and update, but on torch's meta device, whose tensors
have shapes and no memory. Live tensors are added up as by the device's allocator (`trace.py`), and functions
take the memory that they take on a card (`functions.py`).

Not modelled are recurrent layers, one kernel on a card and one operation a time step here (too much), and
cuDNN's choice of algorithms, beyond the rules of `convolution.py`.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
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
    """Model on any device, in the type that it is trained in; the estimate leaves it unchanged."""
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Any, Any], torch.Tensor]
    """Maps the model's output and the targets to a scalar."""
    sample: tuple[Any, Any]
    """Inputs and targets of a batch of any size, on any device; dimension 0 counts the samples."""
    two: tuple[Any, Any] | None = None
    """Those of two samples, and `sample` those of one, if not every tensor has a row a sample."""
    precision: str = "float32"
    """`float32`, `float64`, or the precision of autocast: `bfloat16`, `float16`."""
    accumulates: bool = False
    """Whether gradients of several microbatches are added up."""
    keeps_gradients: bool = False
    """Whether gradients keep their memory from step to step (`hetexp.plan.strategy.Strategy`)."""
    bucket_bytes: Callable[[int, bool], int] = field(default=lambda gradients, accumulates: 0)
    """Returns the bytes that the strategy's exchange takes beside the gradients."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory of a device for one optimizer step, in bytes; `None` if a part is not known."""

    microbatch_size: int
    """Samples of one forward pass."""
    weights: int
    """Parameters, tied ones once, and buffers."""
    gradients: int
    optimizer_state: int | None = None
    buckets: int
    """Memory of the strategy's exchange beside the gradients."""
    activations: int | None = None
    """Peak of forward and backward beyond weights, all gradients and optimizer state: saved tensors, inputs,
    temporaries. It is less than their sum, as gradients appear while activations are freed."""
    update: int | None = None
    """Peak of the update beyond the same parts."""
    workspace: int = 0
    """Workspace of the library that multiplies matrices, of both threads."""
    context_bytes: int
    """Memory of the driver, which torch does not count."""
    fragmentation: float = 1.0
    spared: int = 0
    """Additional bytes at the peak on a device with plenty of memory; with less, slower algorithms of
    convolution do without them."""
    reason: str | None = None
    """Why activations or the optimizer's part are not known."""
    phases: dict[str, int] = field(default_factory=dict, compare=False)
    """Bytes after the forward pass and peaks of each phase, without optimizer state; for calibration."""

    @property
    def measured(self) -> bool:
        """Whether every part is known; otherwise the sums are lower bounds."""
        return self.activations is not None and self.optimizer_state is not None

    @property
    def allocated_bytes(self) -> int:
        """`torch.cuda.max_memory_allocated()` of a device with plenty of memory."""
        return self.least_bytes + self.spared

    @property
    def least_bytes(self) -> int:
        """`torch.cuda.max_memory_allocated()` of a device with just enough memory."""
        static = self.weights + self.gradients + (self.optimizer_state or 0) + self.buckets
        return static + max(self.activations or 0, self.update or 0) + self.workspace

    @property
    def total_bytes(self) -> int:
        """Memory that must be free on the device."""
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
        """Return a line for the user."""
        state = ", ".join(f"{name} {readable(size)}" for name, size in self.parts().items())
        least = "" if self.measured else "at least "
        samples = "sample" if self.microbatch_size == 1 else "samples at once"
        text = f"{least}{readable(self.total_bytes)} for {self.microbatch_size} {samples} ({state})"
        return text if self.reason is None else f"{text}; the rest is not known: {self.reason}"


def readable(num_bytes: int) -> str:
    """Return bytes as text, in the largest unit that fits."""
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB / 10 else f"{num_bytes / 1024:.1f} KiB"


def estimate_memory(workload: Workload, microbatch_size: int, rules: MemoryRules) -> MemoryEstimate:
    """Return the memory of a step whose largest microbatch has so many samples; 0 means an empty share.

    A model that cannot run without values (`.item()`, numpy, shapes that depend on data) gets an estimate
    with a reason instead of activations, not an error.
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
    filled = [p.grad for p in trainable if p.grad is not None]
    live = trace.LiveBytes(block, held + filled, rules.accelerator, rules.cudnn)
    with live:
        try:
            if size:
                output, threads = _passes(workload, model, size, rules, live, phases)
        except Exception as error:  # the user's own model or loss raises anything
            reason, output = _reason(error), None
            _fill_gradients(trainable)
    gradients = trace.tensor_bytes([p.grad for p in trainable if p.grad is not None], block)
    new_gradients = gradients - trace.tensor_bytes(filled, block)
    if reason is None:
        activations = max(0, max(phases.values(), default=0) - new_gradients)
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
        spared=max(0, live.with_plenty - new_gradients - above) if reason is None else 0,
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
    """Run the passes in the order of a training step, with the variables that it keeps.

    Returns:
        The last output, which is held until the optimizer has stepped, and the number of threads (of
        forward, of backward) that multiplied matrices.
    """
    from hetexp.hardware.memory.functions import CardFunctions

    functions = CardFunctions(workload.precision, rules.fused_attention)
    output = total = None
    # The second microbatch meets the gradients and the output of the first one.
    for _ in range(2 if workload.accumulates else 1):
        live.restart()
        # In backward, too: checkpointing runs parts of the forward pass again.
        with functions:
            output = call_model(model, _sized(workload, 0, size))
            total = workload.loss(output, _sized(workload, 1, size))
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
    """Return the optimizer's state, the peak of the update beyond it, and why they are not known."""
    import torch

    from hetexp.hardware.memory import trace
    from hetexp.torch_private import tree_leaves

    def on_device(value: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_meta]

    kept = on_device(output)
    around = [*model.parameters(), *model.buffers(), *kept]
    around += [p.grad for p in model.parameters() if p.grad is not None]
    live = trace.LiveBytes(block, around, rules.accelerator)
    try:
        with live:
            optimizer = workload.build_optimizer(model)
            fused = _as_on_card(optimizer, rules)
            optimizer.step()
        held = [tensor for state in optimizer.state.values() for tensor in on_device(state)]
    except Exception as error:  # an optimizer that reads values or needs a closure
        return None, None, f"the optimizer cannot step without values ({_reason(error)})"
    state = trace.tensor_bytes(held, block)
    temporaries = 0 if fused else max(0, live.peak - state)
    return state, trace.tensor_bytes(kept, block) + temporaries, None


def _as_on_card(optimizer: torch.optim.Optimizer, rules: MemoryRules) -> bool:
    """Set the way of updating that torch's optimizers choose for parameters on the device.

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
    """Yield the model on the meta device, in training mode, without gradients; the given one stays."""
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
    """Return the estimate of a module that cannot be copied."""
    from hetexp.hardware.memory import trace

    block = trace.cuda_block if rules.accelerator else trace.cpu_block
    model = workload.model
    gradients = trace.tensor_bytes([p for p in model.parameters() if p.requires_grad], block)
    return MemoryEstimate(
        microbatch_size=size,
        weights=trace.tensor_bytes(chain(model.parameters(), model.buffers()), block),
        gradients=gradients,
        buckets=workload.bucket_bytes(gradients, workload.accumulates),
        context_bytes=rules.context_bytes,
        fragmentation=rules.fragmentation,
        reason=reason,
    )


def _fill_gradients(parameters: list[torch.nn.Parameter]) -> None:
    import torch

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def _sized(workload: Workload, part: int, size: int) -> Any:
    """Return meta tensors for a batch of `size` samples, of the types that `TrainState.to_device` gives.

    Args:
        part: 0 for the inputs, 1 for the targets.
    """
    import torch

    from hetexp.torch_private import tree_map_only

    floating = torch.float64 if workload.precision == "float64" else torch.float32

    def empty(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        dtype = floating if tensor.is_floating_point() else tensor.dtype
        return torch.empty(shape, dtype=dtype, device="meta")

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        return empty(tensor, (size, *tensor.shape[1:]) if tensor.dim() else ())

    if workload.two is not None:
        return _grown(workload.sample[part], workload.two[part], size, empty)
    return tree_map_only(torch.Tensor, resized, workload.sample[part])


def _grown(one: Any, two: Any, size: int, empty: Callable[[torch.Tensor, Sequence[int]], Any]) -> Any:
    """Return a part of a batch of `size` samples, as the same part of one and of two samples suggests.

    Each dimension and each list grows by the same number a sample.
    """
    import torch

    if isinstance(one, torch.Tensor):
        return empty(one, [n + (size - 1) * (m - n) for n, m in zip(one.shape, two.shape, strict=True)])
    if isinstance(one, dict):
        return {key: _grown(item, two[key], size, empty) for key, item in one.items()}
    if type(one) in (list, tuple):
        items = [_grown(item, other, size, empty) for item, other in zip(one, two, strict=False)]
        more = (size - 1) * (len(two) - len(one))
        return type(one)(items + [_grown(one[-1], two[-1], size, empty) for _ in range(more)])
    return one


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

    Between a size that fits and a size that does not, each part is interpolated linearly. The predicted size
    is measured, until only the smaller of two neighbours fits. If a prediction narrows the gap only a little,
    the gap is halved. The returned size was measured to fit.

    Args:
        measure: `estimate_memory`, or a cached version of it.

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
        middle = (low + high) // 2 if halve else _interpolated(seen[low], seen[high], capacity_bytes)
        if fits(middle):
            halve, low = middle - low < (high - low) // 4, middle
        else:
            halve, high = high - middle < (high - low) // 4, middle
    return low


def _interpolated(low: MemoryEstimate, high: MemoryEstimate, capacity_bytes: int) -> int:
    """Return the size to try next, strictly between a size that fits and a size that does not."""
    first, last = low.microbatch_size, high.microbatch_size

    def total(size: int) -> int:
        weight = (size - first) / (last - first)

        def between(a: int | None, b: int | None) -> int:
            return round((a or 0) + weight * ((b or 0) - (a or 0)))

        activations = between(low.activations, high.activations)
        return replace(low, activations=activations, update=between(low.update, high.update)).total_bytes

    fitting, other = first, last
    while other - fitting > 1:  # bisection on the interpolation costs nothing
        middle = (fitting + other) // 2
        fitting, other = (middle, other) if total(middle) <= capacity_bytes else (fitting, middle)
    # At an end of the range, the neighbour of that end is tried.
    return min(max(fitting, first + 1), last - 1)
