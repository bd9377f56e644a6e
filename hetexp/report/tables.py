"""The comparison as CSV tables of runs, variants and points of curves; column names have the units.

Times of an emulated run are modelled seconds. Unknown values are empty.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

from hetexp.core.summary import LOST_TO
from hetexp.report import figures
from hetexp.report.curves import points
from hetexp.report.results import Comparison, Interval, Variant
from hetexp.report.runs import RunRecord

Row = dict[str, Any]


def runs_csv(comparison: Comparison) -> str:
    """Return one row a run, failed runs included."""
    completed = [_run(variant.label, run) for variant in comparison.variants for run in variant.runs]
    return _csv(completed + [_run(None, run) for run in comparison.failed])


def variants_csv(comparison: Comparison) -> str:
    """Return one row a variant, the fastest first."""
    return _csv(_variant(variant, variant is comparison.best) for variant in comparison.variants)


def curves_csv(comparison: Comparison) -> str:
    """Return one row a logged step or evaluation of each completed run."""
    rows = []
    for variant in comparison.variants:
        for run in variant.runs:
            begin = {"folder": str(run.folder), "variant": variant.label, "seed": run.seed}
            for point in points(run):
                row: Row = {
                    **begin,
                    "step": point.step,
                    "samples": point.samples,
                    "seconds": point.seconds,
                    "train_loss": point.train_loss,
                    "eval_loss": point.eval_loss,
                }
                row |= {f"share[{device}]": share for device, share in point.shares.items()}
                row |= {
                    f"samples_per_second[{device}]": speed for device, speed in point.device_speeds.items()
                }
                row |= {f"train_loss[{device}]": loss for device, loss in point.device_train_losses.items()}
                row |= {f"eval_loss[{device}]": loss for device, loss in point.device_eval_losses.items()}
                rows.append(row)
    return _csv(rows)


def _run(label: str | None, run: RunRecord) -> Row:
    row: Row = {
        "folder": str(run.folder),
        "variant": label,
        "job": run.row.job if run.row is not None else None,
        "status": run.status,
        "error": run.summary["error"],
        "seed": run.seed,
        **{key: run.setting(key) for key in ("hardware", "strategy", "balancing", "model", "data")},
        "overrides": " ".join(run.overrides),
        "emulated": run.emulated,
    }
    return row | _results(run) if run.completed else row


def _results(run: RunRecord) -> Row:
    summary = run.summary
    row: Row = {
        "time_scale": summary.get("time_scale"),
        "valid": run.valid,
        "invalid_reason": summary.get("invalid_reason"),
        "exact": run.exact,
        "fallback": run.fallback["to"] if run.fallback is not None else None,
        "num_devices": len(run.device_names),
        "global_batch_size": summary.get("global_batch"),
        "first_step": run.first_step,
        "steps": summary.get("steps"),
        "samples": summary.get("samples"),
        "wall_clock_seconds": summary.get("wall_s"),
        "samples_per_second": figures.throughput(run),
        "step_seconds": figures.step_seconds(run),
        "predicted_step_seconds": figures.predicted_step_seconds(run),
        "efficiency": summary.get("efficiency"),
        "ceiling": summary.get("ceiling"),
        **{f"lost_to_{name}": summary["lost_to"].get(name) for name in LOST_TO},
        "train_loss": figures.train_loss(run),
        **{f"eval_{name}": value for name, value in (summary["final"]["eval"] or {}).items()},
        "joules_per_sample": figures.joules_per_sample(run),
        "energy_source": figures.energy_source(run),
        "exchanged_bytes_per_step": summary["comm"].get("bytes_per_step"),
        "splits": summary.get("splits"),
        **{f"version_{name}": value for name, value in summary.get("versions", {}).items()},
    }
    for device in summary["devices"]:
        id_ = device["id"]
        speed, solo = device.get("samples_per_s"), device.get("solo_samples_per_s")
        row |= {
            f"device[{id_}]": device["name"],
            f"share[{id_}]": device.get("share"),
            f"samples_per_second[{id_}]": None if speed is None else speed * run.scale,
            f"solo_samples_per_second[{id_}]": None if solo is None else solo * run.scale,
            f"peak_memory_bytes[{id_}]": device.get("peak_memory"),
            f"energy_joules[{id_}]": device.get("energy_j"),
        }
    return row


def _variant(variant: Variant, best: bool) -> Row:
    return {
        "variant": variant.label,
        **variant.settings,
        "best": best,
        "runs": len(variant.runs),
        "seeds": " ".join(str(run.seed) for run in variant.runs),
        "emulated": variant.emulated,
        "valid": variant.valid,
        "invalid_runs": variant.num_invalid,
        "diverged_runs": variant.num_diverged,
        "exact": variant.exact,
        "fallback": variant.fallback,
        "num_devices": variant.num_devices,
        "devices": " + ".join(variant.devices),
        **_interval("samples_per_second", variant.samples_per_second),
        **_interval("step_seconds", variant.step_seconds),
        "predicted_step_seconds": variant.predicted_step_seconds,
        **_interval("efficiency", variant.efficiency),
        "ceiling": variant.ceiling,
        **{f"lost_to_{name}": (variant.lost_to or {}).get(name) for name in LOST_TO},
        **_interval("gain_over_single", variant.gain_over_single),
        "single_device": variant.single_device,
        "single_samples_per_second": variant.single_samples_per_second,
        "single_source": variant.single_source,
        **_interval("gain_over_equal", variant.gain_over_equal),
        **_interval("train_loss", variant.train_loss),
        **_interval("eval_loss", variant.eval_loss),
        **_interval("joules_per_sample", variant.joules_per_sample),
        "energy_source": variant.energy_source,
        "exchanged_bytes_per_step": variant.bytes_per_step,
    }


def _interval(name: str, value: Interval | None) -> Row:
    """Return a mean and the bounds of its 95 % confidence interval."""
    if value is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: value.mean, f"{name}_low": value.low, f"{name}_high": value.high}


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as CSV, with the columns of all rows in the order of their first occurrence."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[row.get(column) for column in columns] for row in rows])
    return text.getvalue()
