"""A backend from outside the package: found, listed and trained on without a changed line of hetexp."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched import TINY, TRAIN

BACKEND = '''
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from hetexp.core.device import DeviceSpec
from hetexp.hardware.backend import Backend
from hetexp.hardware.detection.detected import DetectedCard, Reading


class ImaginaryBackend(Backend):
    """One card of an imaginary maker; the CPU does its work."""

    name = "imaginary"
    vendor = "acme"

    @classmethod
    def cards(cls, machine, on_bus):
        spec = DeviceSpec(
            id="imaginary:0",
            backend="my_backend.ImaginaryBackend",
            index=0,
            name="Acme Imaginary 9000",
            vendor=cls.vendor,
            memory_bytes=2**30,
            uuid="ACME-1234",
            precisions=("float64", "float32"),
        )
        return [DetectedCard(spec, Reading(memory_free_bytes=2**30))]

    @classmethod
    def environment(cls, spec):
        return {"ACME_VISIBLE_CARDS": str(spec.index)}

    def torch_device(self):
        return torch.device("cpu")

    def mark(self):
        return time.perf_counter()

    def seconds_between(self, start, end):
        return end - start

    def synchronize(self):
        return None

    def peak_memory_bytes(self):
        return 1

    def begin_step(self, step):
        with Path("steps.txt").open("a") as file:
            file.write(f"{step} ")


class Unfinished(Backend):
    name = "unfinished"
    vendor = "acme"


class NoBackend:
    pass


class SecondCuda(ImaginaryBackend):
    name = "cuda"
'''
PATH = "my_backend.ImaginaryBackend"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_backend.py").write_text(BACKEND)
    return tmp_path


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(TRAIN),
        *TINY,
        "trainer.max_steps=5",
        "balancing=equal",
        f"hydra.run.dir={folder / 'run'}",
    ]
    return subprocess.run(
        [*command, *overrides], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def gpus(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hetexp.cli", "gpus", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_trains_beside_the_cpu(folder: Path) -> None:
    done = train(folder, f"hardware.backends=[{PATH}]", "hardware.devices=[imaginary:0,cpu]", "strategy=ddp")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert [device["id"] for device in summary["devices"]] == ["imaginary:0", "cpu:0"]
    assert [device["backend"] for device in summary["devices"]] == [PATH, "cpu"]
    assert summary["steps"] == 5
    assert summary["status"] == "completed"
    steps = (folder / "steps.txt").read_text().split()
    assert steps[-5:] == ["0", "1", "2", "3", "4"]


def test_is_slowed_and_fails_as_any_device(folder: Path) -> None:
    done = train(
        folder,
        f"hardware.backends=[{PATH}]",
        "hardware.devices=[{device: imaginary:0, slow: 1.5, memory_gib: 0.5}, cpu]",
        "fault.events=[{kind: death, device: imaginary:0, at_step: 2}]",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["emulated"] is True
    assert summary["steps"] == 5
    assert [(failure["device"], failure["kind"]) for failure in summary["failures"]] == [
        ("imaginary:0", "SIGKILL")
    ]


def test_is_listed_with_the_other_cards(folder: Path) -> None:
    done = gpus(folder, "--json", "--backend", PATH)
    assert done.returncode == 0, done.stderr
    card = next(card for card in json.loads(done.stdout) if card["device"] == "imaginary:0")
    assert (card["vendor"], card["name"], card["state"]) == ("acme", "Acme Imaginary 9000", "available")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("my_backend.Imaginary", "must be the dotted path of a subclass of hetexp.hardware.backend.Backend"),
        ("my_bakend.ImaginaryBackend", "It cannot be imported: No module named 'my_bakend'."),
        ("my_backend.NoBackend", "but is 'my_backend.NoBackend' instead."),
        ("my_backend.Unfinished", "that defines environment, mark, peak_memory_bytes, seconds_between"),
        ("my_backend.SecondCuda", "whose `name` is free (`cuda` is that of cuda)"),
    ],
)
def test_a_wrong_path_is_refused(folder: Path, path: str, problem: str) -> None:
    done = train(folder, f"hardware.backends=[{path}]", "hardware.devices=[imaginary:0,cpu]")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "`hardware.backends[0]` must be" in done.stderr
    assert problem in done.stderr
    listed = gpus(folder, "--backend", path)
    assert listed.returncode == 2
    assert "`--backend[0]` must be" in listed.stderr
    assert problem in listed.stderr
