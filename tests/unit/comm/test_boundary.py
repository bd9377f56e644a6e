"""What goes from piece to piece: any payload as one tensor of fixed size, and its gradient back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.comm.boundary import Layout, nothing, number_of, pack, unpack
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
