"""Packs the activations between two stages of a model into one tensor of fixed size on the host.

torch's pipelines send tensors of constant shapes between devices of one kind, and need a gradient for each. A
payload here is any tuple of tensors, on any device, of any number of samples. Its numbers are written one
after another into a tensor that the largest microbatch fills, after the microbatch's number. Integers and
booleans travel as their bits. The gradient comes back the same way.

A compressor (`comm.boundary_wire`) reduces floating-point numbers, in both directions, to bfloat16, or to
int8 with a scale for each block of 256 numbers. Petals sends hidden states like this (Borzunov et al. 2023;
blocks: Dettmers et al. 2022, "8-bit optimizers via block-wise quantization"). There is no error feedback: one
microbatch cannot make up for the error of another.
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
    compressor: Compressor | None = None
    """Compression of floating-point numbers and their gradients; `None`: none."""

    @classmethod
    def of(cls, payload: Any, num_samples: int, place: str, compressor: Compressor | None = None) -> Layout:
        """Return the layout of a piece's output.

        Args:
            place: the layer that returned the payload, for the message.

        Raises:
            ConfigError: the payload is no tensor or tuple of tensors whose first dimension counts samples.
        """
        tensors = payload if isinstance(payload, tuple) else (payload,)
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not tensor.dim() or len(tensor) != num_samples:
                kind = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ConfigError(
                    "`model` must pass tensors whose first dimension counts samples from piece to piece "
                    f"(`pieces`), but {place} gives {kind} for {num_samples} samples."
                )
        return cls(
            tuple(tuple(tensor.shape[1:]) for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            not isinstance(payload, tuple),
            compressor,
        )

    def capacity(self, num_samples: int, dtype: torch.dtype) -> int:
        """Return the elements of this type for `num_samples` samples and the microbatch's number."""
        return 1 + sum(length for _, _, length in self._parts(num_samples, dtype))

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one sample; with compression, the mean over many samples."""
        count = 1 if self.compressor is None else BLOCK
        return -(-(self.capacity(count, dtype) - 1) * dtype.itemsize // count)

    def _parts(self, num_samples: int, dtype: torch.dtype) -> Iterator[tuple[torch.Size, torch.dtype, int]]:
        """Yield each tensor's shape, type and number of packed elements."""
        for shape, tensor_dtype in zip(self.shapes, self.dtypes, strict=True):
            full = torch.Size((num_samples, *shape))
            length = full.numel()
            if not tensor_dtype.is_floating_point:
                length = -(-length * tensor_dtype.itemsize // dtype.itemsize)
            elif self.compressor is not None:
                length = -(-self.compressor.num_bytes(length) // dtype.itemsize)
            yield full, tensor_dtype, length

    def write(self, numbers: Tensor, place: Tensor) -> None:
        """Write floating-point numbers into their place on the host."""
        flat = numbers.detach().reshape(-1)
        if self.compressor is None:
            place.copy_(flat)
            return
        coded = self.compressor.encode(
            flat
        )  # on the device, so that its link only carries compressed numbers
        place.view(torch.uint8)[: len(coded)].copy_(coded)

    def read(self, place: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
        """Return a copy, on the device, of the numbers in a place."""
        if self.compressor is None:
            return place.view(shape).to(device, copy=True)
        length = shape.numel()
        coded = place.view(torch.uint8)[: self.compressor.num_bytes(length)].to(device, copy=True)
        return self.compressor.decode(coded, length, place.dtype).view(shape)


class _Pack(torch.autograd.Function):
    """Packs a payload into the tensor that travels, on the host."""

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
        ctx.needed = ctx.needs_input_grad[5:]
        packed = torch.zeros(capacity, dtype=dtype)
        packed[0] = number
        start = 1
        parts = layout._parts(len(payload[0]), dtype)
        for tensor, (_, tensor_dtype, length) in zip(payload, parts, strict=True):
            place = packed[start : start + length]
            if tensor_dtype.is_floating_point:
                layout.write(tensor, place)
            else:
                bits = tensor.to(tensor_dtype).cpu().contiguous().reshape(-1).view(torch.uint8)
                place.view(torch.uint8)[: len(bits)].copy_(bits)
            start += length
        return packed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (packed,) = gradients
        results: list[Tensor | None] = []
        start = 1
        parts = ctx.layout._parts(ctx.num_samples, packed.dtype)
        for (shape, tensor_dtype, length), device, dtype, needed in zip(
            parts, ctx.devices, ctx.dtypes, ctx.needed, strict=True
        ):
            gradient = None
            if needed and tensor_dtype.is_floating_point:
                # A copy: the next step refills the received tensor.
                gradient = ctx.layout.read(packed[start : start + length], shape, device).to(dtype)
            results.append(gradient)
            start += length
        return None, None, None, None, None, *results


class _Unpack(torch.autograd.Function):
    """Unpacks the payload from the tensor that travelled, on the device."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, layout: Layout, num_samples: int, device: torch.device
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.num_samples, ctx.capacity = layout, num_samples, len(packed)
        ctx.dtype = packed.dtype
        payload: list[Tensor] = []
        start = 1
        for shape, dtype, length in layout._parts(num_samples, packed.dtype):
            place = packed[start : start + length]
            if dtype.is_floating_point:
                payload.append(layout.read(place, shape, device))
            else:
                bits = place.view(torch.uint8)[: shape.numel() * dtype.itemsize].clone()
                payload.append(bits.view(dtype).view(shape).to(device))
            start += length
        integers = [t for t, dtype in zip(payload, layout.dtypes, strict=True) if not dtype.is_floating_point]
        ctx.mark_non_differentiable(*integers)
        return tuple(payload)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        packed = torch.zeros(ctx.capacity, dtype=ctx.dtype)
        start = 1
        parts = ctx.layout._parts(ctx.num_samples, ctx.dtype)
        for gradient, (_, dtype, length) in zip(gradients, parts, strict=True):
            if gradient is not None and dtype.is_floating_point:
                ctx.layout.write(gradient, packed[start : start + length])
            start += length
        return packed, None, None, None


class _Nothing(torch.autograd.Function):
    """A tensor for a microbatch without samples, connected to the received one with a gradient of zero."""

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
        dtype: of the packed tensor; floating-point numbers are converted to it.
        anchor: a tensor that requires a gradient, so that the result does as well.
    """
    tensors: Sequence[Tensor] = payload if isinstance(payload, tuple) else (payload,)
    packed: Tensor = _Pack.apply(  # type: ignore[no-untyped-call]
        anchor, number, layout, capacity, dtype, *tensors
    )
    return packed


def unpack(packed: Tensor, layout: Layout, num_samples: int, device: torch.device) -> Any:
    """Return the payload of a packed tensor with `num_samples` samples, on the device."""
    payload = _Unpack.apply(packed, layout, num_samples, device)  # type: ignore[no-untyped-call]
    return payload[0] if layout.alone else payload


def number_of(packed: Tensor) -> int:
    """Return the number of the microbatch that a tensor belongs to."""
    return int(packed.detach()[0])


def nothing(received: Tensor, number: int, capacity: int) -> Tensor:
    """Return the packed tensor of a microbatch without samples; the received one gets a gradient of zero."""
    empty: Tensor = _Nothing.apply(received, number, capacity)  # type: ignore[no-untyped-call]
    return empty
