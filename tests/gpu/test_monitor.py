"""Samples of real cards agree with `nvidia-smi`, which asks the same driver in its own way."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from hetexp.monitor.sample import Sample
from hetexp.monitor.sampler import Sampler
from hetexp.monitor.store import Store

FIELDS = (
    "pci.bus_id",
    "memory.total",
    "memory.free",
    "temperature.gpu",
    "power.draw",
    "enforced.power.limit",
    "clocks.sm",
    "clocks.mem",
    "utilization.gpu",
    "fan.speed",
)
pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="nvidia-smi is not there")
BUSY_SECONDS = 4.0


def nvidia_smi() -> dict[str, dict[str, float | None]]:
    """Return what it tells of each card, by the bus address."""
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    found = {}
    for line in lines:
        address, *values = (word.strip() for word in line.split(","))
        numbers = [float(v) if v.replace(".", "", 1).isdigit() else None for v in values]
        found[address.lower()[-12:]] = dict(zip(FIELDS[1:], numbers, strict=True))
    return found


def keep_busy(until: threading.Event) -> None:
    a = torch.randn(2**26, device="cuda")
    while not until.is_set():
        for _ in range(200):
            a.mul_(1.5).clamp_(-1, 1)
        torch.cuda.synchronize()


def near(one: float | None, other: float | None, absolute: float, relative: float = 0.0) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= max(absolute, relative * abs(other))


def check(samples: list[Sample], told: dict[str, dict[str, float | None]]) -> None:
    cards = [one for one in samples if one.device.backend == "cuda" and one.state == "ok"]
    assert len(cards) == len(told)
    for card in cards:
        smi = told[(card.device.pci or "")[-12:]]
        print(card, smi, sep="\n")
        total, used = card.memory_total_bytes, card.memory_used_bytes
        assert total is not None
        assert used is not None
        assert near(total / 2**20, smi["memory.total"], 2)
        assert near((total - used) / 2**20, smi["memory.free"], 64)
        assert near(card.temperature_celsius, smi["temperature.gpu"], 4)
        assert near(card.power_limit_watts, smi["enforced.power.limit"], 1)
        assert near(card.power_watts, smi["power.draw"], 40, 0.25)
        assert near(card.clock_mhz, smi["clocks.sm"], 200, 0.15)
        assert near(card.memory_clock_mhz, smi["clocks.mem"], 50, 0.05)
        assert near(card.fan and 100 * card.fan, smi["fan.speed"], 10)
        assert card.utilisation is not None
        assert near(100 * card.utilisation, smi["utilization.gpu"], 30)


def test_a_busy_card_is_told_as_nvidia_smi_tells_it(tmp_path: Path) -> None:
    ending = threading.Event()
    work = threading.Thread(target=keep_busy, args=(ending,))
    work.start()
    store = Store(f"sqlite:///{tmp_path / 'monitor.sqlite'}")
    try:
        with Sampler() as sampler:
            used = 0.0
            began = time.time()
            moments = 0
            while time.time() - began < BUSY_SECONDS:
                before = time.thread_time()
                samples = sampler.sample()
                used += time.thread_time() - before
                store.write(samples, round(time.time(), 3))
                moments += 1
                ending.wait(0.5)
            check(sampler.sample(), nvidia_smi())
        (busiest, *_) = sorted(
            (row["utilisation"] or 0.0 for row in store.latest() if row["backend"] == "cuda"), reverse=True
        )
        assert busiest > 0.5
        print(f"{moments} moments, {1000 * used / moments:.2f} ms of the sampling thread each")
    finally:
        ending.set()
        work.join()
        store.close()
