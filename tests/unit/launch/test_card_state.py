"""After a failure: does the driver say that the card itself is gone?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support import spec_on, unbuilt_config

from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.inventory import Inventory
from hetexp.launch import launcher
from hetexp.launch.processes.failure import RankFailure

CARD = DeviceSpec("cuda:1", "cuda", 1, "RTX 3090", "nvidia", uuid="GPU-1", pci="0000:03:00.0")
OTHER = DetectedCard(replace(CARD, id="cuda:0", uuid="GPU-0", pci="0000:01:00.0"), lost="GPU is lost")


@pytest.mark.parametrize(
    ("cards", "state"),
    [
        ([OTHER, DetectedCard(CARD)], None),
        ([OTHER, DetectedCard(CARD, lost="GPU is lost")], "lost (GPU is lost)"),
        # A driver that is gone tells no UUID; the address is the same.
        (
            [OTHER, DetectedCard(replace(CARD, uuid=None), undriven="nvidia is not loaded")],
            "nvidia is not loaded",
        ),
        ([OTHER], "no longer in the machine's list of cards"),
    ],
)
def test_the_card_itself(
    monkeypatch: pytest.MonkeyPatch, cards: list[DetectedCard], state: str | None
) -> None:
    monkeypatch.setattr(launcher, "detect", lambda builds: Inventory(cards))
    assert launcher.card_state(CARD) == state


def test_a_cpu_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "detect", lambda builds: pytest.fail("nobody was to be asked"))
    assert launcher.card_state(CpuBackend.describe(0)) is None


def test_a_run_that_a_lost_card_ended_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    plan = Plan(
        run_id="run",
        run_dir=str(tmp_path),
        name="run",
        group=None,
        config={"trainer": {"seed": 0, "global_batch_size": 8}},
        devices=(replace(CARD, id="cuda:0", uuid="GPU-0"), CARD),
        strategy="ddp",
        shares=(0.5, 0.5),
        local_batch_sizes=(4, 4),
        collective_backend="nccl",
        threads=(1, 1),
        precisions=("float32", "float32"),
    )
    monkeypatch.setattr(
        launcher, "detect", lambda builds: Inventory([DetectedCard(CARD, lost="GPU is lost")])
    )
    run = launcher._Run(plan, spec_on(plan.devices, unbuilt_config()), Console(width=200), store=None)
    text = "RuntimeError: CUDA error: unspecified launch failure"
    run.failures = [RankFailure(1, "RuntimeError", text, step=10, time=1.0)]
    summary = run.conclude([])
    assert summary["status"] == "failed"
    assert summary["failures"][0]["device"] == "cuda:1"
    screen = capsys.readouterr().out
    assert "rank 1, cuda:1 (RTX 3090), failed at step 10" in screen
    assert "cuda:1 (RTX 3090) is lost (GPU is lost). It is not chosen again while that is so." in screen
