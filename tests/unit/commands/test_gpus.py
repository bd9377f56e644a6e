"""`hetexp gpus`: every card with its state, unknown values as such, and no torch in the process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from hetexp.cli import main
from hetexp.commands import gpus
from hetexp.core.device import GIB, DeviceSpec
from hetexp.hardware.backends.cpu import cpu_count
from hetexp.hardware.detection.detected import DetectedCard, Process, Reading
from hetexp.hardware.detection.inventory import Inventory

RTX = DetectedCard(
    DeviceSpec(
        "cuda:0",
        "cuda",
        0,
        "NVIDIA GeForce RTX 3090",
        "nvidia",
        memory_bytes=24 * GIB,
        uuid="GPU-8932f937",
        number=0,
        pci="0000:01:00.0",
        precisions=("float32", "bfloat16"),
    ),
    Reading(
        memory_free_bytes=20 * GIB,
        utilisation=0.0,
        temperature_celsius=41.0,
        power_watts=30.4,
        power_limit_watts=350.0,
        processes=(Process(7, 4 * GIB),),
    ),
    busy="python (process 7) holds 4.0 GiB",
)
ARC = DetectedCard(
    DeviceSpec("xpu:0", "xpu", 0, "Intel Arc A770 Graphics", "intel", number=1, pci="0000:03:00.0"),
    Reading(throttled=("too hot",)),
    unusable="torch 2.13.0+cpu of this interpreter is not built for XPU; run: hetexp env create xpu",
)
LOST = replace(
    RTX, spec=replace(RTX.spec, id="cuda:1", number=2), reading=Reading(), busy=None, lost="GPU is lost"
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Inventory:
    inventory = Inventory([RTX, ARC, LOST])
    monkeypatch.setattr(gpus, "inspect", lambda: inventory)
    return inventory


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["gpus", *words]) == 0
    return capsys.readouterr().out


def test_json_has_null_where_nothing_is_known(machine: Inventory, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third, cpu = json.loads(shown(capsys, "--json"))
    assert (first["id"], first["device"], first["state"]) == (0, "cuda:0", "busy")
    assert first["memory_free_bytes"] == 20 * GIB
    assert first["utilisation"] == 0.0
    assert first["processes"] == [{"pid": 7, "memory_bytes": 4 * GIB, "computes": True}]
    assert first["python"] == sys.executable
    assert second["state"] == "unusable"
    assert "hetexp env create xpu" in second["why_not"]
    assert second["throttled"] == ["too hot"]
    for key in ("memory_bytes", "utilisation", "power_watts", "temperature_celsius", "processes", "python"):
        assert second[key] is None
    assert third["state"] == "lost"
    assert third["why_not"] == "lost: GPU is lost"
    assert third["python"] is None
    # The processor has no number among the cards.
    assert (cpu["id"], cpu["device"], cpu["vendor"], cpu["state"]) == (None, "cpu:0", "cpu", "available")
    assert 0 < cpu["memory_free_bytes"] <= cpu["memory_bytes"]


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_shows_every_card_and_every_reason(
    machine: Inventory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = " ".join(shown(capsys).split())
    for part in ("cuda:0", "xpu:0", "cuda:1", "n/a", "busy", "unusable", "lost", "GPU is lost", "too hot"):
        assert part in text
    assert "python (process 7) holds 4.0 GiB" in text
    assert "hetexp env create xpu" in text
    assert ("350 W" in text) == (width == 140)


def test_a_machine_without_cards(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpus, "inspect", Inventory)
    text = shown(capsys)
    assert "No accelerator in this machine" in text
    assert f"{cpu_count()} cores" in " ".join(text.split())
    assert [device["device"] for device in json.loads(shown(capsys, "--json"))] == ["cpu:0"]


@pytest.mark.parametrize("words", [["--watch", "0"], ["--watch", "x"], ["--nonsense"], ["more"]])
def test_wrong_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["gpus", *words])
    assert ended.value.code == 2
    assert "hetexp gpus" in capsys.readouterr().err


def test_watch_looks_again_and_ends_quietly(
    machine: Inventory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    out = shown(capsys, "--watch", "0.5", "--json")
    assert pauses == [0.5] * 3
    decoder, documents = json.JSONDecoder(), []
    while out.strip():
        document, end = decoder.raw_decode(out.lstrip())
        documents.append(document)
        out = out.lstrip()[end:]
    assert len(documents) == 3
    assert documents[0] == documents[2]


def test_this_machine_is_listed_without_torch() -> None:
    code = (
        "import json, sys\n"
        "from hetexp.cli import main\n"
        "assert main(['gpus', '--json']) == 0\n"
        "loaded = sorted(set(sys.modules) & {'torch', 'numpy', 'pydantic', 'hydra'})\n"
        "assert not loaded, loaded\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    cards: list[dict[str, Any]] = json.loads(answer.stdout)
    assert [card["id"] for card in cards] == [*range(len(cards) - 1), None]  # the last is the processor
