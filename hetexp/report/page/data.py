"""The page's curves and splits as plain values, and the comparison as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from hetexp.report.curves import points
from hetexp.report.figures import throughput
from hetexp.report.results import Comparison, Interval, Point, Variant
from hetexp.report.runs import RunRecord

MOST_DRAWN = 12
"""Most variants in a chart: further ones would have no distinct colour."""
MOST_POINTS = 200
"""Most points of a curve."""
CHANGED = 0.005
"""A share that moves by less during a run is drawn as constant."""


@dataclass(frozen=True)
class Curve:
    """A loss over training: the mean over seeds, at the steps that all seeds logged."""

    steps: tuple[int, ...]
    samples: tuple[float, ...]
    seconds: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """Lowest of the seeds; empty for a single seed."""
    high: tuple[float, ...]


@dataclass(frozen=True)
class Shares:
    """The devices' shares of a run, over its logged steps."""

    steps: tuple[int, ...]
    by_device: dict[str, tuple[float, ...]]
    """By device, with the names of `device_names`."""

    @property
    def changes(self) -> bool:
        """Whether a share moved by more than `CHANGED`."""
        return any(max(shares) - min(shares) > CHANGED for shares in self.by_device.values())


@dataclass(frozen=True)
class Drawn:
    """A variant that charts show."""

    variant: Variant
    number: int
    """Its number in the page's table, 1 for the fastest."""
    colour: str
    """Class of its colour in every chart."""
    train: Curve | None
    eval: Curve | None
    shares: Shares | None

    @property
    def name(self) -> str:
        """Its label in charts, which marks an invalid variant."""
        return self.variant.label if self.variant.valid else f"{self.variant.label} (invalid)"


def drawn(comparison: Comparison) -> list[Drawn]:
    """Return the variants that charts show: the fastest, and always the best."""
    variants = enumerate(comparison.variants, 1)
    numbered = [(n, variant) for n, variant in variants if variant.samples_per_second is not None]
    shown = numbered[:MOST_DRAWN]
    best = next(((n, variant) for n, variant in numbered if variant is comparison.best), None)
    if best is not None and best not in shown:
        shown[-1:] = [best]
    return [_drawn(variant, number, place) for place, (number, variant) in enumerate(shown, 1)]


def _drawn(variant: Variant, number: int, place: int) -> Drawn:
    logged = [points(run) for run in variant.runs]
    return Drawn(
        variant,
        number,
        f"v{place}",
        _loss_curve([[(point, point.train_loss) for point in run] for run in logged]),
        _loss_curve([[(point, point.eval_loss) for point in run] for run in logged]),
        _shares(variant.runs[0], logged[0]) if logged else None,
    )


def _loss_curve(logged: Sequence[Sequence[tuple[Point, float | None]]]) -> Curve | None:
    """Return the curve of a variant whose seeds logged these losses; `None` if none was logged.

    Losses that are not finite are left out, so that a diverged curve ends.
    """
    by_run = [
        {point.step: (point, loss) for point, loss in run if loss is not None and math.isfinite(loss)}
        for run in logged
    ]
    by_run = [losses_by_step for losses_by_step in by_run if losses_by_step]
    if not by_run:
        return None
    steps = thinned([step for step in by_run[0] if all(step in losses_by_step for losses_by_step in by_run)])
    if not steps:
        return None
    at = [[losses_by_step[step] for losses_by_step in by_run] for step in steps]
    losses = [[loss for _, loss in pairs] for pairs in at]
    several = len(by_run) > 1
    return Curve(
        tuple(steps),
        tuple(statistics.fmean(point.samples for point, _ in pairs) for pairs in at),
        tuple(statistics.fmean(point.seconds for point, _ in pairs) for pairs in at),
        tuple(statistics.fmean(values) for values in losses),
        tuple(min(values) for values in losses) if several else (),
        tuple(max(values) for values in losses) if several else (),
    )


