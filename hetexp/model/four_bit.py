"""Frozen linear layers whose weights are kept in 4 bits (QLoRA, Dettmers et al. 2023), by bitsandbytes."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from hetexp.core.errors import SetupError

Kind = Literal["nf4", "fp4"]
BLOCK, NESTED_BLOCK, CODES = 64, 256, 16
"""Of bitsandbytes: weights that share a scale, scales that share a second scale, values of 4 bits."""


def keep_in_four_bits(module: nn.Module, kind: Kind, computed_in: torch.dtype) -> None:
    """Replace the linear layers of a module by frozen ones with weights in 4 bits, in place.

    On the meta device, when memory is estimated, they become layers that take the same memory.

    Args:
        computed_in: type in which they multiply.

    Raises:
        SetupError: bitsandbytes is missing or does not load.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                meta = child.weight.is_meta
                made = Modelled(child, computed_in) if meta else _quantised(child, kind, computed_in)
                setattr(parent, name, made)


def _quantised(linear: nn.Linear, kind: Kind, computed_in: torch.dtype) -> nn.Module:
    try:
        import bitsandbytes as bnb
    except Exception as error:  # its import looks for a card's libraries and raises anything
        raise SetupError(
            f"`model.four_bit` must be null if bitsandbytes does not load, but is '{kind}' instead "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). Install it for this device's "
            "environment: pip install bitsandbytes. It has kernels for NVIDIA, AMD and Intel cards and for "
            "processors, none for Apple's."
        ) from error
    sizes = (linear.in_features, linear.out_features)
    made = bnb.nn.Linear4bit(
        *sizes, bias=linear.bias is not None, compute_dtype=computed_in, quant_type=kind, device="meta"
    )
    data = linear.weight.data.to(computed_in)
    made.weight = bnb.nn.Params4bit(data, requires_grad=False, quant_type=kind, compress_statistics=True)
    made.bias = None if linear.bias is None else nn.Parameter(linear.bias.data, requires_grad=False)
    quantised: nn.Module = made.to(data.device)
    return quantised


class Modelled(nn.Linear):
    """Takes the memory of a 4-bit layer and computes nothing, on the meta device.

    Args:
        linear: layer on the meta device.
    """

    def __init__(self, linear: nn.Linear, computed_in: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.computed_in = computed_in
        count = linear.weight.numel()
        packed = torch.empty(math.ceil(count / 2), 1, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        blocks = math.ceil(count / BLOCK)
        nested = math.ceil(blocks / NESTED_BLOCK)
        # Scales in 8 bits, scales of these, and the tables of both codes with one offset.
        self.register_buffer("scales", packed.new_empty(blocks), persistent=False)
        floats = nested + CODES + 256 + 1
        self.register_buffer("tables", packed.new_empty(4 * floats), persistent=False)
        bias = None if linear.bias is None else nn.Parameter(linear.bias.data, requires_grad=False)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        converted = input.to(self.computed_in)
        out: Tensor = _Multiply.apply(converted, self.weight, self.out_features)  # type: ignore[no-untyped-call]
        return (out if self.bias is None else out + self.bias).to(input.dtype)


class _Multiply(torch.autograd.Function):
    """Multiplies by a weight that is unpacked for each pass and not saved."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = size, inputs.shape[-1]
        return functional.linear(inputs, inputs.new_empty(ctx.shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient @ gradient.new_empty(ctx.shape), None, None
