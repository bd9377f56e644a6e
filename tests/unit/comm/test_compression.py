"""Codes keep their promises: bytes, errors, and what becomes of numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.comm.compression import BLOCK, Bfloat16, Compressor, Int8, compressor_of

CODECS = [Bfloat16(), Int8()]


def vector(length: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(length, generator=generator, dtype=dtype)
    return numbers * 10.0 ** torch.randint(-3, 3, (length,), generator=generator)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=20)
@given(length=st.integers(0, 3 * BLOCK), seed=st.integers(0, 99))
def test_bytes_shape_and_error(codec: Compressor, dtype: torch.dtype, length: int, seed: int) -> None:
    numbers = vector(length, seed, dtype)
    coded = codec.encode(numbers)
    assert coded.dtype == torch.uint8
    assert coded.shape == (codec.num_bytes(length),)
    back = codec.decode(coded, length, dtype)
    assert back.shape == numbers.shape
    assert back.dtype == dtype
    if isinstance(codec, Bfloat16):
        allowed = numbers.abs() * 2.0**-8
    else:  # half a step of its block
        blocks = [block.abs().max().expand(len(block)) / 254 for block in numbers.split(BLOCK) if length]
        allowed = torch.cat([numbers[:0], *blocks])
    assert bool(((back - numbers).abs() <= allowed * (1 + 1e-5) + 1e-30).all())


def test_int8_counts_bytes_by_hand() -> None:
    assert Int8().num_bytes(BLOCK) == 260
    assert Int8().num_bytes(BLOCK + 1) == 520
    assert Int8().num_bytes(0) == 0


def test_int8_is_exact_where_it_can_be() -> None:
    numbers = torch.cat([torch.arange(-127.0, 128.0), torch.zeros(300)])
    assert torch.equal(Int8().decode(Int8().encode(numbers), len(numbers), torch.float32), numbers)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_stays_so(bad: float) -> None:
    numbers = torch.ones(2 * BLOCK)
    numbers[3] = bad
    back = Int8().decode(Int8().encode(numbers), len(numbers), torch.float32)
    assert bool(back[:BLOCK].isnan().all())
    assert torch.equal(back[BLOCK:], numbers[BLOCK:])
    assert not bool(Bfloat16().decode(Bfloat16().encode(numbers), len(numbers), torch.float32).isfinite()[3])


def test_wires_by_name() -> None:
    assert compressor_of("float32") is None
    assert [type(compressor_of(name)) for name in ("bfloat16", "int8")] == [Bfloat16, Int8]
