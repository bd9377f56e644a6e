"""One model on a CUDA rank and a CPU rank, and on two CUDA ranks: real devices, exact gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import Train, difference, worst

from hetexp.core.errors import RunFailedError

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
)
CARD = ("hardware.devices=[cuda:0]", "strategy=single")
MIXED = ("hardware.devices=[cuda:0,cpu]", "balancing=manual", "balancing.weights=[24,8]")


@pytest.mark.parametrize(
    "layout", [MIXED, ("hardware.devices=[cpu,cuda:0]", *MIXED[1:])], ids=["gpu+cpu", "cpu+gpu"]
)
def test_float64_on_cuda_and_cpu_equals_one_device(train: Train, layout: tuple[str, ...]) -> None:
    precision = "trainer.precision=float64"
    reference = train(*GPT, precision, "hardware=cpu", "strategy=single")
    run = train(*GPT, precision, *layout, "trainer.accumulate=2")
    loss, parameters = worst(run, reference, STEPS)
    print(f"float64: loss {loss:.2e}, parameters {parameters:.2e}")
    assert loss <= 1e-12
    assert parameters <= 1e-12


def test_float32_on_cuda_and_cpu_is_exact(train: Train) -> None:
    one, *others = (train(*GPT, *CARD, f"trainer.accumulate={n}") for n in (1, 2, 4))
    allowed = 2 * max(worst(other, one, STEPS)[1] for other in others)
    run = train(*GPT, *MIXED)
    _, measured = worst(run, one, STEPS)
    print(f"float32: parameters {measured:.2e}, allowed {allowed:.2e}")
    assert 0 < measured <= allowed
    assert run.summary["emulated"] is False
    assert run.summary["comm"]["backend"] == "shm"
    assert [device["backend"] for device in run.summary["devices"]] == ["cuda", "cpu"]
    assert run.summary["devices"][0]["peak_memory"] > 0
    assert all(device["samples_per_s"] > 0 for device in run.summary["devices"])


def test_checkpoint_moves_between_device_kinds(train: Train) -> None:
    precision = "trainer.precision=float64"
    first = train(*GPT, precision, *MIXED)
    checkpoint = first.folder / "checkpoints" / "step_00000010"
    for layout in (("hardware=cpu", "strategy=single"), CARD):
        second = train(*GPT, precision, *layout, f"resume={checkpoint}")
        assert difference(second.parameters(), first.parameters()) <= 1e-12


def test_auto_takes_every_card_natively(train: Train) -> None:
    run = train(*GPT, "hardware=auto", "trainer.max_steps=3")
    assert {device["backend"] for device in run.summary["devices"]} == {"cuda"}
    assert run.summary["comm"]["backend"] == "nccl"


def test_two_cards_over_nccl_equal_one(train: Train) -> None:
    precision = "trainer.precision=float64"
    reference = train(*GPT, precision, *CARD)
    two = ("hardware.devices=[cuda:0,cuda:1]", "balancing=manual", "balancing.weights=[20,12]")
    for options in ((), ("trainer.accumulate=3",), ("balancing.weights=[1,0]",)):
        run = train(*GPT, precision, *two, *options)
        loss, parameters = worst(run, reference, STEPS)
        print(f"two cards {options}: loss {loss:.2e}, parameters {parameters:.2e}")
        assert run.summary["comm"]["backend"] == "nccl"
        assert loss <= 1e-12
        assert parameters <= 1e-12


def test_two_cards_and_the_cpu(train: Train) -> None:
    precision = "trainer.precision=float64"
    reference = train(*GPT, precision, *CARD)
    three = ("hardware.devices=[cuda:1,cpu,cuda:0]", "balancing=manual", "balancing.weights=[17,5,10]")
    loss, parameters = worst(train(*GPT, precision, *three), reference, STEPS)
    assert loss <= 1e-12
    assert parameters <= 1e-12


def test_a_slowed_card_says_so_and_stays_exact(train: Train) -> None:
    plain = train(*GPT, *CARD)
    slowed = train(*GPT, "hardware.devices=[{device: cuda:0, slow: 3}]", "strategy=single")
    loss, parameters = worst(slowed, plain, STEPS)
    speeds = [run.summary["devices"][0]["samples_per_s"] for run in (plain, slowed)]
    print(
        f"slowed 3×: {speeds[0] / speeds[1]:.2f} times slower, loss {loss:.1e}, parameters {parameters:.1e}"
    )
    assert loss <= 1e-5
    assert parameters <= 1e-5
    assert slowed.summary["emulated"] is True
    assert "slowed 3×" in slowed.summary["devices"][0]["name"]
    assert "DEVICES NOT AS THEY ARE" in slowed.screen


def test_a_limited_card_runs_out_of_memory(train: Train, tmp_path: Path) -> None:
    large = (
        "model.embedding_size=512",
        "model.num_layers=8",
        "data.sequence_length=512",
        "trainer.max_steps=2",
    )
    assert train(*GPT, *CARD, *large).summary["status"] == "completed"
    limited = "hardware.devices=[{device: cuda:0, memory_gib: 0.25}]"
    folder = tmp_path / "limited"
    with pytest.raises(RunFailedError, match="OutOfMemoryError|out of memory"):
        train(*GPT, limited, "strategy=single", *large, "hardware.check_memory=false", folder=folder)

    failures = json.loads((folder / "summary.json").read_text())["failures"]
    assert failures[0]["kind"] == "DeviceMemoryError"
