"""Half precision on real cards: chosen as the card can, as exact as on the CPU, one decision for all."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import Run, Train, difference, worst

from hetexp.hardware.detection.builds import own_build
from hetexp.hardware.detection.inventory import detect

STEPS = 20
GPT = (
    "data=synthetic",
    "data.kind=tokens",
    "data.num_samples=240",
    "data.num_test_samples=50",
    "model=gpt",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.embedding_size=32",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
    "trainer.clip_norm=1",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)
CARD = ("hardware.devices=[cuda:0]", "strategy=single")
MIXED = ("hardware.devices=[cuda:0,cpu]", "balancing=manual", "balancing.weights=[24,8]")
TWO = ("hardware.devices=[cuda:0,cuda:1]", "balancing=manual", "balancing.weights=[20,12]")


def precisions(run: Run) -> list[str]:
    return [device["precision"] for device in run.summary["devices"]]


def native() -> bool:
    """Whether the first card has bfloat16; asked without torch, which would keep the card busy."""
    cards = [card.spec for card in detect(builds=[own_build()]).cards if card.spec.backend == "cuda"]
    return "bfloat16" in (cards[0].precisions or ())


def test_auto_takes_what_the_card_has(train: Train) -> None:
    full = train(*GPT, *MIXED)
    run = train(*GPT, *MIXED, "trainer.precision=auto")
    assert precisions(run)[0] == ("bfloat16" if native() else "float16")
    assert run.summary["comm"]["wire_dtype"] == "float32"
    assert run.losses == pytest.approx(full.losses, rel=0.02)
    assert run.losses != full.losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_cards_differ_no_more_than_microbatches_do(train: Train, precision: str) -> None:
    if precision == "bf16" and not native():
        pytest.skip("this card has no native bfloat16")
    options = (*GPT, f"trainer.precision={precision}")
    one, *others = (train(*options, *CARD, f"trainer.accumulate={n}") for n in (1, 2, 4))
    allowed = 2 * max(worst(other, one, STEPS)[1] for other in others)
    run = train(*options, *TWO)
    _, measured = worst(run, one, STEPS)
    print(f"{precision}: parameters {measured:.2e}, allowed {allowed:.2e}")
    assert run.summary["comm"]["backend"] == "nccl"
    assert 0 < measured <= allowed


def test_float16_on_a_card_learns_what_float32_learns(train: Train) -> None:
    full, half = (train(*GPT, *CARD, f"trainer.precision={name}") for name in ("float32", "float16"))
    rows = [row for row in half.metrics if "train/loss_scale" in row]
    assert [row["train/loss_scale"] for row in rows] == [2.0**16] * STEPS
    assert half.losses == pytest.approx(full.losses, rel=0.02)
    assert difference(half.parameters(), full.parameters()) > 0


def test_a_burst_on_one_of_two_cards_is_left_out_by_both(train: Train, tmp_path: Path) -> None:
    run = train(
        "data=synthetic",
        "data.num_samples=240",
        "data.num_test_samples=50",
        "model=custom",
        "model._target_=bursting.Net",
        "+model.passes=[3]",
        f"+model.diary={tmp_path}",
        "trainer.max_steps=6",
        "trainer.max_epochs=null",
        "trainer.global_batch_size=32",
        "trainer.log_every=1",
        "trainer.precision=fp16",
        *TWO,
    )
    rows = [row for row in run.metrics if "train/loss_scale" in row]
    assert [row["train/skipped_steps"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row["train/loss_scale"] for row in rows] == [2.0**16] * 3 + [2.0**15] * 3
    first, second = (
        list(dict.fromkeys(line.split()[1] for line in (tmp_path / f"{rank}.txt").read_text().splitlines()))
        for rank in range(2)
    )
    assert first == second
    assert len(first) == 6  # before each of five steps that were taken, and after the last
