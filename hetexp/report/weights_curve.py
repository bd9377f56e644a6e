"""Throughput over the share of one of two devices: as trained, and by the cost model."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.step import Work, step_seconds
from hetexp.hardware.links import links_of
from hetexp.plan.calibrated_plan import step_of
from hetexp.report.results import CurvePoint, Variant, WeightsCurve
from hetexp.report.runs import RunRecord
from hetexp.report.variants import label_of

EMULATION = "emulation.json"
LEAST_POINTS = 3
"""Different splits that make a curve."""
STEPS = 200
"""Most splits of the predicted curve."""
SAME_SHARE = 1e-3

Seconds = Callable[[int], float]
"""Function from the samples of the curve's device to a step's predicted seconds."""


def curve_of(variants: Sequence[Variant], keys: Sequence[str]) -> WeightsCurve | None:
    """Return the weights curve with the most points, `None` if no variants differ in their split alone.

    Its variants have the same two devices, strategy and work. Pipelines are left out, since their shares are
    of the work, and invalid runs are left out, too.
    """
    families: dict[tuple[object, ...], list[Variant]] = {}
    for variant in variants:
        if variant.valid and variant.samples_per_second is not None and all(map(_splits, variant.runs)):
            others = tuple(value for key, value in variant.settings.items() if not _balances(key))
            names = tuple(sorted(variant.devices))
            families.setdefault((variant.emulated, names, others), []).append(variant)
    curves = [(len(_shares(family)), family) for family in families.values()]
    most, family = max(curves, key=lambda curve: curve[0], default=(0, []))
    return _curve(family, [key for key in keys if _balances(key)]) if most >= LEAST_POINTS else None


def _curve(variants: Sequence[Variant], keys: Sequence[str]) -> WeightsCurve:
    points = sorted(
        (
            CurvePoint(_share(variant), variant.samples_per_second, label_of(variant.runs[0], keys))
            for variant in variants
            if variant.samples_per_second is not None
        ),
        key=lambda point: point.share,
    )
    best = max(points, key=lambda point: point.samples_per_second.mean)
    runs = [run for variant in variants for run in variant.runs]
    first = runs[0].summary["devices"]
    predicted, source = _predicted(runs)
    return WeightsCurve(
        device=f"{first[0]['id']} · {first[0]['name']}",
        points=tuple(points),
        optimum_share=best.share,
        optimum_samples_per_second=best.samples_per_second.mean,
        predicted=predicted,
        predicted_optimum_share=max(predicted, key=lambda pair: pair[1])[0] if predicted else None,
        other_device=f"{first[1]['id']} · {first[1]['name']}",
        strategy=str(runs[0].summary["strategy"]),
        predicted_source=source,
    )


def _splits(run: RunRecord) -> bool:
    """Return whether a run shared its batches between two devices."""
    devices = run.summary["devices"]
    shares = [device.get("share") for device in devices]
    return len(devices) == 2 and None not in shares and run.summary.get("pipeline") is None


def _balances(key: str) -> bool:
    return key.partition(".")[0] == "balancing"


def _share(variant: Variant) -> float:
    """Return the first device's share of all samples, the mean over seeds."""
    return statistics.fmean(run.summary["devices"][0]["share"] for run in variant.runs)


def _shares(variants: Sequence[Variant]) -> set[int]:
    return {round(_share(variant) / SAME_SHARE) for variant in variants}


def _predicted(runs: Sequence[RunRecord]) -> tuple[tuple[tuple[float, float], ...], str | None]:
    """Return (share, samples a second) for all splits of a batch, and the source of the figures."""
    total = runs[0].summary.get("global_batch")
    if not total or not all(run.exact for run in runs):
        return (), None
    for find, source in ((_calibrated, "measured before the runs"), (_modelled, "the cards' catalogue")):
        seconds = find(runs, total)
        if seconds is not None:
            counts = sorted({round(total * k / STEPS) for k in range(STEPS + 1)})
            return tuple((count / total, total / seconds(count)) for count in counts), source
    return (), None


def _calibrated(runs: Sequence[RunRecord], total: int) -> Seconds | None:
    """Return a step's time by the calibration of both devices, if there is one."""
    for plan in (run.plan for run in runs if run.plan is not None):
        calibration = plan.calibration or {}
        if calibration.get("exchange") is None or len(calibration["devices"]) != 2:
            continue
        devices = [DeviceCalibration.from_dict(device) for device in calibration["devices"]]
        exchange, calibrated = Exchange.from_dict(calibration["exchange"]), plan
        return lambda n: step_of(calibrated, calibrated.devices, devices, exchange, (n, total - n))
    return None


def _modelled(runs: Sequence[RunRecord], total: int) -> Seconds | None:
    """Return a step's time by the figures that paced the emulated devices of these runs.

    A card's time is linear in its samples, so that two runs of different splits determine it.
    """
    emulations = [(run, emulation) for run in runs if (emulation := _emulation(run)) is not None]
    if not emulations:
        return None
    lines = []
    for place in range(2):
        passes = {}
        for run, emulation in emulations:
            work = emulation["devices"][place]["work"]
            if work is not None and len(work["forward"]) == 1:
                passes[int(run.summary["devices"][place]["local_batch"])] = work
        if len(passes) < 2:
            return None
        lines.append(_lines(passes))
    (run, emulation) = emulations[0]
    assert run.plan is not None
    links, buckets = links_of(run.plan), emulation["buckets"]

    def seconds(count: int) -> float:
        work = [line(samples) for line, samples in zip(lines, (count, total - count), strict=True)]
        return step_seconds(work, links, buckets)

    return seconds


def _lines(passes: dict[int, dict[str, Any]]) -> Callable[[int], Work]:
    """Return a device's work as a function of its samples, linear between smallest and largest microbatch."""
    low, high = min(passes), max(passes)

    def at(samples: int) -> Work:
        if not samples:
            return Work((), (), float(passes[low]["update"]))
        part = (samples - low) / (high - low)
        forward, backward = (
            passes[low][phase][0] + part * (passes[high][phase][0] - passes[low][phase][0])
            for phase in ("forward", "backward")
        )
        return Work((forward,), (backward,), float(passes[low]["update"]))

    return at


def _emulation(run: RunRecord) -> dict[str, Any] | None:
    """Return the pacing figures of a run of two emulated devices that exchange gradients."""
    try:
        emulation: dict[str, Any] = json.loads((run.folder / EMULATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return emulation if len(emulation.get("devices", ())) == 2 and emulation.get("buckets") else None
