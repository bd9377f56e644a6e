"""Case 43: every schedule of torch's trains a tied model exactly, frozen parameters and skipped steps too."""

from __future__ import annotations

from pathlib import Path

import torch
from staged_ranks import planned, trained
from support import Train, difference

from hetexp.strategy.pipeline.schedules import SCHEDULES, oldest_release

STEPS = 3
COMMON = (
    "data=synthetic",
    "data.num_samples=40",  # two batches of 16, and one of 8
    "data.num_test_samples=0",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=16",
    "trainer.precision=float64",
    "trainer.checkpoint_every=1",
    "trainer.clip_norm=0.5",
    "data.kind=tokens",
    "model=gpt",
    "model._target_=pieced.Frozen",
    "model.num_layers=4",
    "model.num_heads=2",
    "model.embedding_size=16",
    "model.tie_weights=true",
    "model.num_experts=2",
    "model.experts_per_token=1",
)
FOUR = "strategy.shard_plan=[[0,1],[1,2],[2,3],[3,4]]"
PLANS = {
    "GPipe": (),
    "1F1B": ("strategy.shard_plan=[[0,1],[1,4]]", "strategy.num_microbatches=3"),
    "LoopedBFS": (),
    "Interleaved1F1B": (FOUR,),
    "InterleavedZeroBubble": (FOUR,),
    "ZBVZeroBubble": (FOUR,),
    "DualPipeV": (FOUR,),
}
RELEASE = oldest_release([torch.__version__]) or (0, 0)
THERE = {name: options for name, options in PLANS.items() if SCHEDULES[name].since <= RELEASE}
"""Those that this torch has."""


def test_every_schedule_equals_one_device(tmp_path: Path, train: Train) -> None:
    reference = train("hardware=cpu", "strategy=single", *COMMON)
    expected = [reference.parameters(step) for step in range(1, STEPS + 1)]
    common = (*COMMON, "hardware.devices=[cpu,cpu]", "strategy=pipeline", "strategy.num_microbatches=4")
    plans = [
        planned(tmp_path, (*common, f"strategy.schedule={name}", *options)) for name, options in THERE.items()
    ]
    for name, found in zip(THERE, trained(plans, STEPS), strict=True):
        differences = [difference(a, b) for a, b in zip(found, expected, strict=True)]
        assert max(differences) <= 1e-12, name
    frozen = "blocks.1.attention.output.weight"
    assert torch.equal(expected[0][frozen], expected[-1][frozen])
