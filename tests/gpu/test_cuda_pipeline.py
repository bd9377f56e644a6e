"""Stages on real cards, beside the CPU and beside each other: the steps of one device."""

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
    "model.num_layers=4",
    "model.num_heads=2",
    "model.embedding_size=32",
    "model.tie_weights=true",
    "model.num_experts=2",
    "model.experts_per_token=1",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=30",
    "trainer.clip_norm=1",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
    "trainer.precision=float64",
)
TWICE = ("hardware.gpu_ids=[0,0]", "hardware.share_devices=true")
PIPELINE = ("strategy=pipeline", "strategy.num_microbatches=4")


def check(train: Train, *options: str) -> None:
    reference = train(*GPT, "hardware.devices=[cuda:0]", "strategy=single")
    run = train(*GPT, *options)
    loss, parameters = worst(run, reference, STEPS)
    print(f"{options}: loss {loss:.2e}, parameters {parameters:.2e}")
    assert loss <= 1e-12
    assert parameters <= 1e-12
    assert run.summary["final"]["eval"]["samples"] == 50


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("devices", ["cuda:0,cpu", "cpu,cuda:0"])
def test_a_card_and_the_cpu(train: Train, devices: str, schedule: str) -> None:
    cut = ("strategy.shard_plan=[[0,3],[3,4]]", f"strategy.schedule={schedule}")
    check(train, f"hardware.devices=[{devices}]", *PIPELINE, *cut)


def test_one_card_twice(train: Train) -> None:
    check(train, *TWICE, *PIPELINE, "strategy.shard_plan=[[0,1],[1,4]]")


def test_two_cards(train: Train) -> None:
    check(train, "hardware.devices=[cuda:0,cuda:1]", *PIPELINE, "strategy.shard_plan=[[0,1],[1,4]]")


def test_a_hybrid_of_a_card_and_two_cpus(train: Train) -> None:
    groups = ("strategy=hybrid", "strategy.groups=[[0],[1,2]]", "strategy.shard_plan=[[[0,4]],[[0,1],[1,4]]]")
    check(train, "hardware.devices=[cuda:0,cpu,cpu]", *groups)
