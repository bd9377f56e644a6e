"""Who is using a card: only a process that computes there, or memory that somebody out of sight holds."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hetexp.core.device import GIB, DeviceSpec
from hetexp.hardware.detection.busy import who_is_busy
from hetexp.hardware.detection.detected import DetectedCard, Process, Reading
from hetexp.hardware.detection.machine import Machine

SPEC = DeviceSpec("cuda:0", "cuda", 0, "RTX 3090", "nvidia", memory_bytes=24 * GIB, uuid="GPU-busy-test")


def busy(
    tmp_path: Path, reading: Reading, threshold_mib: float = 256.0, spec: DeviceSpec = SPEC
) -> str | None:
    comm = tmp_path / "proc" / "7" / "comm"
    comm.parent.mkdir(parents=True, exist_ok=True)
    comm.write_text("python\n")
    return who_is_busy(Machine(root=tmp_path), threshold_mib)(DetectedCard(spec, reading))


@pytest.mark.parametrize(
    ("processes", "free", "told"),
    [
        ((), 24 * GIB, None),
        (None, None, None),
        ((Process(7, 4 * GIB),), 20 * GIB, "python (process 7) holds 4.0 GiB"),
        ((Process(8, 4 * GIB),), 20 * GIB, "process 8 holds 4.0 GiB"),
        ((Process(7, 100 * 2**20),), 23 * GIB, None),  # below the threshold
        ((Process(7, 12 * GIB, computes=False),), 12 * GIB, None),  # a desktop
        ((Process(7, None),), 20 * GIB, "python (process 7) computes on it"),
        ((Process(7, None, computes=False),), 4 * GIB, None),
        ((), 20 * GIB, None),  # a little is the driver's own
        ((), 12 * GIB, "processes that are not visible from here hold 12.0 GiB"),
        (None, 2 * GIB, "processes that are not visible from here hold 22.0 GiB"),
    ],
)
def test_who(
    tmp_path: Path, processes: tuple[Process, ...] | None, free: int | None, told: str | None
) -> None:
    assert busy(tmp_path, Reading(memory_free_bytes=free, processes=processes)) == told


def test_the_threshold_is_the_persons(tmp_path: Path) -> None:
    reading = Reading(memory_free_bytes=20 * GIB, processes=(Process(7, 4 * GIB),))
    assert busy(tmp_path, reading, threshold_mib=5000) is None


def test_memory_of_the_host_is_not_the_cards(tmp_path: Path) -> None:
    reading = Reading(memory_free_bytes=2 * GIB, processes=())
    assert busy(tmp_path, reading, spec=replace(SPEC, unified_memory=True)) is None


def test_two_processes(tmp_path: Path) -> None:
    reading = Reading(processes=(Process(7, 4 * GIB), Process(9, 2 * GIB)))
    assert busy(tmp_path, reading) == "python (process 7) holds 4.0 GiB and process 9 holds 2.0 GiB"


def test_what_this_process_holds_is_nobody_elses(tmp_path: Path) -> None:
    mine = Process(os.getpid(), 4 * GIB)
    assert busy(tmp_path, Reading(memory_free_bytes=20 * GIB, processes=(mine,))) is None
    told = busy(tmp_path, Reading(memory_free_bytes=16 * GIB, processes=(mine, Process(7, 4 * GIB))))
    assert told == "python (process 7) holds 4.0 GiB"
