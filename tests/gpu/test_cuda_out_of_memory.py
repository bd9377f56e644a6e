"""Case 15 on real cards: CUDA's allocator refuses, and the run goes on with smaller microbatches."""

from __future__ import annotations

import json

import pytest
from support import Run, Train, worst

STEPS = 6
COMMON = (
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
    "hardware.check_memory=false",
)
GPT = (
    *COMMON,
    "data=synthetic",
    "data.kind=tokens",
    "data.sequence_length=512",
    "data.num_samples=64",
    "data.num_test_samples=8",
    "model=gpt",
    "model.num_layers=8",
    "model.num_heads=8",
    "model.embedding_size=512",
    "trainer.global_batch_size=32",
    "trainer.precision=float64",
)
"""200 MiB of weights, as much of gradients, twice as much of moments; far more than 3 GiB for 32 samples."""
HUNGRY = (
    *COMMON,
    "data=synthetic",
    "data.num_samples=100",
    "data.num_test_samples=20",
    "data.input_shape=[4]",
    "data.num_classes=2",
    "model=custom",
    "model._target_=faulty.Hungry",
    "+model.ranks=[0]",
    "trainer.global_batch_size=24",
    "trainer.precision=float64",
    "balancing=manual",
    "balancing.weights=[16,8]",
    "strategy.bucket_cap_mb=0.0001",
)
"""Each layer is a bucket of its own, and memory runs out after two of them were sent."""
LIMITED = "{device: cuda:0, memory_gib: 2}"


def log_of(run: Run, rank: int = 0) -> str:
    return (run.folder / "logs" / f"rank_{rank}.log").read_text()


def test_a_batch_that_a_card_does_not_hold(train: Train) -> None:
    whole = train(*GPT, "hardware.devices=[cuda:0]", "strategy=single")
    run = train(*GPT, "hardware.devices=[{device: cuda:0, memory_gib: 3}]", "strategy=single")
    loss, parameters = worst(run, whole, STEPS)
    size = run.summary["devices"][0]["micro_batch"]
    print(f"halved to {size}: loss {loss:.1e}, parameters {parameters:.1e}")
    assert loss <= 1e-11
    assert parameters <= 1e-11
    assert "out of memory" in log_of(run)
    assert size < 32
    assert run.summary["devices"][0]["peak_memory"] <= 3 * 2**30


@pytest.mark.parametrize(
    "other", [pytest.param("cpu", id="cuda+cpu"), pytest.param("cuda:1", id="two_cards")]
)
def test_between_two_buckets(train: Train, other: str) -> None:
    """16 samples ask for 4 GiB, 8 for 2, 4 for 1."""
    whole = train(*HUNGRY, f"hardware.devices=[cuda:0,{other}]")
    run = train(*HUNGRY, f"hardware.devices=[{LIMITED},{other}]", "+model.gib_per_sample=0.25")
    loss, parameters = worst(run, whole, STEPS)
    print(f"cuda:0 and {other}: loss {loss:.1e}, parameters {parameters:.1e}")
    assert loss <= 1e-12
    assert parameters <= 1e-12
    assert run.summary["devices"][0]["micro_batch"] == 4
    assert "CUDA out of memory" in log_of(run)
    assert log_of(run).count("All ranks do the step again") == 2
    assert "MiB were free" in log_of(run)
    saved = json.loads(next((run.folder / "checkpoints").glob(f"*{STEPS}/state.json")).read_text())
    assert saved["extra"]["devices"][0]["microbatch_limit"] == 4
