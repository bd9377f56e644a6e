"""Runs whose numbers go wrong on one rank: found, told, never averaged into the weights (S12, case 9)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import Train

from hetexp.core.errors import ConfigError, RunFailedError
from hetexp.data.sampler import GlobalSampler, Position

COMMON = (
    "data=custom",
    "data._target_=poisoned.Data",
    "model=mlp",
    "model.hidden_sizes=[8]",
    "hardware.devices=[cpu,cpu]",
    "balancing=manual",
    "balancing.weights=[3,1]",
    "trainer.global_batch_size=16",
    "trainer.max_epochs=null",
    "trainer.max_steps=4",
    "trainer.log_every=1",
)


def test_a_bad_sample_stops_the_run_with_a_checkpoint_to_go_on_from(train: Train, tmp_path: Path) -> None:
    """With a data loader process, whose batches are drawn ahead of the step."""
    second, _ = GlobalSampler(64, 16, seed=0).batch(Position(0, 16))
    bad = int(second[13])  # of rank 1's four samples
    options = (*COMMON, f"+data.bad=[{bad}]", "trainer.num_workers=1")
    folder = tmp_path / "run"
    with pytest.raises(RunFailedError) as caught:
        train(*options, folder=folder)
    told = str(caught.value)
    assert caught.value.exit_code == 1
    assert "The gradient of step 2 is not finite" in told
    assert "the loss is nan on rank 1, cpu:1" in told
    assert f"because of training sample {bad}." in told
    assert f"resume={folder}" in told
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert {failure["kind"] for failure in summary["failures"]} == {"NonFiniteError"}
    assert summary["checkpoint"] == str(folder / "checkpoints" / "step_00000001")

    run = train(*options, f"resume={folder}", "trainer.non_finite=skip")
    assert run.summary["steps"] == 4
    assert all(tensor.isfinite().all() for tensor in run.parameters().values())
    screen = " ".join(run.screen.split())  # where its lines break depends on the processor's name
    assert f"because of training sample {bad}." in screen and "left out on all ranks" in screen
    assert [row["train/skipped_steps"] for row in run.metrics if "train/loss" in row] == [1, 1, 1]


def test_a_gradient_that_is_not_finite_where_the_loss_is(train: Train, tmp_path: Path) -> None:
    first, _ = GlobalSampler(64, 16, seed=0).batch(Position())
    bad = int(first[14])
    common = (option for option in COMMON if not option.startswith("model"))
    options = (*common, "model=custom", "model._target_=poisoned.Root", f"+data.zero=[{bad}]")
    with pytest.raises(RunFailedError) as caught:
        train(*options, "trainer.accumulate=2", folder=tmp_path / "run")
    told = str(caught.value)
    assert "every loss is finite, but rank 1's own gradient, on cpu:1" in told
    assert f"is not (first in first.weight), because of training sample {bad}." in told
    assert "start again" in told and not (tmp_path / "run" / "checkpoints").exists()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["checkpoint"] is None


def test_one_ranks_sample_in_everybodys_statistics(train: Train) -> None:
    second, _ = GlobalSampler(64, 16, seed=0).batch(Position(0, 16))
    bad = int(second[13])
    common = (option for option in COMMON if not option.startswith("model"))
    options = (*common, "model=custom", "model._target_=poisoned.Normed", f"+data.bad=[{bad}]")
    run = train(*options, "trainer.non_finite=skip")
    screen = " ".join(run.screen.split())
    assert "the loss is nan on rank 0, cpu:0" in screen
    assert "whose samples alone give a finite one; nan on rank 1, cpu:1" in screen
    assert f"because of training sample {bad}." in screen
    assert all(tensor.isfinite().all() for tensor in run.parameters().values())
    assert run.parameters()["1.num_batches_tracked"] == 3


@pytest.mark.parametrize("strategy", ["local_sgd", "independent"])
def test_a_bad_sample_of_a_rank_that_trains_by_itself(train: Train, tmp_path: Path, strategy: str) -> None:
    second, _ = GlobalSampler(64, 16, seed=0).batch(Position(0, 16))
    bad = int(second[13])
    options = (*COMMON, f"strategy={strategy}", f"+data.bad=[{bad}]", "trainer.check_sync_every=1")
    with pytest.raises(RunFailedError) as caught:
        train(*options, folder=tmp_path / "run")
    told = str(caught.value)
    assert "The gradient of step 2 on rank 1, cpu:1" in told
    assert f"because of training sample {bad}." in told


def test_a_strategy_that_cannot_run_falls_back_only_where_it_is_told_to(train: Train) -> None:
    options = (*COMMON, "strategy._target_=choosy.Choosy", "trainer.max_steps=2")
    with pytest.raises(ConfigError, match="Or strategy.fallback=single goes on"):
        train(*options)
    run = train(*options, "strategy.fallback=single")
    reason = "`strategy` must be ddp for cpu:0, cpu:1, but is 'choosy' instead."
    assert run.summary["fallback"] == {"from": "choosy", "to": "single", "reason": reason}
    assert (run.summary["strategy"], run.summary["world_size"], run.summary["samples"]) == ("single", 1, 32)
    screen = " ".join(run.screen.split())
    assert f"strategy.fallback=single: choosy cannot run. {reason} cpu:0 " in screen
    assert f"Not choosy but single: {reason}" in screen


def test_a_rank_that_drifts_is_found(train: Train, tmp_path: Path) -> None:
    common = (option for option in COMMON if not option.startswith("model"))
    options = (*common, "model=custom", "model._target_=drifting.Net", "trainer.check_sync_every=2")
    assert train(*options, "+model.by=0.0").summary["steps"] == 4
    with pytest.raises(RunFailedError) as caught:
        train(*options, folder=tmp_path / "drifted")
    told = str(caught.value)
    assert "After step 4 the ranks no longer hold one model: the weight of layers.1.weight differs" in told
    assert "rank 1, cpu:1" in told
