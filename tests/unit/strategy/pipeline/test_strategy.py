"""`strategy=pipeline`: what speaks against it is said before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import unbuilt_config

from hetexp.core.config import read_config
from hetexp.core.device import DeviceSpec
from hetexp.core.instantiate import check_component
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.catalogue import card
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.strategy.pipeline import Pipeline

CPUS = [CpuBackend.describe(index) for index in range(3)]
TARGET = "hetexp.strategy.pipeline.Pipeline"


def problems(devices: list[DeviceSpec], trainer: dict[str, Any] | None = None, **arguments: Any) -> list[str]:
    node = {"_target_": TARGET, **arguments}
    assert check_component("strategy", node) == []
    config = read_config(unbuilt_config(strategy=node, trainer=trainer or {}))
    return Pipeline(**arguments).check(config, devices)


def test_a_plan_that_fits_is_taken() -> None:
    assert problems(CPUS) == []
    assert problems(CPUS[:2], shard_plan=[[0, 4], [4, 6]]) == []
    quarter = [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert problems(CPUS[:2], shard_plan=quarter, schedule="ZBVZeroBubble") == []


@pytest.mark.parametrize(
    ("count", "arguments", "message"),
    [
        (1, {}, "`strategy` must be single for one device (cpu:0), but is 'pipeline' instead"),
        (
            3,
            {"shard_plan": [[0, 4], [4, 6]]},
            "`strategy.shard_plan` must have one range of layers a stage, which are 3 for schedule 1F1B on 3 "
            "devices, but has 2 instead.",
        ),
        (2, {"shard_plan": [[0, 4], [5, 6]]}, "`strategy.shard_plan` must cover the layers without a gap"),
        (
            3,
            {"num_microbatches": 2},
            "`strategy.num_microbatches` must be at least the 3 stages for schedule 1F1B, but is 2 instead.",
        ),
        (
            2,
            {"schedule": "Interleaved1F1B", "num_microbatches": 5},
            "`strategy.num_microbatches` must be a multiple of the 2 devices of a pipeline",
        ),
    ],
)
def test_what_does_not_fit_is_told(count: int, arguments: dict[str, Any], message: str) -> None:
    (problem,) = problems(CPUS[:count], **arguments)
    assert problem.startswith(message)


def test_microbatches_are_the_pipelines_own() -> None:
    (message,) = problems(CPUS, {"accumulate": 2})
    assert message.startswith("`trainer.accumulate` must be 1 if `strategy` is pipeline, but is 2 instead.")
    (message,) = problems(CPUS, {"microbatch_size": 2})
    assert message.startswith("`trainer.microbatch_size` must be null if `strategy` is pipeline, but is 2")


def test_activations_are_not_computed_again_where_backward_is_split() -> None:
    again = {"activation_checkpointing": True}
    assert problems(CPUS, again) == []
    (message,) = problems(CPUS[:2], again, schedule="ZBVZeroBubble")
    assert message.startswith(
        "`trainer.activation_checkpointing` must be false if `strategy.schedule` is ZBV"
    )


def test_emulated_devices_compute_a_backward_pass_at_once() -> None:
    emulated = [EmulatedBackend.describe_card(index, card("rtx_3090")) for index in range(2)]
    assert problems(emulated, schedule="Interleaved1F1B") == []
    (message,) = problems(emulated, schedule="DualPipeV")
    assert message.startswith("`strategy.schedule` must be one that computes a backward pass at once")


def test_the_oldest_torch_of_the_ranks_limits_the_schedule() -> None:
    old = [replace(CPUS[0], torch="2.13.0+cpu"), replace(CPUS[1], torch="2.8.0+cu128")]
    (message,) = problems(old, schedule="DualPipeV")
    assert message.startswith(
        "`strategy.schedule` must be one that each rank's torch has, but is 'DualPipeV'"
    )
    assert "since 2.9" in message
    (message,) = problems(old, schedule="GPipe", num_microbatches=1)
    assert message.startswith(
        "`strategy.num_microbatches` must be at least the 2 stages for schedule GPipe with"
    )
    assert problems(old, schedule="GPipe", num_microbatches=2) == []
    assert problems(CPUS[:2], schedule="GPipe", num_microbatches=1) == []


def test_types_are_told_by_key() -> None:
    (message,) = check_component("strategy", {"_target_": TARGET, "schedule": "1f1b"})
    assert message.startswith("`strategy.schedule` must be ")
    (message,) = check_component("strategy", {"_target_": TARGET, "num_microbatches": 0})
    assert message.startswith("`strategy.num_microbatches` must be ")
    assert check_component("strategy", {"_target_": TARGET, "shard_plan": "even"})
