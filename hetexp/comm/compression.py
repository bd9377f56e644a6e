"""Compression of the vectors that ranks send: fewer bytes a number, with a loss.

Lossy compression is exact in the long run with error feedback (Seide et al. 2014; Karimireddy et al. 2019):
the error of one vector is added to the next one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from hetexp.core.cost.step import Wire

BLOCK = 256
"""Numbers that share a scale in int8."""
CHUNK = 2**14 * BLOCK
"""Most numbers of one message, 16 MiB in float32: it bounds the memory for compression."""
LARGEST = 127
"""Largest magnitude of an int8 code; -128 is not used, so that codes are symmetric."""


class Compressor(ABC):
    """A way to write a vector of floating-point numbers as bytes."""

    name: ClassVar[str]

    @abstractmethod
    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the bytes [num_bytes(len(vector))], uint8, on the vector's device."""

    @abstractmethod
    def decode(self, coded: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the vector [length] that the bytes stand for."""

    @abstractmethod
    def num_bytes(self, length: int) -> int:
        """Return the bytes of a vector of `length` numbers."""

    def sent_bytes(self, length: int) -> int:
        """Return the bytes of a vector of any length, in messages of at most `CHUNK` numbers."""
        return sum(self.num_bytes(min(CHUNK, length - start)) for start in range(0, length, CHUNK))


class Bfloat16(Compressor):
    """Two bytes a number: float32's range, 8 bits of its mantissa, rounded to the nearest."""

    name: ClassVar[str] = "bfloat16"

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.to(torch.bfloat16).view(torch.uint8)

    def decode(self, coded: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        return coded.view(torch.bfloat16).to(dtype)

    def num_bytes(self, length: int) -> int:
        return 2 * length


class Int8(Compressor):
    """One byte a number, and four a block of `BLOCK` numbers for its scale, the largest magnitude ÷ 127.

    The last block is filled up with zeros. A block with a number that is not finite is decoded as NaN.
    """

    name: ClassVar[str] = "int8"

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        blocks = math.ceil(len(vector) / BLOCK)
        padded = torch.zeros(blocks * BLOCK, dtype=torch.float32, device=vector.device)
        padded[: len(vector)] = vector
        padded = padded.view(blocks, BLOCK)
        scales = padded.abs().amax(dim=1) / LARGEST
        scales = torch.where(scales.isfinite(), scales, math.nan)
        divisors = torch.where(scales > 0, scales, 1.0).unsqueeze(1)
        codes = torch.nan_to_num(padded / divisors, 0.0, 0.0, 0.0).round_().clamp_(-LARGEST, LARGEST)
        return torch.cat([scales.view(torch.uint8), codes.to(torch.int8).view(torch.uint8).flatten()])

    def decode(self, coded: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        blocks = math.ceil(length / BLOCK)
        scales = coded[: 4 * blocks].clone().view(torch.float32).to(dtype)
        codes = coded[4 * blocks :].view(torch.int8).view(blocks, BLOCK).to(dtype)
        return (codes * scales.unsqueeze(1)).flatten()[:length]

    def num_bytes(self, length: int) -> int:
        return math.ceil(length / BLOCK) * (BLOCK + 4)


def compressor_of(wire: Wire) -> Compressor | None:
    """Return the compressor of a wire type; `None` for `float32`, which sends numbers as they are."""
    return {"float32": None, "bfloat16": Bfloat16(), "int8": Int8()}[wire]
