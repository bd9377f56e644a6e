"""What people ask for is answered by the first rank, and done by all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from fake_ranks import FakeGroup
from fake_store import SECRET

from hetexp.comm.communicator import Communicator
from hetexp.core.epoch import Request, SignedStore, answer_key
from hetexp.training.loop import Training
from hetexp.training.recovery import rank_commands
from hetexp.training.recovery.rank_commands import Asked, RankCommands, on_request
from hetexp.training.state import Progress, TrainState

MakeState = Callable[..., TrainState]


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_commands, "_handlers", {})


def by_path(asked: Asked) -> str:
    return f"step {asked.step}: {asked.argument}"


def ask(make_state: MakeState, *asked: tuple[str, str], world: int = 2) -> tuple[list[dict[str, Any]], Any]:
    """Return the answers, and the first rank's training."""
    store = SignedStore(dist.HashStore(), SECRET)
    for number, (name, argument) in enumerate(asked, start=1):
        store.write(Request.key(number), Request(number, name, argument).to_json())

    def rank(communicator: Communicator) -> Training:
        on = {"dotted": f"{__name__}.by_path"}
        state = make_state(communicator, (1.0,) * world, on_request=on)
        training = Training(state, Progress(step=4))
        served = RankCommands(store)
        served.serve(training, len(asked))
        served.serve(training, len(asked))  # each once
        assert served.handled == len(asked)
        return training

    training = FakeGroup(world).run(rank)[0]
    return [json.loads(store.read(answer_key(n)) or "") for n in range(1, len(asked) + 1)], training


def test_a_checkpoint_is_saved_and_named(make_state: MakeState) -> None:
    (answer,), training = ask(make_state, ("checkpoint", ""))
    assert answer == {"done": True, "step": 4, "checkpoint": training.outcome.checkpoint}
    assert answer["checkpoint"].endswith("step_00000004")
    assert training.saved_at == 4


def test_stop_ends_the_training(make_state: MakeState) -> None:
    (answer,), training = ask(make_state, ("stop", ""))
    assert answer == {"done": True, "step": 4}
    assert training.stops


def test_a_person_s_own_request(make_state: MakeState) -> None:
    told: list[tuple[int, str]] = []

    def lower(asked: Asked) -> float:
        told.append((asked.rank, asked.argument))
        return 0.5

    on_request("lr", lower)
    answers, _ = ask(make_state, ("lr", "half"), ("dotted", "x"))
    assert answers == [
        {"done": True, "step": 4, "answer": 0.5},
        {"done": True, "step": 4, "answer": "step 4: x"},
    ]
    assert sorted(told) == [(0, "half"), (1, "half")]


def test_an_unknown_name_and_a_failing_handler_end_nothing(make_state: MakeState) -> None:
    on_request("sample", lambda asked: 1 / 0)
    (unknown, failed), training = ask(make_state, ("sampel", ""), ("sample", ""))
    assert unknown["error"] == (
        "`sampel` is no request that this run knows: checkpoint, stop, sample, dotted. Did you mean `sample`?"
    )
    assert failed["error"] == "the handler of `sample` failed: ZeroDivisionError: division by zero"
    assert not training.stops


def test_hetexp_s_own_names_are_taken() -> None:
    with pytest.raises(ValueError, match="another than checkpoint and stop"):
        on_request("stop", lambda asked: None)
