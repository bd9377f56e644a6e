"""The weights curve of two devices: points as trained, the cost model's curve, and both optima."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import BATCH, FAST, SLOW, write_run

from hetexp.core.cost.calibration import DeviceCalibration, Exchange, joint_seconds
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel, Links, Work, step_seconds
from hetexp.core.device import DeviceSpec
from hetexp.hardware.links import build_links
from hetexp.report.comparison import compare
from hetexp.report.results import WeightsCurve
from hetexp.report.runs import read_runs

COUNTS = (16, 32, 44, 48, 56)
BUCKETS = [(0.5, 200_000), (1.0, 300_000)]
DEVICES = [
    DeviceCalibration(SpeedCurve(2e-4, seconds, update_seconds=1e-5), 0.5, 0.0, 0.0)
    for seconds in (1e-5, 3e-5)
]


def works(count: int) -> list[Work]:
    return [d.curve.work(n, 0.5) for d, n in zip(DEVICES, (count, BATCH - count), strict=True)]


def trained(folder: Path, count: int, seconds: float, **run: Any) -> Path:
    """Write a run that gave the first device so many samples of each batch."""
    shares = (count / BATCH, 1 - count / BATCH)
    made = write_run(
        folder,
        speed=BATCH / seconds,
        shares=shares,
        balancing="manual",
        overrides=[f"balancing.weights={count}"],
        **run,
    )
    path = made / "summary.json"
    summary = json.loads(path.read_text())
    for device, local in zip(summary["devices"], (count, BATCH - count), strict=True):
        device["local_batch"] = local
    path.write_text(json.dumps(summary))
    return made


def curve_of(folder: Path) -> WeightsCurve | None:
    return compare(read_runs([folder]), "curve").curve


def modelled_seconds(count: int) -> float:
    specs = [DeviceSpec("emulated:0", "emulated", 0, FAST, "nvidia", card="rtx_3090")]
    specs.append(DeviceSpec("emulated:1", "emulated", 1, SLOW, "intel", card="arc_a770"))
    return step_seconds(works(count), build_links(specs), BUCKETS)


def test_points_lie_on_the_curve_that_the_emulated_cards_were_paced_by(tmp_path: Path) -> None:
    for count in COUNTS:
        made = trained(tmp_path / f"{count}", count, modelled_seconds(count))
        work = [{"forward": w.forward, "backward": w.backward, "update": w.update} for w in works(count)]
        devices = [{"id": f"emulated:{place}", "work": one} for place, one in enumerate(work)]
        (made / "emulation.json").write_text(json.dumps({"buckets": BUCKETS, "devices": devices}))
    curve = curve_of(tmp_path)
    assert curve is not None
    assert [point.share for point in curve.points] == pytest.approx([count / BATCH for count in COUNTS])
    assert curve.device == f"emulated:0 · {FAST} (emulated)"
    assert curve.predicted_source == "the cards' catalogue"
    predicted = dict(curve.predicted)
    assert len(predicted) == BATCH + 1
    for point in curve.points:  # what was trained is what is predicted, since both are the model here
        assert predicted[point.share] == pytest.approx(point.samples_per_second.mean, rel=1e-9)
    best = min(range(BATCH + 1), key=modelled_seconds)
    assert curve.predicted_optimum_share == best / BATCH
    assert curve.optimum_share == min(COUNTS, key=modelled_seconds) / BATCH


def test_a_calibration_predicts_the_curve_of_real_devices(tmp_path: Path) -> None:
    exchange = Exchange(((1.0, 1000),), Channel(1e-4, 1e9), data_seconds=1e-5, other_seconds=2e-5)
    links = Links((Channel(), Channel()), (Channel(1e-4, 1e9),), staged=False)
    told = {
        "devices": [one.to_dict() for one in DEVICES],
        "exchange": exchange.to_dict(),
        "predicted_step_seconds": 1.0,
    }
    for count in COUNTS:
        trained(tmp_path / f"{count}", count, 1.0 + abs(count - 44), scale=None, plan={"calibration": told})
    curve = curve_of(tmp_path)
    assert curve is not None
    assert curve.predicted_source == "measured before the runs"
    assert curve.optimum_share == pytest.approx(44 / BATCH)
    assert curve.optimum_samples_per_second == pytest.approx(BATCH)
    expected = [
        (n / BATCH, BATCH / joint_seconds(DEVICES, (n, BATCH - n), links, exchange)) for n in range(BATCH + 1)
    ]
    assert [value for pair in curve.predicted for value in pair] == pytest.approx(
        [value for pair in expected for value in pair]
    )


@pytest.mark.parametrize(
    "change",
    [{"valid": False}, {"pipeline": []}, {"names": [FAST, SLOW, FAST]}],
    ids=["invalid", "cut", "three"],
)
def test_runs_that_make_no_curve(tmp_path: Path, change: dict[str, Any]) -> None:
    for number, count in enumerate(COUNTS):
        shares = [count / BATCH, 1 - count / BATCH, 0.0][: len(change.get("names", (FAST, SLOW)))]
        overrides = [f"balancing.weights={count}"]
        write_run(tmp_path / f"{number}", shares=shares, overrides=overrides, **change)
    assert curve_of(tmp_path) is None


def test_two_splits_are_no_curve_and_nothing_is_predicted_of_what_nobody_knows(tmp_path: Path) -> None:
    for count in COUNTS[:2]:
        trained(tmp_path / f"{count}", count, 1.0)
    assert curve_of(tmp_path) is None
    trained(tmp_path / "more", COUNTS[2], 1.0)
    curve = curve_of(tmp_path)
    assert curve is not None
    assert curve.predicted == ()
    assert curve.predicted_optimum_share is None
