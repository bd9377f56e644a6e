"""`strategy=dp` on real cards: one process, unequal chunks, the steps of one device."""

from __future__ import annotations

import pytest
from support import Train, worst

STEPS = 20
GPT = (
    "data=synthetic",
    "data.kind=tokens",
    "data.mask_fraction=0.6",
    "data.num_samples=240",
    "data.num_test_samples=50",
    "model=gpt",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.embedding_size=32",
    "model.tie_weights=true",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
    "trainer.clip_norm=1",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
    "trainer.precision=float64",
)
TWO = ("hardware.devices=[cuda:0,cuda:1]",)
TWICE = ("hardware.gpu_ids=[0,0]", "hardware.share_devices=true")
"""Both replicas on one card: a machine with a single one is enough."""
OPTIONS = [
    ("balancing=manual", "balancing.weights=[20,12]"),
    ("balancing=manual", "balancing.weights=[3,1]", "trainer.accumulate=3", "strategy.output_device=1"),
    ("balancing=manual", "balancing.weights=[0,1]"),
    ("balancing=equal", "trainer.activation_checkpointing=true"),
]


def check(train: Train, layout: tuple[str, ...], options: tuple[str, ...]) -> None:
    reference = train(*GPT, "hardware.devices=[cuda:0]", "strategy=single")
    run = train(*GPT, *layout, "strategy=dp", *options)
    loss, parameters = worst(run, reference, STEPS)
    print(f"dp {layout} {options}: loss {loss:.2e}, parameters {parameters:.2e}")
    assert loss <= 1e-12
    assert parameters <= 1e-12
    assert run.summary["world_size"] == 1
    assert len(run.summary["devices"]) == 2
    assert sum(device["local_batch"] for device in run.summary["devices"]) == 32
    one_step_more = (f"trainer.max_steps={STEPS + 1}", f"resume={run.folder}")
    more = train(*GPT, "hardware.devices=[cuda:0]", "strategy=single", *one_step_more)
    assert more.summary["steps"] == STEPS + 1


@pytest.mark.parametrize("options", OPTIONS)
def test_two_cards_in_one_process(train: Train, options: tuple[str, ...]) -> None:
    check(train, TWO, options)


@pytest.mark.parametrize("options", OPTIONS)
def test_one_card_twice(train: Train, options: tuple[str, ...]) -> None:
    check(train, TWICE, options)


def test_half_precision_is_each_replicas(train: Train) -> None:
    """Threads do not inherit the type that autocast computes in."""
    options = [option for option in GPT if "precision" not in option]
    precision = "trainer.precision=bfloat16"
    one, cut = (
        train(*options, precision, "hardware.devices=[cuda:0]", "strategy=single", f"trainer.accumulate={n}")
        for n in (1, 2)
    )
    run = train(*options, precision, *TWICE, "strategy=dp")
    assert worst(run, one, STEPS)[1] <= 3 * worst(cut, one, STEPS)[1]
