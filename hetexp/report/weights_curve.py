"""Throughput over the share of one of two devices: as trained, and by the cost model."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.step import Work, step_seconds
from hetexp.hardware.links import links_of
from hetexp.plan.measured import step_of
from hetexp.report.results import CurvePoint, Variant, WeightsCurve
from hetexp.report.runs import RunRecord
from hetexp.report.variants import label_of

EMULATION = "emulation.json"
LEAST_POINTS = 3
"""Different splits that make a curve."""
STEPS = 200
"""Splits at most that the predicted curve has."""
SAME_SHARE = 1e-3

Seconds = Callable[[int], float]
"""A step's predicted time, by the samples of the curve's device."""


def curve_of(variants: Sequence[Variant], keys: Sequence[str]) -> WeightsCurve | None:
    """Return the weights curve with the most points, None if no variants differ in their split alone.

    They are of the same two devices, strategy and work; the model is not cut, since a share of a pipeline is
    one of its work. Runs that are not valid have no place on it.
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
    """Whether a run shared its batches between two devices."""
    devices = run.summary["devices"]
    shares = [device.get("share") for device in devices]
    return len(devices) == 2 and None not in shares and run.summary.get("pipeline") is None


def _balances(key: str) -> bool:
    return key.partition(".")[0] == "balancing"


def _share(variant: Variant) -> float:
    """Return what the first device took of all samples, the mean over seeds."""
    return statistics.fmean(run.summary["devices"][0]["share"] for run in variant.runs)


def _shares(variants: Sequence[Variant]) -> set[int]:
    return {round(_share(variant) / SAME_SHARE) for variant in variants}


def _predicted(runs: Sequence[RunRecord]) -> tuple[tuple[tuple[float, float], ...], str | None]:
    """Return (share, samples a second) over all splits of a batch, and the source of the figures."""
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
    """Return a step's time by the measurements of both devices, if there are any."""
    for run in runs:
        plan = run.plan
        known = (plan.calibration or {}) if plan is not None else {}
        if plan is None or known.get("exchange") is None or len(known["devices"]) != 2:
            continue
        devices = [DeviceCalibration.from_dict(device) for device in known["devices"]]
        exchange, chosen = Exchange.from_dict(known["exchange"]), plan
        return lambda n: step_of(chosen, chosen.devices, devices, exchange, (n, total - n))
    return None


def _modelled(runs: Sequence[RunRecord], total: int) -> Seconds | None:
    """Return a step's time by the figures that paced emulated devices in these runs.

    A card's pass is a straight line over its samples: two runs of different splits tell it.
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
    """Return a device's work over its samples, on the lines through its smallest and its largest pass."""
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
    """Return what paced a run of emulated devices that exchanges gradients."""
    try:
        emulation: dict[str, Any] = json.loads((run.folder / EMULATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return emulation if len(emulation.get("devices", ())) == 2 and emulation.get("buckets") else None
