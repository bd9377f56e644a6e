"""What a real card drew, by its own counter: between what it draws idle and its power limit."""

from __future__ import annotations

import pytest
from support import Train

from hetexp.hardware.detection.builds import own_build
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.inventory import detect

WORK = (
    "hardware.devices=[cuda:0]",
    "strategy=single",
    "data=synthetic",
    "data.kind=tokens",
    "data.num_samples=4000",
    "data.num_test_samples=50",
    "data.sequence_length=256",
    "model=gpt",
    "model.num_layers=4",
    "model.num_heads=8",
    "model.embedding_size=512",
    "trainer.global_batch_size=64",
    "trainer.max_epochs=null",
    "trainer.log_every=10",
)
IDLE_WATTS = 5.0
"""Less than any card draws that has a counter."""


def _generation(card: DetectedCard) -> int:
    """Return 90 for `sm_90`."""
    return int((card.spec.architecture or "sm_0").removeprefix("sm_"))


CARD = next((card for card in detect(builds=[own_build()]).cards if card.spec.id == "cuda:0"), None)
COUNTS = CARD is not None and (CARD.spec.uuid or "").startswith("GPU-") and _generation(CARD) >= 70


@pytest.mark.skipif(not COUNTS, reason="older than Volta, or an instance of a card: it has no counter")
def test_a_card_counts_what_it_draws(train: Train) -> None:
    assert CARD is not None and CARD.reading is not None
    limit = CARD.reading.power_limit_watts
    short, long = (train(*WORK, f"trainer.max_steps={steps}").summary for steps in (50, 200))
    told = [summary["devices"][0] for summary in (short, long)]
    assert [device["energy_source"] for device in told] == ["measured", "measured"]
    seconds = long["measured_step_s"] * long["steps"]
    watts = told[1]["energy_j"] / seconds
    print(f"{told[1]['energy_j']:.1f} J in {seconds:.2f} s: {watts:.0f} W of {limit} W")
    assert watts > IDLE_WATTS
    assert limit is None or watts < 1.05 * limit
    # Four times the steps; a counter moves in jumps of a tenth of a second or so.
    assert told[1]["energy_j"] > 2 * told[0]["energy_j"]
