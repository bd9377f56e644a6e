"""The lab of network namespaces, and what its benchmark makes of runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from bench_network import loss_row, loss_table, speed_row, speed_table
from network_lab.boxes import PREFIX, Box, boxes, problem
from network_lab.jobs import Ran


def ran(losses: list[float], sent: int, seconds: float = 0.1) -> Ran:
    return Ran({"final": {"eval": {"loss": losses[-1]}}}, losses, seconds, sent)


def test_a_row_compares_with_one_device_and_with_the_prediction() -> None:
    where, exact = (2, 2, 100.0), ran([2.0, 1.0], 0)
    slow = speed_row(where, "ddp", ran([2.0, 1.01], 5_000_000, 0.3), exact, 0.2)
    quick = speed_row(where, "pipeline", ran([2.0, 1.0], 10, 0.1), exact, 0.1)
    assert slow["from_single"] == pytest.approx(0.01)
    text = speed_table([slow, quick])
    assert "| 2 × 2 | 100 Mbit/s | ddp | 0.2000 | 0.3000 | 1.50 | 5.0 | 1.0e-02 |" in text
    assert "2 boxes of 2, 100 Mbit/s: pipeline < ddp, as predicted." in text
    swapped = speed_table([slow | {"predicted_seconds": 0.01}, quick])
    assert "pipeline < ddp, predicted was ddp < pipeline." in swapped


def test_a_loss_is_compared_with_ddps() -> None:
    one = loss_row(1, "local_sgd", ran([2.0, 1.01], 10), ran([2.0, 1.0], 300))
    assert one["fewer_bytes"] == 30
    assert "| 2 × 1 | local_sgd | 0.1000 | 0.0 | 30.0 | 1.0100 | +1.00% |" in loss_table([one])


def listed() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(problem() is not None, reason=f"{problem()}")
@pytest.mark.skipif(problem() is None and PREFIX in listed(), reason="a lab is in use")
def test_boxes_reach_each_other_and_are_removed() -> None:
    with boxes(2, 100.0) as (one, other):
        assert isinstance(one, Box)
        before = one.sent_bytes()
        command = one.command("bash", "-c", f"exec 3<>/dev/tcp/{other.address}/9")
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "refused" in refused.stderr  # the way is there, and nobody listens
        assert one.sent_bytes() > before
        left = subprocess.Popen(one.command("sleep", "600"))
    assert left.wait(10) == -9
    assert PREFIX not in listed()
    assert not Path(f"/sys/class/net/{PREFIX}").exists()
