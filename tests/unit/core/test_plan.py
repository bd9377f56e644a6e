"""The plan file: what is read is what was written."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.summary import blank_summary
from hetexp.core.topology import Group, Topology

CPU = DeviceSpec(id="cpu:0", backend="cpu", index=0, name="Some CPU", vendor="cpu", memory_bytes=2**34)
CARD = DeviceSpec(
    id="cuda:1",
    backend="cuda",
    index=1,
    name="RTX 3090",
    vendor="nvidia",
    memory_bytes=None,
    uuid="GPU-1",
    driver="555.1",
    python="/usr/bin/python3",
)
EMULATED = DeviceSpec(
    id="emulated:0", backend="emulated", index=0, name="A770 (emulated)", vendor="intel", card="arc_a770"
)


def make(**changes: Any) -> Plan:
    plan = Plan(
        run_id="id-1",
        run_dir="/tmp/Läufe/1",
        name="näme",
        group=None,
        config={
            "trainer": {"seed": 0, "global_batch_size": 8, "precision": "float32"},
            "list": [1, 2.5, None],
        },
        devices=(CPU, CARD, EMULATED),
        strategy="ddp",
        shares=(0.1, 1 / 3, 0.5666),
        local_batch_sizes=(1, 2, 5),
        collective_backend="gloo",
        threads=(1, 1, 2),
        choices={"hardware": "auto"},
        overrides=("model=mlp",),
        reasons=("because", "and"),
        store_host="::1",
        store_port=1234,
        working_dir="/home",
        import_paths=("/a", "/b"),
    )
    return replace(plan, **changes)


@pytest.mark.parametrize(
    "plan",
    [
        make(),
        make(route=Topology(((Group("nccl", (0, 1)),), (Group("shm", (0, 2)),)))),
        make(devices=(CPU,), shares=(1.0,), local_batch_sizes=(8,), threads=(2,), overrides=(), group="g"),
    ],
)
def test_read_returns_what_was_written(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.json"
    plan.write(path)
    read = Plan.read(path)
    assert read == plan
    for field in fields(Plan):  # a list equals no tuple, but a nested one would not show above
        assert type(getattr(read, field.name)) is type(getattr(plan, field.name)), field.name
    assert read.config_hash == plan.config_hash
    assert [path.name] == [entry.name for entry in tmp_path.iterdir()]


def test_the_file_tells_people_what_follows_from_the_rest(tmp_path: Path) -> None:
    make().write(tmp_path / "plan.json")
    raw = json.loads((tmp_path / "plan.json").read_text())
    assert raw["world_size"] == 3
    assert raw["emulated"] is True


def test_emulated_if_one_device_is() -> None:
    assert make().emulated
    assert not make(devices=(CPU, CARD)).emulated


def test_config_hash_follows_the_configuration_and_nothing_else() -> None:
    plan = make()
    assert make(run_id="other", name="other", devices=(CPU,), overrides=()).config_hash == plan.config_hash
    reordered = dict(reversed(list(plan.config.items())))
    assert make(config=reordered).config_hash == plan.config_hash
    changed = {**plan.config, "trainer": {**plan.config["trainer"], "seed": 1}}
    assert make(config=changed).config_hash != plan.config_hash
    assert make(config={**plan.config, "new": None}).config_hash != plan.config_hash


def test_a_blank_summary_has_one_entry_a_device() -> None:
    summary = blank_summary(make(), "failed")
    assert [device["id"] for device in summary["devices"]] == ["cpu:0", "cuda:1", "emulated:0"]
    assert [device["local_batch"] for device in summary["devices"]] == [1, 2, 5]
    assert [device["emulated"] for device in summary["devices"]] == [False, False, True]
    assert (summary["status"], summary["world_size"], summary["emulated"]) == ("failed", 3, True)
    json.dumps(summary)


def test_each_device_has_a_rank_of_its_own_or_one_rank_drives_all() -> None:
    several = make(precisions=("float32", "bfloat16", "float64"), microbatch_sizes=(None, 1, 2))
    assert [several.rank_of(place) for place in range(3)] == [0, 1, 2]
    assert [several.devices_of(rank) for rank in range(3)] == [(CPU,), (CARD,), (EMULATED,)]
    assert [several.batch_size_of(place) for place in range(3)] == [1, 2, 5]
    assert [several.precision_of(place) for place in range(3)] == ["float32", "bfloat16", "float64"]
    assert [several.pass_size_of(place) for place in range(3)] == [None, 1, 2]
    together = make(
        devices=(CARD,),
        cards=(CARD, CARD),
        shares=(1.0,),
        card_shares=(0.75, 0.25),
        local_batch_sizes=(8,),
        precisions=("bfloat16",),
        microbatch_sizes=(4,),
    )
    assert [together.rank_of(place) for place in range(2)] == [0, 0]
    assert together.devices_of(0) == (CARD, CARD)
    assert [together.share_of(place) for place in range(2)] == [0.75, 0.25]
    assert [together.batch_size_of(place) for place in range(2)] == [6, 2]
    assert [together.precision_of(place) for place in range(2)] == ["bfloat16", "bfloat16"]
    assert [together.pass_size_of(place) for place in range(2)] == [None, None]
