"""The list against nvidia-smi, and that the chosen card is the one that trains."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import Train, worst

from hetexp.cli import main
from hetexp.core.errors import ConfigError, SetupError
from hetexp.hardware.detection.inventory import detect
from hetexp.hardware.detection.lease import Leases

FIELDS = ("index", "uuid", "pci.bus_id", "name", "memory.total", "power.limit", "temperature.gpu")
QUICK = (
    "trainer.max_steps=5",
    "trainer.max_epochs=null",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)


def nvidia_smi() -> list[dict[str, str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [dict(zip(FIELDS, map(str.strip, row), strict=True)) for row in csv.reader(out.splitlines())]


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["gpus", "--json"]) == 0
    cards: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return [card for card in cards if card["vendor"] == "nvidia"]


def test_the_rows_are_those_of_nvidia_smi(capsys: pytest.CaptureFixture[str]) -> None:
    rows, cards = nvidia_smi(), listed(capsys)
    assert [card["uuid"] for card in cards] == [row["uuid"] for row in rows]
    for card, row in zip(cards, rows, strict=True):
        assert card["device"] == f"cuda:{row['index']}"
        assert card["pci"] == row["pci.bus_id"].lower()[4:]
        assert card["name"] == row["name"]
        assert card["memory_bytes"] // 2**20 == int(row["memory.total"])
        assert card["power_limit_watts"] == pytest.approx(float(row["power.limit"]), abs=1)
        assert card["temperature_celsius"] == pytest.approx(float(row["temperature.gpu"]), abs=15)


@pytest.mark.parametrize("variable", [None, "", "0"])
def test_a_hidden_card_is_refused_and_an_open_one_is_used(
    train: Train, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    if variable == "":
        with pytest.raises(ConfigError, match="hidden by CUDA_VISIBLE_DEVICES="):
            train(*QUICK, "hardware.gpu_ids=0")
        return
    run = train(*QUICK, "hardware.gpu_ids=0")
    (device,) = run.summary["devices"]
    assert device["id"] == "cuda:0"
    state = json.loads((Path(run.summary["checkpoint"]) / "state.json").read_text())
    assert state["extra"]["devices"][0]["uuid"] == nvidia_smi()[0]["uuid"]


def test_two_cards_each_by_its_uuid(train: Train) -> None:
    first, second = (row["uuid"] for row in nvidia_smi()[:2])
    run = train(*QUICK, f"hardware.gpu_ids=[{second},{first}]")
    assert [device["id"] for device in run.summary["devices"]] == ["cuda:1", "cuda:0"]
    assert run.summary["comm"]["backend"] == "nccl"


def test_ranks_that_share_a_card_are_exact(train: Train) -> None:
    precision = "trainer.precision=float64"
    reference = train(*QUICK, precision, "hardware=cpu", "strategy=single", "model=mlp")
    run = train(
        *QUICK, precision, "model=mlp", "hardware.gpu_ids=[0,0]", "hardware.share_devices=true",
        "balancing=manual", "balancing.weights=[3,1]",
    )  # fmt: skip
    assert [device["id"] for device in run.summary["devices"]] == ["cuda:0", "cuda:0.1"]
    assert run.summary["comm"]["backend"] == "shm"
    loss, parameters = worst(run, reference, 5)
    assert max(loss, parameters) <= 1e-12


def test_a_leased_card_is_busy(train: Train) -> None:
    spec = next(card.spec for card in detect().cards if card.spec.id == "cuda:0")
    with Leases([spec], "somebody else's run"):
        with pytest.raises((ConfigError, SetupError), match="somebody else's run"):
            train(*QUICK, "hardware.gpu_ids=0")
        shared = train(*QUICK, "hardware.gpu_ids=0", "hardware.share_devices=true")
        assert shared.summary["status"] == "completed"
