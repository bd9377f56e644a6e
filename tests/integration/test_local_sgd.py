"""Local SGD between processes: equal to ddp where it must be, few bytes, resumed to the bit, dying peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import Train, difference, worst

from hetexp.core.errors import RunFailedError
from hetexp.hardware.links import SHARED_EXCHANGE

SHARES = ("hardware.devices=[cpu,cpu]", "balancing=manual", "balancing.weights=[24,8]")
GPT = (
    "data=synthetic",
    "data.num_samples=240",
    "data.num_test_samples=50",
    "data.kind=tokens",
    "data.mask_fraction=0.6",
    "model=gpt",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.embedding_size=16",
    "model.tie_weights=true",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
)
DILOCO = (
    "strategy=local_sgd",
    "strategy.outer_lr=0.7",
    "strategy.outer_momentum=0.9",
    "strategy.outer_nesterov=true",
    "optimizer=adamw",
)


def test_a_sync_each_step_equals_ddp(train: Train) -> None:
    common = (*GPT, *SHARES, "optimizer=sgd", "trainer.precision=float64", "trainer.log_every=1")
    steps = ("trainer.max_steps=10", "trainer.checkpoint_every=1")
    ddp = train(*common, *steps, "strategy=ddp")
    local = train(*common, *steps, "strategy=local_sgd", "strategy.sync_every=1")
    loss, parameters = worst(local, ddp, 10)
    assert loss <= 1e-12
    assert parameters <= 1e-12
    assert local.summary["comm"]["bytes_per_step"] == ddp.summary["comm"]["bytes_per_step"] > 0
    assert local.summary["comm"]["wire_dtype"] == "float64"
    assert local.summary["comm"]["backend"] == ddp.summary["comm"]["backend"] == "shm"


def test_fewer_bytes_and_a_resume_to_the_bit(train: Train) -> None:
    alone = (*GPT, "trainer.log_every=50", "trainer.max_steps=100")
    common = (*alone, *SHARES)
    ddp = train(*common, "strategy=ddp")
    # Nothing that is not kept: local steps of their own number, momenta, an outer momentum, a coded wire.
    diloco = (*common, *DILOCO, "strategy.sync_every=50", "strategy.local_steps=speed")
    plain = train(*diloco)
    assert ddp.summary["comm"]["bytes_per_step"] >= 49 * plain.summary["comm"]["bytes_per_step"] > 0
    whole = train(*diloco, "strategy.wire=int8", "trainer.checkpoint_every=50")
    sent = plain.summary["comm"]["bytes_per_step"] / whole.summary["comm"]["bytes_per_step"]
    assert sent == pytest.approx(4 * 256 / 260, rel=0.02)
    assert whole.summary["comm"]["wire_dtype"] == "int8"
    half = whole.folder / "checkpoints" / "step_00000050"
    rest = train(*diloco, "strategy.wire=int8", f"resume={half}")
    assert rest.parameters().keys() == whole.parameters().keys()
    assert all(torch.equal(rest.parameters()[key], value) for key, value in whole.parameters().items())
    assert rest.losses[-1] == whole.losses[-1]
    assert "device/cpu:1/train_loss" in whole.metrics[0]
    # Any strategy goes on from the synced model, and other ranks do, too; they say what they cannot restore.
    single = train(*alone, "strategy=single", "hardware=cpu", f"resume={half}")
    assert single.summary["steps"] == 100
    three = train(*diloco, "hardware.devices=[cpu,cpu,cpu]", "balancing.weights=[2,1,1]", f"resume={half}")
    assert three.screen.count("the checkpoint is of 2 ranks, which are now 3") == 1
    assert difference(three.parameters(), whole.parameters()) < 1.0


@pytest.mark.parametrize("when", ["between", "during"])
def test_a_rank_that_dies_ends_the_run(train: Train, tmp_path: Path, when: str) -> None:
    """Case 48: the last checkpoint stays, and both survivors end in the same way."""
    death = {
        "between": "fault.events=[{kind: death, device: 'cpu:2', at_step: 6}]",
        "during": "+model.sync=2",
    }
    alive = {"between": (), "during": ("+model.sync=0",)}
    overrides = (
        "hardware.devices=[cpu,cpu,cpu]",
        "data=custom",
        "data._target_=faulty.Data",
        "model=custom",
        f"model._target_=faulty.{'DiesInSync' if when == 'during' else 'Net'}",
        "strategy=local_sgd",
        "strategy.sync_every=4",
        "trainer.global_batch_size=16",
        "trainer.max_epochs=null",
        "trainer.max_steps=50",
        "trainer.checkpoint_every=4",
        "trainer.log_every=4",
        "launch.grace_seconds=2",
        death[when],
    )
    folder = tmp_path / "run"
    with pytest.raises(RunFailedError) as caught:
        train(*overrides, folder=folder)
    assert caught.value.exit_code == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "cpu:2" in summary["error"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_00000004"]
    again = train(*overrides[:-1], "trainer.max_steps=8", f"resume={folder}", *alive[when])
    assert again.summary["steps"] == 8


def test_a_sync_takes_its_modelled_time(train: Train) -> None:
    """An emulated pair: between syncs nobody waits, and a sync lasts as long as its bytes on the links."""
    run = train(
        "hardware=nvidia_arc",
        "data=synthetic",
        "data.num_samples=64",
        "data.num_test_samples=8",
        "model=mlp",
        "model.hidden_sizes=[8]",
        "strategy=local_sgd",
        "strategy.sync_every=3",
        "trainer.global_batch_size=16",
        "trainer.max_epochs=null",
        "trainer.max_steps=6",
        "trainer.log_every=3",
    )
    emulation = json.loads((run.folder / "emulation.json").read_text())
    scale = emulation["time_scale"]
    num_bytes = 4 * (16 * 8 + 8 + 8 * 4 + 4)
    cards = [device["card_facts"] for device in json.loads((run.folder / "plan.json").read_text())["devices"]]
    travel = []
    for card in cards:
        link = card["host_link"]
        rate = link["gb_per_second"] * 1e9 * link["efficiency"]
        travel.append(link["latency_seconds"] + num_bytes / rate)
    exchange = SHARED_EXCHANGE.seconds(num_bytes)  # two ranks in memory that they share
    for device in emulation["devices"]:
        paced = device["phases"]["exchange"]
        assert paced["real"] >= 0.999 * paced["modelled"] >= 0.998 * (exchange + min(travel)) * scale
    own = max(
        sum(device["work"]["forward"]) + sum(device["work"]["backward"]) + device["work"]["update"]
        for device in emulation["devices"]
    )
    predicted = own + (2 * max(travel) + exchange) / 3
    assert run.summary["predicted_step_s"] == pytest.approx(predicted * scale, rel=1e-9)
    assert run.summary["comm"]["bytes_per_step"] == pytest.approx(num_bytes / 3)
