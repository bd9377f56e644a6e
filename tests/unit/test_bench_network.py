"""The lab of network namespaces, and what its benchmark makes of runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from bench_network import row, table
from network_lab.boxes import PREFIX, Box, boxes, problem
from network_lab.jobs import Ran


def ran(losses: list[float], sent: int) -> Ran:
    summary = {"exact": True, "final": {"eval": {"loss": losses[-1]}}}
    return Ran(summary, losses, 0.1, sent, "")


def test_a_row_compares_with_ddp_and_with_one_device() -> None:
    one = row(100.0, "local_sgd", ran([2.0, 1.01], 10), ran([2.0, 1.0], 300), ran([2.0, 1.0], 0))
    assert one["fewer_bytes"] == 30
    assert one["loss_over_ddp"] == pytest.approx(0.01)
    assert one["from_single"] == pytest.approx(0.01)
    text = table({"rows": [one]})
    assert "| 100 Mbit/s | local_sgd | 0.1000 | 0.0 | 30.0 | +1.00% | 1.0e-02 |" in text


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
