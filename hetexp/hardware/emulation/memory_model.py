"""Models the memory of an emulated card: the bytes of a step on it, and the error if they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hetexp.core.device import GIB
from hetexp.hardware.emulation.pacing import tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

CONTEXT_BYTES = 300 * 2**20
"""Assumed memory of a process on a card before its first tensor."""


class ModelledAllocator:
    """Counts weights, gradients, optimizer state and activations.

    Activations are the tensors that autograd saves on the CPU, each storage once, without weights. Temporary
    buffers inside a kernel and fragmentation are not modelled.

    Args:
        model: model whose forward passes are counted.
        optimizer: optimizer whose state is part of the sum.
        capacity_bytes: memory of the card.
        name: name of the device in the error.
        stages: parts of the model that are called instead of it, as in a pipeline: the activations of a pass
            then count until its backward pass ends, beside those of other microbatches.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        capacity_bytes: int,
        name: str,
        stages: Sequence[nn.Module] = (),
    ) -> None:
        self._optimizer, self._capacity, self._name = optimizer, capacity_bytes, name
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers())
        self._activations = 0
        self._seen: set[int] = set()
        self._hooks: AbstractContextManager[Any] | None = None
        self.peak_bytes = self.static_bytes()
        self.free_bytes: int | None = None
        """Free bytes before the last tensor that did not fit; `None` if all tensors fitted."""
        self._of_others = 0
        """Activations of earlier passes whose backward pass has not ended."""
        for module in stages or [model]:
            module.register_forward_pre_hook(self._begin, with_kwargs=True)
            module.register_forward_hook(lambda *_: self._end(), always_call=True)
            if stages:
                module.register_forward_hook(self._free_after_backward)

    def static_bytes(self) -> int:
        """Return the bytes that are held between two steps, gradients included."""
        weights = sum(_size(p) for p in (*self._parameters, *self._buffers))
        gradients = sum(_size(p) for p in self._parameters if p.requires_grad)
        state = sum(_size(t) for entry in self._optimizer.state.values() for t in tensors(entry))
        return CONTEXT_BYTES + weights + gradients + state

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from torch.autograd.graph import saved_tensors_hooks

        weights = {_storage(p) for p in (*self._parameters, *self._buffers)}
        self._seen = set(weights)
        self._activations = self._of_others
        self._static = self.static_bytes()
        self._seen |= {_storage(t) for t in tensors((args, kwargs))}
        self._hold(sum(_size(t) for t in tensors((args, kwargs))))
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def _end(self) -> None:
        if self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            hooks.__exit__(None, None, None)

    def _free_after_backward(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        from hetexp.torch_private import queue_after_backward

        kept = self._activations - self._of_others
        waiting = next((tensor for tensor in tensors(output) if tensor.requires_grad), None)
        if waiting is None:  # an evaluation
            return

        def free() -> None:
            self._of_others -= kept

        self._of_others += kept
        waiting.register_hook(lambda _: queue_after_backward(free))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage not in self._seen:
            self._seen.add(storage)
            self._hold(tensor.untyped_storage().nbytes())
        return tensor.detach()  # a result that keeps itself would never be freed

    def _hold(self, num_bytes: int) -> None:
        import torch

        self._activations += num_bytes
        held = self._static + self._activations
        if held > self._capacity:
            self.free_bytes = free = max(0, self._capacity - held + num_bytes)
            raise torch.OutOfMemoryError(
                f"Out of memory on {self._name}. Tried to allocate {num_bytes / 2**20:.2f} MiB. The "
                f"modelled card has a total capacity of {self._capacity / GIB:.2f} GiB of which "
                f"{free / 2**20:.2f} MiB is free."
            )
        self.peak_bytes = max(self.peak_bytes, held)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
