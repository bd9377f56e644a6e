"""What is known of devices before a run: all together, each by itself, or what the catalogue says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import checked

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.launch.prepare.estimates import estimate_devices, estimate_memory
from hetexp.plan import calibrations
from hetexp.plan.device_estimates import MEASURED
from hetexp.plan.planner import make_plan

JOB = (
    *("model=mlp", "model.hidden_sizes=[64]", "data=synthetic"),
    *("hardware.devices=[cpu,cpu]", "logger=none", "trainer.precision=float32", "balancing=equal"),
)


def test_what_devices_exchange_is_not_free_where_they_were_measured_in_another_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a planner would take whatever sends most over a link that it knows to be slow."""
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path))
    spec = checked(*JOB, run_dir=tmp_path / "run").accepted()
    plan = make_plan(spec)
    curve = DeviceCalibration(SpeedCurve(0.0, 1e-4), 0.5, 0.0, 0.0)
    exchange = Exchange(((1.0, 1),), other_seconds=0.125)
    told = {"devices": [curve.to_dict()] * 2, "exchange": exchange.to_dict()}
    calibrations.store(plan, spec.config, told)
    memory = estimate_memory(plan, spec)
    assert estimate_devices(plan, spec, memory).exchange == exchange
    elsewhere = estimate_devices(replace(plan, network={"gb_per_second": 0.0125}), spec, memory)
    assert set(elsewhere.sources) == {MEASURED}
    weights = sum(4 * parameter.numel() for parameter in memory.model.parameters())
    assert sum(size for _, size in elsewhere.exchange.buckets) == weights
