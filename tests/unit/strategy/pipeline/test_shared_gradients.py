"""Gradients of parameters that several ranks hold: each set of ranks sums its own, coded or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_ranks import FakeCommunicator, FakeExchange, FakeGroup
from torch import nn

from hetexp.comm.communicator import Communicator
from hetexp.comm.exchange import Exchange
from hetexp.core.config import CommConfig
from hetexp.core.cost.step import Wire
from hetexp.strategy.pipeline import shared_gradients as module
from hetexp.strategy.pipeline.shared_gradients import SharedGradients
from hetexp.training.state import TrainState

MakeState = Callable[..., TrainState]
HOLDERS = {"weight": (0, 1, 2), "bias": (0, 2), "own": (1,)}
LENGTH = 600


class Piece(nn.Module):
    """What is left of the model on a rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for name, ranks in HOLDERS.items():
            if rank in ranks:
                self.register_parameter(name, nn.Parameter(torch.zeros(LENGTH if name == "weight" else 5)))


@pytest.fixture
def each(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Wire, Callable[[SharedGradients, TrainState], Any]], list[Any]]:
    """Return a function that lets three ranks share gradients, each set of them by a group of its own."""

    def run(wire: Wire, function: Callable[[SharedGradients, TrainState], Any]) -> list[Any]:
        groups: dict[tuple[int, ...], FakeGroup] = {(0, 1, 2): FakeGroup(3), (0, 2): FakeGroup(2)}
        lock = threading.Lock()

        def fake(ranks: Sequence[int], rank: int, *_: object) -> Exchange:
            group = groups[tuple(ranks)]
            return FakeExchange(FakeCommunicator(group, list(ranks).index(rank)))

        monkeypatch.setattr(module, "form_subgroup", fake)

        def one(communicator: Communicator) -> Any:
            with lock:
                state = make_state(communicator, (1.0, 1.0, 1.0))
            state.model = Piece(state.rank)
            state.config = state.config.model_copy(update={"comm": CommConfig(wire=wire)})
            whole = SimpleNamespace(parameters={name: name for name in HOLDERS})
            cut: Any = SimpleNamespace(holders=HOLDERS, whole=whole)
            store: Any = None
            return function(SharedGradients.of_stages(state, cut, store), state)

        return FakeGroup(3).run(one)

    return run


def own(rank: int, name: str) -> torch.Tensor:
    length = LENGTH if name == "weight" else 5
    return torch.randn(length, generator=torch.Generator().manual_seed(10 * rank + len(name)))


def give(state: TrainState, *without: str) -> None:
    for name, parameter in state.model.named_parameters():
        parameter.grad = None if name in without else own(state.rank, name).clone()


def test_each_set_of_ranks_sums_its_own(each: Any) -> None:
    def one(shared: SharedGradients, state: TrainState) -> tuple[dict[str, Any], int, int]:
        give(state, *(("weight",) if state.rank == 1 else ()))  # takes no part on one of them
        shared.sum()
        grads = {name: p.grad for name, p in state.model.named_parameters()}
        return grads, shared.num_bytes, len(shared.counted)

    ranks = each("float32", one)
    weight = own(0, "weight") + own(2, "weight")
    for rank, (grads, _, _) in enumerate(ranks):
        assert torch.equal(grads["weight"], ranks[0][0]["weight"])
        torch.testing.assert_close(grads["weight"], weight, rtol=1e-6, atol=1e-6)
        if rank != 1:
            torch.testing.assert_close(grads["bias"], own(0, "bias") + own(2, "bias"))
    assert torch.equal(ranks[1][0]["own"], own(1, "own"))
    both, first = 4 * (1 + LENGTH) + 4 * (1 + 5), 4 * (1 + LENGTH)
    assert [num_bytes for _, num_bytes, _ in ranks] == [both, first, both]
    assert [counted for _, _, counted in ranks] == [2, 1, 0]


def test_what_takes_part_nowhere_keeps_no_gradient(each: Any) -> None:
    def one(shared: SharedGradients, state: TrainState) -> list[str]:
        give(state, "weight")
        shared.sum()
        return [name for name, p in state.model.named_parameters() if p.grad is None]

    for wire in ("float32", "int8"):
        assert each(wire, one) == [["weight"]] * 3


@pytest.mark.parametrize("bad", [None, 2])
def test_all_ranks_agree_on_the_norm_and_on_what_is_finite(each: Any, bad: int | None) -> None:
    """The norm is that of one device's gradient: each parameter counts once."""

    def one(shared: SharedGradients, state: TrainState) -> tuple[bool, float | None]:
        give(state)
        shared.sum()
        return shared.agree(state.rank != bad, wants_norm=True)

    weight = sum((own(rank, "weight") for rank in range(3)), torch.zeros(LENGTH))
    whole = torch.cat([weight, own(0, "bias") + own(2, "bias"), own(1, "own")])
    for finite, norm in each("float32", one):
        assert finite == (bad is None)
        assert norm == pytest.approx(float(whole.norm()), rel=1e-6)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_what_a_wire_loses_comes_in_a_later_step(each: Any, wire: Wire) -> None:
    rounds = 40

    def one(shared: SharedGradients, state: TrainState) -> tuple[list[torch.Tensor], int]:
        sums = []
        for number in range(rounds + 1):
            give(state)
            shared.sum()
            weight = dict(state.model.named_parameters())["weight"]
            assert weight.grad is not None
            sums.append(weight.grad)
            if number == 0:
                shared.start(0.0)  # it was a rehearsal
        return sums, shared.num_bytes

    ranks = each(wire, one)
    expected = sum((own(rank, "weight") for rank in range(3)), torch.zeros(LENGTH))
    for sums, _ in ranks:
        assert all(torch.equal(a, b) for a, b in zip(sums, ranks[0][0], strict=True))
        assert torch.equal(sums[0], sums[1]) and not torch.equal(sums[1], sums[2])
        once = float((sums[0] - expected).abs().max())
        assert 0 < once < 0.1
        assert float((torch.stack(sums[1:]).mean(dim=0) - expected).abs().max()) < 0.15 * once
    coded = {"bfloat16": 2 * (LENGTH + 5), "int8": 3 * 260 + 260}[wire]
    assert ranks[0][1] == coded + 2 * 4  # whether a parameter takes part is told as it is
