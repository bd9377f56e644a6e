"""What carries the exchange between real cards: memory beside NCCL, NCCL alone, and what takes its place."""

from __future__ import annotations

import pytest
from support import Train, worst

STEPS = 6
COMMON = (
    "data=synthetic",
    "data.num_samples=200",
    "data.num_test_samples=20",
    "data.input_shape=[16]",
    "data.num_classes=4",
    "model=mlp",
    "model.hidden_sizes=[256,256]",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=24",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
    "trainer.precision=float64",
)
ONE = ("hardware=cpu", "strategy=single")


@pytest.mark.parametrize("comm", ["auto", "shm", "gloo"])
def test_a_card_and_the_processor(train: Train, comm: str) -> None:
    run = train(*COMMON, "hardware.devices=[cuda:0,cpu]", f"comm={comm}")
    assert run.summary["comm"]["backend"] == ("gloo" if comm == "gloo" else "shm")
    assert run.summary["comm"]["fallback"] is None
    assert max(worst(run, train(*COMMON, *ONE), STEPS)) <= 1e-12


def test_two_cards_and_the_processor(train: Train) -> None:
    run = train(*COMMON, "hardware.devices=[cuda:0,cpu,cuda:1]", "comm=auto")
    assert run.summary["comm"]["backend"] == "nccl + shm"
    assert run.summary["comm"]["fallback"] is None
    assert max(worst(run, train(*COMMON, *ONE), STEPS)) <= 1e-12


def test_two_cards_with_nccl_alone(train: Train) -> None:
    run = train(*COMMON, "hardware.devices=[cuda:0,cuda:1]", "comm.env={NCCL_P2P_DISABLE: 1}")
    assert run.summary["comm"]["backend"] == "nccl"
    assert run.summary["comm"]["fallback"] is None
    assert max(worst(run, train(*COMMON, *ONE), STEPS)) <= 1e-12


def test_two_cards_go_on_where_nccl_does_not_answer(train: Train) -> None:
    """A network interface that is not there: NCCL raises, and its group is ended before gloo's is formed."""
    variables = "{NCCL_SOCKET_IFNAME: '=nowhere', NCCL_IB_DISABLE: 1}"
    run = train(*COMMON, "hardware.devices=[cuda:0,cuda:1]", f"comm.env={variables}")
    fallback = run.summary["comm"]["fallback"]
    assert (fallback["from"], fallback["to"]) == ("nccl", "shm")
    assert run.summary["comm"]["backend"] == "shm"
    assert max(worst(run, train(*COMMON, *ONE), STEPS)) <= 1e-12
