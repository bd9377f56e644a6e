"""What one piece of a cut model hands to the next, as one tensor of fixed size on the host.

torch's pipelines send tensors of shapes that never change, between devices of one kind, and want a gradient
for each. A payload here is any tuple of tensors, on any device, of as many samples as a microbatch happens to
have: its numbers are laid one after another into a tensor that the largest microbatch fills, behind the
microbatch's own number. Integers and booleans travel as their bits. The gradient comes back the same way.

A codec (`comm.boundary_wire`) makes fewer bytes of floating-point numbers, there and back, which travel in
the same tensor as their bits: bfloat16, or int8 with a scale for each block of 256 numbers, as Petals sends
hidden states (Borzunov et al. 2023; blocks: Dettmers et al. 2022, "8-bit optimizers via block-wise
quantization").
What is lost of a microbatch is no other one's to make up for: there is no error feedback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetexp.comm.compression import BLOCK, Compressor
from hetexp.core.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """The tensors of a payload: the first dimension of each counts samples and is left out here."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    alone: bool
    """Whether the payload is a tensor, not a tuple of one."""
    codec: Compressor | None = None
    """What floating-point numbers and their gradients travel as; `None`: as they are."""

    @classmethod
    def of(cls, payload: Any, num_samples: int, place: str, codec: Compressor | None = None) -> Layout:
        """Return the layout of a payload that a piece has given.

        Args:
            place: what gave it, for the message.
            codec: of what travels.

        Raises:
            ConfigError: it is not a tensor or a tuple of tensors that count samples first.
        """
        tensors = payload if isinstance(payload, tuple) else (payload,)
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not tensor.dim() or len(tensor) != num_samples:
                kind = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ConfigError(
                    "`model` must hand tensors whose first dimension counts samples from piece to piece "
                    f"(`pieces`), but {place} gives {kind} for {num_samples} samples."
                )
        return cls(
            tuple(tuple(tensor.shape[1:]) for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            not isinstance(payload, tuple),
            codec,
        )

    def capacity(self, num_samples: int, dtype: torch.dtype) -> int:
        """Return the elements of this type that so many samples take, the microbatch's number included."""
        return 1 + sum(length for _, _, length in self._parts(num_samples, dtype))

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that one sample takes; where blocks share a scale, one among many."""
        many = 1 if self.codec is None else BLOCK
        return -(-(self.capacity(many, dtype) - 1) * dtype.itemsize // many)

    def _parts(self, num_samples: int, dtype: torch.dtype) -> Iterator[tuple[torch.Size, torch.dtype, int]]:
        """Yield each tensor's shape, type and number of elements on the way."""
        for shape, own in zip(self.shapes, self.dtypes, strict=True):
            full = torch.Size((num_samples, *shape))
            length = full.numel()
            if not own.is_floating_point:
                length = -(-length * own.itemsize // dtype.itemsize)
            elif self.codec is not None:
                length = -(-self.codec.num_bytes(length) // dtype.itemsize)
            yield full, own, length

    def write(self, numbers: Tensor, place: Tensor) -> None:
        """Lay floating-point numbers into their place on the host."""
        flat = numbers.detach().reshape(-1)
        if self.codec is None:
            place.copy_(flat)
            return
        coded = self.codec.encode(flat)  # on the device: only codes pass its link
        place.view(torch.uint8)[: len(coded)].copy_(coded)

    def read(self, place: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
        """Return the numbers that lie in a place, of its type, on the device; never a view of it."""
        if self.codec is None:
            return place.view(shape).to(device, copy=True)
        length = shape.numel()
        coded = place.view(torch.uint8)[: self.codec.num_bytes(length)].to(device, copy=True)
        return self.codec.decode(coded, length, place.dtype).view(shape)


class _Pack(torch.autograd.Function):
    """From a payload to the tensor that travels, on the host."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        number: int,
        layout: Layout,
        capacity: int,
        dtype: torch.dtype,
        *payload: Tensor,
    ) -> Tensor:
        ctx.layout, ctx.devices = layout, [tensor.device for tensor in payload]
        ctx.dtypes, ctx.num_samples = [tensor.dtype for tensor in payload], len(payload[0])
        ctx.wanted = ctx.needs_input_grad[5:]
        packed = torch.zeros(capacity, dtype=dtype)
        packed[0] = number
        start = 1
        for tensor, (_, own, length) in zip(payload, layout._parts(len(payload[0]), dtype), strict=True):
            place = packed[start : start + length]
            if own.is_floating_point:
                layout.write(tensor, place)
            else:
                bits = tensor.to(own).cpu().contiguous().reshape(-1).view(torch.uint8)
                place.view(torch.uint8)[: len(bits)].copy_(bits)
            start += length
        return packed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (packed,) = gradients
        found: list[Tensor | None] = []
        start = 1
        parts = ctx.layout._parts(ctx.num_samples, packed.dtype)
        for (shape, own, length), device, dtype, wanted in zip(
            parts, ctx.devices, ctx.dtypes, ctx.wanted, strict=True
        ):
            gradient = None
            if wanted and own.is_floating_point:
                # A copy: the next step refills the tensor that came.
                gradient = ctx.layout.read(packed[start : start + length], shape, device).to(dtype)
            found.append(gradient)
            start += length
        return None, None, None, None, None, *found


class _Unpack(torch.autograd.Function):
    """From the tensor that travelled to the payload, on the device."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, layout: Layout, num_samples: int, device: torch.device
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.num_samples, ctx.capacity = layout, num_samples, len(packed)
        ctx.dtype = packed.dtype
        payload: list[Tensor] = []
        start = 1
        for shape, own, length in layout._parts(num_samples, packed.dtype):
            place = packed[start : start + length]
            if own.is_floating_point:
                payload.append(layout.read(place, shape, device))
            else:
                bits = place.view(torch.uint8)[: shape.numel() * own.itemsize].clone()
                payload.append(bits.view(own).view(shape).to(device))
            start += length
        integers = [t for t, own in zip(payload, layout.dtypes, strict=True) if not own.is_floating_point]
        ctx.mark_non_differentiable(*integers)
        return tuple(payload)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        packed = torch.zeros(ctx.capacity, dtype=ctx.dtype)
        start = 1
        for gradient, (_, own, length) in zip(
            gradients, ctx.layout._parts(ctx.num_samples, ctx.dtype), strict=True
        ):
            if gradient is not None and own.is_floating_point:
                ctx.layout.write(gradient, packed[start : start + length])
            start += length
        return packed, None, None, None


class _Nothing(torch.autograd.Function):
    """A tensor for a microbatch without samples, connected to the one that came; its gradient is zero."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, number: int, capacity: int) -> Tensor:
        ctx.save_for_backward(received)
        nothing = received.new_zeros(capacity)
        nothing[0] = number
        return nothing

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (received,) = ctx.saved_tensors
        return torch.zeros_like(received), None, None


def pack(
    payload: Any, number: int, layout: Layout, capacity: int, dtype: torch.dtype, anchor: Tensor
) -> Tensor:
    """Return a payload as one tensor of `capacity` elements on the host.

    Args:
        number: of the microbatch.
        dtype: of what travels; floating-point numbers are converted to it.
        anchor: anything that requires a gradient, so that the result does as well, whatever is trained.
    """
    tensors: Sequence[Tensor] = payload if isinstance(payload, tuple) else (payload,)
    packed: Tensor = _Pack.apply(  # type: ignore[no-untyped-call]
        anchor, number, layout, capacity, dtype, *tensors
    )
    return packed


def unpack(packed: Tensor, layout: Layout, num_samples: int, device: torch.device) -> Any:
    """Return the payload of so many samples that `pack` laid into a tensor, on the device."""
    payload = _Unpack.apply(packed, layout, num_samples, device)  # type: ignore[no-untyped-call]
    return payload[0] if layout.alone else payload


def number_of(packed: Tensor) -> int:
    """Return the number of the microbatch that a tensor belongs to."""
    return int(packed.detach()[0])


def nothing(received: Tensor, number: int, capacity: int) -> Tensor:
    """Return what stands for a microbatch without samples, with a gradient of zero for what came."""
    empty: Tensor = _Nothing.apply(received, number, capacity)  # type: ignore[no-untyped-call]
    return empty
