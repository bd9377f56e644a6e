"""A sparse autoencoder on unequal shares: the single device's, its constraint, counters and revivals too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import Run, Train, difference, start_run, worst

from hetexp.cli import main

COMMON = (
    "experiment=sae_digits",
    "model.num_features=128",
    "model.k=3",
    "model.dead_after=250",
    "model.resample_every=8",
    "model.resample_candidates=100",
    "trainer.global_batch_size=32",
    "trainer.max_steps=20",
    "trainer.eval_every=20",
    "trainer.log_every=1",
    "trainer.precision=float64",
)
EVERY_STEP = (*COMMON, "trainer.checkpoint_every=1")
SINGLE = ("strategy=single", "hardware=cpu")
UNEQUAL = ("hardware.devices=[cpu,cpu]", "balancing=manual", "balancing.weights=[24,8]")
COUNTERS = ("since_fired", "firings", "seen")
METRICS = ("loss", "l0", "explained_variance", "reconstruction", "dead_fraction")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return start_run(tmp_path_factory.mktemp("single") / "run", (*EVERY_STEP, *SINGLE))


def evaluation(run: Run) -> dict[str, float]:
    return {name: run.metrics[-1][f"eval/{name}"] for name in METRICS}


def lengths(run: Run, step: int) -> torch.Tensor:
    rows = run.parameters(step)["W_dec"]
    return rows.square().sum(dim=1).sqrt()


def same_as(run: Run, single: Run) -> None:
    for step in range(1, 21):
        there, here = run.parameters(step), single.parameters(step)
        assert all(torch.equal(there[name], here[name]) for name in COUNTERS), step
        assert (lengths(run, step) - 1).abs().max() <= 1e-14
    loss, parameters = worst(run, single, 20)
    assert loss <= 1e-12
    assert parameters <= 1e-12
    assert evaluation(run) == pytest.approx(evaluation(single), rel=1e-12)


def revived(run: Run, step: int) -> torch.Tensor:
    """Features whose decoder row turned by more than an update could."""
    cosine = (run.parameters(step)["W_dec"] * run.parameters(step - 1)["W_dec"]).sum(dim=1)
    return (cosine < 0.9).nonzero().flatten()


@pytest.mark.parametrize(
    "ranks",
    [UNEQUAL, ("hardware.devices=[cpu,cpu,cpu]", "balancing=manual", "balancing.weights=[2,0,30]")],
    ids=["3:1", "an empty share"],
)
def test_ddp_is_the_single_device(train: Train, single: Run, ranks: tuple[str, ...]) -> None:
    assert len(revived(single, 16)) >= 5  # else nothing is compared
    assert len(revived(single, 15)) == 0
    run = train(*EVERY_STEP, *ranks, "strategy=ddp")
    assert torch.equal(revived(run, 16), revived(single, 16))
    same_as(run, single)


@pytest.mark.parametrize("activation", ["relu", "jumprelu"])
def test_other_activations_in_microbatches(train: Train, activation: str) -> None:
    jump = ("model.threshold=0.5", "model.bandwidth=0.5", "model.l0_coefficient=0.3")
    words = (*EVERY_STEP, f"model.activation={activation}", "model.l1_coefficient=3", *jump)
    run = train(*words, *UNEQUAL, "strategy=ddp", "trainer.microbatch_size=7")
    same_as(run, train(*words, *SINGLE))


def test_a_resume_within_a_window(train: Train, single: Run) -> None:
    half = single.folder / "checkpoints" / "step_00000012"
    rest = train(*COMMON, *SINGLE, f"resume={half}")
    whole, gone_on = single.parameters(), rest.parameters()
    assert all(torch.equal(gone_on[name], whole[name]) for name in whole)


def test_a_device_is_lost(train: Train, single: Run, tmp_path: Path) -> None:
    """The one that is left goes on with the counters of all samples, as the single device does."""
    run = train(
        *EVERY_STEP,
        *UNEQUAL,
        "strategy=ddp",
        "fault.survive=true",
        "fault.respawn=0",
        "fault.events=[{kind: death, device: 'cpu:1', at_step: 11}]",
        folder=tmp_path / "run",
    )
    assert [failure["device"] for failure in run.summary["failures"]] == ["cpu:1"]
    same_as(run, single)


def test_a_newcomer_has_the_counters_of_the_others(train: Train, tmp_path: Path) -> None:
    steps = (*COMMON, "trainer.max_steps=150", "trainer.checkpoint_every=150", "model.activation=relu")
    folder = tmp_path / "hurt"
    run = train(
        *steps,
        *UNEQUAL,
        "strategy=ddp",
        "model._target_=hurt.SlowSAE",
        f"+model.slow_until={folder}/plans/epoch_2.json",
        "fault.survive=true",
        "fault.heartbeat_seconds=5",
        "fault.respawn=1",
        "fault.respawn_seconds=0.1",
        "fault.events=[{kind: death, device: 'cpu:1', at_step: 5}]",
        "trainer.check_sync_every=1",  # of weights and counters
        folder=folder,
    )
    there = [line["step"] for line in run.metrics if "device/cpu:1/share" in line]
    assert there[-1] == 150 and len(there) < 150  # it was away, and came back
    single, hurt = train(*steps, *SINGLE).parameters(), run.parameters()
    assert all(torch.equal(hurt[name], single[name]) for name in COUNTERS)
    assert difference(hurt, single) <= 1e-12


SOURCE = (
    "data=synthetic",
    "data.kind=tokens",
    "data.num_samples=64",
    "data.num_test_samples=21",
    "model=gpt",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.embedding_size=8",
    "trainer.max_epochs=null",
    "trainer.max_steps=30",
    "trainer.global_batch_size=16",
)


def test_from_a_trained_model_to_what_its_loss_says(train: Train, tmp_path: Path) -> None:
    """Harvest, train at 3:1 and on one device, export: the metrics are the same, whatever the shares."""
    source = train(*SOURCE, *SINGLE)
    out = tmp_path / "vectors"
    assert main(["harvest", str(source.folder), "--layer", "blocks.0", "--output", str(out)]) == 0
    words = (*COMMON, "data=activations", f"data.folder={out}", "data.loss_recovered=20")
    single = train(*words, *SINGLE)
    run = train(*words, *UNEQUAL, "strategy=ddp")
    told = [{k: v for k, v in one.metrics[-1].items() if k.startswith("eval/")} for one in (run, single)]
    assert told[0] == pytest.approx(told[1], rel=1e-12)
    assert told[1]["eval/source_loss"] < told[1]["eval/spliced_loss"]
    assert 0 < told[1]["eval/loss_recovered"] < 1
    assert told[1]["eval/samples"] == 21 * 16
    assert main(["export", str(run.folder), "--output", str(tmp_path / "sae")]) == 0
    about = json.loads((tmp_path / "sae" / "cfg.json").read_text())
    assert about["metadata"]["hook_name"] == "blocks.0"


def test_local_sgd_keeps_the_constraint_after_each_merge(train: Train) -> None:
    words = (*COMMON, *UNEQUAL, "strategy=local_sgd", "strategy.sync_every=4", "trainer.checkpoint_every=4")
    run = train(*words, "trainer.check_sync_every=4")  # all replicas and counters are compared
    for step in range(4, 21, 4):
        assert (lengths(run, step) - 1).abs().max() <= 1e-14
    # Windows end at steps 8 and 16; the samples are those of both ranks.
    assert [int(run.parameters(step)["seen"]) for step in range(4, 21, 4)] == [128, 0, 128, 0, 128]
    last = run.parameters(20)
    assert 0 < int(last["firings"].sum()) <= 3 * 128
    rest = train(*words, f"resume={run.folder / 'checkpoints' / 'step_00000012'}")
    assert all(torch.equal(rest.parameters()[name], value) for name, value in last.items())
