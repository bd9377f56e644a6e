"""Shares that follow the devices during a run; what is learned is the same (cases 14, 50 and S8)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import Run, Train, difference

CARDS = """
cards:
  plain:
    name: Plain
    vendor: nvidia
    memory_gib: 8
    tflops: {float32: 4.0e-6}
    bandwidth_gb_per_second: 300
    link: pcie4x16
"""
RUN = (
    "model=mlp",
    "model.hidden_sizes=[16]",
    "data=synthetic",
    "data.num_samples=2048",
    "trainer.global_batch_size=64",
    "trainer.max_epochs=null",
    "trainer.log_every=1",
    "hardware.devices=[emulated:plain,emulated:plain]",
    "hardware.time_scale=1",
)


@pytest.fixture
def own_cards(tmp_path: Path) -> str:
    path = tmp_path / "cards.yaml"
    path.write_text(CARDS)
    return f"hardware.catalogue={path}"


def slow_from(first: int, until: int | None) -> str:
    end = f",until_step:{until}" if until is not None else ""
    return f'fault.events=[{{kind:slow,device:"emulated:1",at_step:{first},factor:4{end}}}]'


def shares(run: Run) -> list[float]:
    """The second device's part of each step."""
    return [row["device/emulated:1/share"] for row in run.metrics if "train/loss" in row]


def splits(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "splits.jsonl").read_text().splitlines()]


def test_a_device_that_is_slow_for_a_while(train: Train, own_cards: str) -> None:
    steps = "trainer.max_steps=40"
    run = train(*RUN, own_cards, steps, slow_from(10, 25), "balancing=adaptive")
    followed = shares(run)
    assert followed[10] == pytest.approx(0.5, abs=0.1)
    assert followed[24] < 0.3  # of 1/5
    assert followed[-1] == pytest.approx(0.5, abs=0.1)
    assert run.summary["splits"] == run.metrics[-2]["balancing/splits"] >= 2
    reasons = [one["reason"] for one in splits(run)]
    assert any("emulated:1" in reason and "times as long a sample as before" in reason for reason in reasons)
    assert all(sum(one["counts"]) == 64 for one in splits(run))
    assert "another split from step" in run.screen
    # The line before the shares fell tells who waited, and how unequal the work was.
    slow = run.metrics[10]
    assert slow["imbalance"] > 1.4
    assert slow["device/emulated:0/idle_seconds"] > 0 == slow["device/emulated:1/idle_seconds"]
    # The batches are the same, whoever computes them.
    plain = train(*RUN, own_cards, steps)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    rates = [[row["train/learning_rate"] for row in r.metrics if "train/loss" in row] for r in (run, plain)]
    assert rates[0] == rates[1]
    assert difference(run.parameters(), plain.parameters()) < 1e-5
    assert plain.summary["splits"] == 0


def test_a_resumed_run_knows_the_devices(train: Train, own_cards: str) -> None:
    slow = slow_from(0, None)
    first = train(*RUN, own_cards, "trainer.max_steps=16", slow, "balancing=adaptive")
    assert shares(first)[0] == 0.5
    assert shares(first)[-1] < 0.3
    again = train(
        *RUN, own_cards, "trainer.max_steps=20", slow, "balancing=adaptive", f"resume={first.folder}"
    )
    assert len(shares(again)) == 4
    # Not what the last step had: a balancer may move work after it, for the step that follows.
    assert shares(again)[0] < 0.3


def test_loader_processes_read_ahead_of_a_change(train: Train) -> None:
    """Ranks whose loaders have read ahead change the split at one step: else a collective would differ."""
    run = train(
        "hardware.devices=[cpu,{device:cpu,slow:4}]",
        "data=digits",
        "model=mlp",
        "trainer.num_workers=2",
        "trainer.max_steps=24",
        "trainer.max_epochs=null",
        "trainer.log_every=1",
        "trainer.precision=float64",
        "balancing=adaptive",
    )
    rows = [row for row in run.metrics if "train/loss" in row]
    parts = [(row["device/cpu:0/share"], row["device/cpu:1/share"]) for row in rows]
    assert all(sum(pair) == pytest.approx(1.0) for pair in parts)
    assert parts[0] == (0.5, 0.5)
    assert parts[-1] != (0.5, 0.5)  # to whom work moves is told where other processes change no pace
    plain = train(
        "hardware=cpu",
        "data=digits",
        "model=mlp",
        "trainer.max_steps=24",
        "trainer.max_epochs=null",
        "trainer.log_every=1",
        "trainer.precision=float64",
    )
    assert run.losses == pytest.approx(plain.losses, rel=1e-9)
