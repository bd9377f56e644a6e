"""What goes from piece to piece: any payload as one tensor of fixed size, and its gradient back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.comm.boundary import Layout, nothing, number_of, pack, unpack
from hetexp.comm.compression import BLOCK, compressor_of
from hetexp.core.cost.step import Wire
from hetexp.core.errors import ConfigError

HOST = torch.device("cpu")
ANCHOR = torch.zeros((), requires_grad=True)
SHAPES = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), max_size=2).map(tuple),
        st.sampled_from([torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8]),
    ),
    min_size=1,
    max_size=4,
)


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low, high = (0, 256) if dtype is torch.uint8 else (-(2**31), 2**31)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


@settings(deadline=None, max_examples=60)
@given(
    kinds=SHAPES,
    full=st.integers(1, 4),
    fewer=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_payload_comes_out_as_it_went_in(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], full: int, fewer: int, dtype: torch.dtype
) -> None:
    rows = max(1, full - fewer)
    payload = tuple(draw((rows, *shape), kind, seed) for seed, (shape, kind) in enumerate(kinds))
    layout = Layout.of(payload, rows, "a layer")
    capacity = layout.capacity(full, dtype)
    packed = pack(payload, 7, layout, capacity, dtype, ANCHOR)
    assert packed.shape == (capacity,)
    assert packed.requires_grad
    assert number_of(packed) == 7
    for before, after in zip(payload, unpack(packed.detach(), layout, rows, HOST), strict=True):
        kept = before.to(dtype) if before.is_floating_point() else before
        assert torch.equal(after, kept)
        assert after.dtype == kept.dtype


@pytest.mark.parametrize(("wire", "kept"), [("bfloat16", 2.0), ("int8", 260 / 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_lose_no_more_than_they_may(wire: Wire, kept: float, dtype: torch.dtype) -> None:
    """Half a step of a code, there and back, whatever the sizes of numbers and blocks; integers are exact."""
    hidden = (torch.randn(5, 7, 23) * 10 ** torch.linspace(-4, 3, 23)).to(dtype).requires_grad_()
    tokens = torch.randint(0, 2**31, (5, 3))
    layout = Layout.of((hidden, tokens), 5, "a layer", compressor_of(wire))
    capacity = layout.capacity(6, torch.float32)
    assert capacity < 0.6 * Layout.of((hidden, tokens), 5, "a layer").capacity(6, torch.float32)
    assert layout.num_bytes(torch.float32) == pytest.approx(7 * 23 * kept + 24, abs=2)
    packed = pack((hidden, tokens), 3, layout, capacity, torch.float32, ANCHOR)
    assert number_of(packed) == 3
    received = packed.detach().clone().requires_grad_()
    came, ids = unpack(received, layout, 5, HOST)
    assert torch.equal(ids, tokens)
    assert torch.all((came - hidden.float()).abs() <= most_lost(hidden, wire))
    gradient = torch.randn(came.shape)
    came.backward(gradient)
    assert received.grad is not None
    packed.backward(received.grad)
    assert hidden.grad is not None and hidden.grad.dtype == dtype
    rounding = gradient.abs() * torch.finfo(dtype).eps
    assert torch.all((hidden.grad.float() - gradient).abs() <= most_lost(gradient, wire) + rounding)


def most_lost(numbers: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return half the distance between two codes at each number."""
    flat = numbers.detach().float().flatten()
    if wire == "bfloat16":
        return (flat.abs() * 2.0**-8).view(numbers.shape)
    blocks = math.ceil(len(flat) / BLOCK)
    padded = torch.zeros(blocks * BLOCK)
    padded[: len(flat)] = flat
    largest = padded.view(blocks, BLOCK).abs().amax(dim=1, keepdim=True).expand(-1, BLOCK)
    return (largest.flatten()[: len(flat)] / 254 * (1 + 1e-5)).view(numbers.shape)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_codes_of_nothing_and_of_what_is_not_finite(wire: Wire) -> None:
    layout = Layout.of(torch.zeros(2, 3), 2, "a layer", compressor_of(wire))
    received = torch.zeros(layout.capacity(2, torch.float32), requires_grad=True)
    assert not unpack(received, layout, 2, HOST).detach().any()
    packed = pack(torch.full((2, 3), torch.inf), 0, layout, len(received), torch.float32, ANCHOR)
    assert not unpack(packed.detach(), layout, 2, HOST).isfinite().any()


def test_gradients_go_back_the_same_way() -> None:
    hidden = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    loss = torch.randn(2, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[1, 2], [3, 4]])
    layout = Layout.of((hidden, tokens, loss), 2, "a layer")
    capacity = layout.capacity(5, torch.float64)
    packed = pack((hidden * 2, tokens, loss), 0, layout, capacity, torch.float64, ANCHOR)
    received = packed.detach().requires_grad_()
    came, ids, sums = unpack(received, layout, 2, HOST)
    assert not ids.requires_grad
    (came.pow(2).sum() + 3 * sums.sum()).backward()
    assert received.grad is not None
    packed.backward(received.grad)
    torch.testing.assert_close(hidden.grad, 8 * hidden.detach())
    torch.testing.assert_close(loss.grad, torch.full((2,), 3.0, dtype=torch.float64))


def test_what_is_not_used_gets_a_gradient_of_zero() -> None:
    layout = Layout.of((torch.zeros(2, 3), torch.zeros(2)), 2, "a layer")
    received = torch.ones(layout.capacity(2, torch.float32), requires_grad=True)
    hidden, _ = unpack(received, layout, 2, HOST)
    hidden.sum().backward()
    assert received.grad is not None
    assert received.grad.tolist() == [0.0, *[1.0] * 6, 0.0, 0.0]


def test_an_empty_microbatch_has_a_number_and_a_gradient_of_zero() -> None:
    received = torch.full((4,), 9.0, dtype=torch.float64, requires_grad=True)
    empty = nothing(received, 3, 6)
    assert number_of(empty) == 3
    assert empty.dtype == torch.float64
    empty.backward(torch.full((6,), torch.nan, dtype=torch.float64))
    assert received.grad is not None
    assert not received.grad.any()


def test_half_precision_travels_in_full() -> None:
    half = torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16, requires_grad=True)
    layout = Layout.of(half, 2, "a layer")
    packed = pack(half, 0, layout, layout.capacity(2, torch.float32), torch.float32, ANCHOR)
    assert unpack(packed, layout, 2, HOST).dtype == torch.float32
    packed.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (torch.zeros(3, 2), r"layers\.0 gives \[3, 2\] for 2 samples"),
        (torch.zeros(()), r"layers\.0 gives \[\] for 2 samples"),
        ((torch.zeros(2), None), r"layers\.0 gives NoneType for 2 samples"),
    ],
)
def test_what_does_not_count_samples_is_refused(payload: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Layout.of(payload, 2, "layers.0")
