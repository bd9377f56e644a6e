"""A `shard_plan` with devices: what it means, and everything that is wrong with it at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import plan_on, unbuilt_config

from hetexp.balancing.equal import Equal
from hetexp.core.config import read_config
from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import check_component
from hetexp.core.stage import Layer
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.plan.stages.assign import assign_stages
from hetexp.strategy.pipeline import Pipeline

CPUS = [CpuBackend.describe(index) for index in range(3)]
HOSTS = [replace(CPUS[0], host="one"), replace(CPUS[0], host="two"), replace(CPUS[1], host="two")]
LAYERS = ("embed", *(f"blocks.{number}" for number in range(4)), "norm")
TARGET = "hetexp.strategy.pipeline.Pipeline"


def stage(device: str = "cpu:0", **rest: Any) -> dict[str, Any]:
    return {"device": device, **rest}


def problems(entries: list[dict[str, Any]], devices: list[DeviceSpec], **rest: Any) -> list[str]:
    node = {"_target_": TARGET, "shard_plan": entries, **rest}
    assert check_component("strategy", node) == []
    return Pipeline(shard_plan=entries, **rest).check(read_config(unbuilt_config(strategy=node)), devices)


def test_numbers_of_layers() -> None:
    """The devices may come in any order, and so may those of hosts that have devices of one name."""
    entries = [stage("cpu:1", blocks=1), stage("cpu:0", host="two", blocks=3), stage(host="one", blocks=2)]
    assert problems(entries, HOSTS) == []
    strategy = Pipeline(shard_plan=entries)
    assert strategy.groups_on(HOSTS) == [[2, 1, 0]]
    assert strategy.ranges_in(LAYERS) == [[[0, 1], [1, 4], [4, 6]]]
    assert strategy.check_layers(LAYERS) == []
    assert strategy.check_layers(LAYERS[:5])[0].startswith("`strategy.shard_plan` must name layers of the")
    given = [stage("cpu:1", layers=[0, 2]), stage("cpu:0", layers=[2, 6])]
    assert problems(given, CPUS[:2]) == []
    assert Pipeline(shard_plan=given).ranges_in(LAYERS) == [[[0, 2], [2, 6]]]


def test_names_of_modules() -> None:
    entries = [stage(modules=["embed", "blocks.0..blocks.2"]), stage("cpu:1", modules="blocks.3..norm")]
    assert problems(entries, CPUS[:2]) == []
    strategy = Pipeline(shard_plan=entries)
    assert strategy.check_layers(LAYERS) == []
    assert strategy.ranges_in(LAYERS) == [[[0, 4], [4, 6]]]
    whole = [stage(modules=["embed"]), stage("cpu:1", modules=["blocks", "norm"])]
    assert Pipeline(shard_plan=whole).ranges_in(LAYERS) == [[[0, 1], [1, 6]]]


def test_all_that_is_wrong_is_told_at_once() -> None:
    found = problems(
        [
            stage("cpu:7", blocks=0),
            stage("cpu:1", blocks=2, layers=[0, 2]),
            {"device": "cpu:2", "block": 2},
            stage("cpu:2", host="three", modules=[]),
        ],
        CPUS,
    )
    for told in (
        "`strategy.shard_plan[0].blocks` must be a number of layers, 1 or more, but is 0 instead.",
        "`strategy.shard_plan[0].device` must be one of the run's devices (cpu:0, cpu:1, cpu:2), but is",
        "`strategy.shard_plan[1]` must have one of blocks, layers and modules, but has blocks and layers.",
        "`strategy.shard_plan[2]` may have device, host, blocks, layers, modules, but has `block`. Did you",
        "`strategy.shard_plan[3].modules` must be a list of names of modules, but is [] instead.",
        "`strategy.shard_plan[3].host` must be a host that has cpu:2",
    ):
        assert any(one.startswith(told) for one in found), (told, found)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ([stage(blocks=2), stage("cpu:1", modules=["norm"])], "must give all stages in one way, but has blo"),
        ([stage(blocks=2), stage(blocks=2)], "must use each of the run's devices, but leaves out cpu:1."),
        ([stage(blocks=2)], "must use each of the run's devices, but leaves out cpu:1."),
        ([stage(layers=[0, 2]), stage("cpu:1", layers=[3, 6])], "must cover the layers without a gap, but"),
        ([stage(layers=[0, 4]), stage("cpu:1", layers=[3, 6])], "must give each layer to one stage, but [0"),
    ],
)
def test_what_no_single_stage_shows(entries: list[dict[str, Any]], told: str) -> None:
    (problem,) = problems(entries, CPUS[:2])
    assert problem.startswith(f"`strategy.shard_plan` {told}")


def test_a_host_must_be_said_where_several_have_the_device() -> None:
    (problem,) = problems([stage(blocks=1), stage("cpu:1", blocks=1)], HOSTS)
    assert problem.startswith("`strategy.shard_plan[0].host` must be given if several hosts have cpu:0 (o")


def test_stages_that_come_back_to_a_device() -> None:
    there = [stage(f"cpu:{rank}", blocks=1) for rank in (0, 1, 1, 0)]
    assert problems(there, CPUS[:2], schedule="ZBVZeroBubble") == []
    (problem, _) = problems(there, CPUS[:2], schedule="LoopedBFS")
    assert problem == (
        "`strategy.shard_plan[2].device` must be cpu:0, to which schedule LoopedBFS assigns stage 2, but is "
        "'cpu:1' instead."
    )


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [
        (["embed", "blocks.0"], ["blocks.1..blocks.9"], "[1].modules` must be layers of the model (embed"),
        (
            ["embed..blocks.2"],
            ["blocks.2..norm"],
            "` must give each layer to one stage, but blocks.2 i",
        ),
        (
            ["embed..blocks.1"],
            ["blocks.3..norm"],
            "` must hold all 6 layers of the model, but leaves",
        ),
        (
            ["embed", "blocks.1"],
            ["blocks.2..norm"],
            "[0].modules` must be layers that follow one ano",
        ),
        (
            ["blocks", "norm"],
            ["embed"],
            "` must have its stages in the order of the model's",
        ),
    ],
)
def test_modules_that_do_not_cover_the_model(first: list[str], last: list[str], told: str) -> None:
    strategy = Pipeline(shard_plan=[stage(modules=first), stage("cpu:1", modules=last)])
    found = strategy.check_layers(LAYERS)
    assert found[0].startswith(f"`strategy.shard_plan{told}"), found


def test_a_stage_that_its_device_cannot_hold() -> None:
    devices = [replace(device, memory_bytes=2 * GIB) for device in CPUS[:2]]
    layers = [Layer(name, 1 / 6, GIB // 8, GIB // 8, 0, 0, 0, GIB // 4) for name in LAYERS]
    plan = plan_on(devices, {"trainer": {"global_batch_size": 8}})
    even = [stage("cpu:1", modules="embed..blocks.1"), stage(modules="blocks.2..norm")]
    found = assign_stages(plan, Pipeline(shard_plan=even), Equal(), layers, None)
    assert list(found.ranks) == [1, 0]
    assert [(own.first_layer, own.end_layer) for (own,) in found.stages] == [(0, 3), (3, 6)]
    uneven = [stage("cpu:1", modules="embed..blocks.3"), stage(modules="norm")]
    with pytest.raises(ConfigError, match=r"does not fit the devices' memory: cpu:1.* would need 2\.\d+ of"):
        assign_stages(plan, Pipeline(shard_plan=uneven), Equal(), layers, None)