def _shares(run: RunRecord, logged: Sequence[Point]) -> Shares | None:
    """Return the split of a run over its steps; `None` for one device, or if no split was logged."""
    names = device_names(run)
    split = thinned([point for point in logged if len(point.shares) > 1 and set(point.shares) <= set(names)])
    if not split:
        return None
    devices = [device for device in names if any(device in point.shares for point in split)]
    return Shares(
        tuple(point.step for point in split),
        {names[device]: tuple(point.shares.get(device, 0.0) for point in split) for device in devices},
    )


def device_names(run: RunRecord) -> dict[str, str]:
    """Return the names of a run's devices by id; equal names get their ids."""
    devices = run.summary.get("devices") or []
    names = [device["name"] for device in devices]
    return {
        device["id"]: device["name"]
        if names.count(device["name"]) == 1
        else f"{device['name']} {device['id']}"
        for device in devices
    }


def profile_names(comparison: Comparison) -> list[str]:
    """Return the names of the profiled devices, as `device_names` does for a run."""
    parts = [profile.device.partition(" · ") for profile in comparison.profiles]
    names = [name or id_ for id_, _, name in parts]
    return [
        name if names.count(name) == 1 else f"{name} {id_}"
        for name, (id_, _, _) in zip(names, parts, strict=True)
    ]


def thinned(values: Sequence[Any]) -> list[Any]:
    """Return at most `MOST_POINTS` of the values, evenly spaced, with the first and the last."""
    last = len(values) - 1
    if last < MOST_POINTS:
        return list(values)
    return [values[round(place * last / (MOST_POINTS - 1))] for place in range(MOST_POINTS)]


def plain(comparison: Comparison, shown: Sequence[Drawn]) -> dict[str, Any]:
    """Return the comparison for JSON: all figures of all variants, and the drawn curves."""
    by_number = {shown_variant.number: shown_variant for shown_variant in shown}
    variants = []
    for number, variant in enumerate(comparison.variants, 1):
        shown_variant = by_number.get(number)
        curves = None if shown_variant is None else _plain_curves(shown_variant)
        variants.append(_plain_variant(variant) | {"number": number, "drawn": curves})
    best = comparison.best
    return {
        "title": comparison.title,
        "answer": comparison.answer,
        "keys": list(comparison.keys),
        "emulated": comparison.emulated,
        "best": None if best is None else best.label,
        "single_samples_per_second": comparison.single_samples_per_second,
        "single_source": comparison.single_source,
        "variants": variants,
        "failed": [_plain_run(run) for run in comparison.failed],
        "curve": None if comparison.curve is None else asdict(comparison.curve),
        "profiles": [asdict(profile) for profile in comparison.profiles],
        "notes": list(comparison.notes),
        "common": dict(comparison.common),
    }


def _plain_curves(drawn: Drawn) -> dict[str, Any]:
    curves = {name: getattr(drawn, name) for name in ("train", "eval", "shares")}
    plain_curves = {name: None if curve is None else asdict(curve) for name, curve in curves.items()}
    return plain_curves | {"colour": drawn.colour}


def _plain_variant(variant: Variant) -> dict[str, Any]:
    names = [field.name for field in fields(variant) if field.name != "runs"]
    values = {name: getattr(variant, name) for name in names}
    plain = {name: asdict(v) if isinstance(v, Interval) else v for name, v in values.items()}
    return plain | {"runs": [_plain_run(run) for run in variant.runs]}


def _plain_run(run: RunRecord) -> dict[str, Any]:
    return {
        "run_id": run.summary.get("run_id"),
        "seed": run.seed,
        "folder": str(run.folder),
        "status": run.status,
        "error": run.summary.get("error"),
        "overrides": list(run.overrides),
        "samples_per_second": throughput(run),
    }


def as_json(values: dict[str, Any]) -> str:
    """Return JSON for a script element, escaped so that it cannot end the element or begin a comment."""
    text = json.dumps(_finite(values), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """Return the value with `None` instead of NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
