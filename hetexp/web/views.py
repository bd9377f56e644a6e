"""Rows of the database and files of run folders, as the API shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hetexp.core.files import read_json
from hetexp.core.lines import last_rows
from hetexp.core.plan import Plan
from hetexp.core.summary import modelled, summary_problem
from hetexp.monitor.history import Series
from hetexp.monitor.sample import host_name
from hetexp.monitor.store import ACTIVE
from hetexp.web import schemas
from hetexp.web.job import log_tail, read_job

METRICS = "metrics.jsonl"
TAIL_LINES = 200
_TAIL_BYTES = 256 * 1024
_MOST_BYTES = 64 * 1024 * 1024
"""Largest part that is read of a run's metrics, from the end."""
_SHOWN = (
    "samples_per_second",
    "step_seconds",
    "imbalance",
    "train/learning_rate",
    "train/epoch",
    "eval/loss",
    "eval/accuracy",
)
_COLUMNS = {
    "index": "number",
    "run": "run_id",
    "temperature_c": "temperature_celsius",
    "power_w": "power_watts",
    "power_limit_w": "power_limit_watts",
    "throttle": "throttled",
}
"""Fields of the API's devices → columns of the database, if the names differ."""
Row = dict[str, Any]


def device(row: Row) -> Row:
    """Return a device and its newest sample, as `GET /system/gpus` shows them.

    Args:
        row: of `hetexp.monitor.store.with_ages`.
    """
    here = row["host"] == host_name()
    total, used, users = row["memory_total_bytes"], row["memory_used_bytes"], row["users"]
    shown = {name: row.get(_COLUMNS.get(name, name)) for name in schemas.Device.model_fields}
    return shown | {
        "id": row["device"],
        "here": here,
        "environment": None,
        "lost": row["state"] == "lost",
        "selectable": here and row["state"] == "ok" and not row["emulated"],
        "memory_free_bytes": total - used if total is not None and used is not None else None,
        "busy": bool(users),
        "busy_by": users[0] if users else None,
    }


def series(samples: Series, facts: dict[str, Row]) -> Row:
    """Return samples over time, as `GET /system/metrics` shows them.

    Args:
        facts: rows of the devices, by key.
    """
    row = facts.get(samples.key or "", {})
    shown = {name: samples.values.get(_COLUMNS.get(name, name)) for name in schemas.Line.model_fields}
    return shown | {
        "device": samples.device,
        "host": row.get("host"),
        "key": samples.key,
        "name": row.get("name"),
        "run": row.get("run_id"),
        "time": samples.times,
    }


def training(row: Row, waits_for: Sequence[str] = (), with_log: bool = False) -> Row:
    """Return a training, as the API shows it.

    Args:
        waits_for: reasons why it has not started.
        with_log: whether to include the end of its log.
    """
    here = row["host"] == host_name()
    run_dir = Path(row["run_dir"])
    job = read_job(run_dir) if here else None
    plan = _read(run_dir / "plan.json") if here else {}
    ended = row["state"] not in ACTIVE
    summary = _read(run_dir / "summary.json") if here and ended else {}
    choices = plan.get("choices") or {}
    shown = {name: row.get(name) for name in schemas.Training.model_fields}
    shown |= {
        "balancing": choices.get("balancing") or (job.balancing if job is not None else None),
        "efficiency": _finite(summary.get("efficiency")),
        "split": _split(run_dir, plan, summary, ended) if here else [],
        "report_url": f"/api/v1/trainings/{row['id']}/report" if summary else None,
        "waits_for": list(waits_for),
        "stopping": not ended and job is not None and job.stop_asked is not None,
        "experiment": job.experiment if job is not None else None,
        "overrides": job.overrides if job is not None else {},
    }
    if with_log:
        shown["log_tail"] = log_tail(run_dir, TAIL_LINES) if here else []
    return shown


def metrics(row: Row, since_step: int, limit: int) -> list[Row]:
    """Return at most `limit` lines of a run's metrics after a step, the last ones."""
    if row["host"] != host_name():
        return []
    rows = []
    for line in map(modelled, last_rows(Path(row["run_dir"]) / METRICS, _MOST_BYTES)):
        if not isinstance(line.get("step"), int) or line["step"] <= since_step:
            continue
        shown = {
            name.rpartition("/")[2] if name.startswith("train/") else name: line.get(name) for name in _SHOWN
        }
        values = {name: _finite(value) for name, value in shown.items()}
        split = _shares(line)
        rows.append({"step": line["step"], "loss": _finite(line.get("train/loss")), **values, "split": split})
    return rows[-limit:]


def _split(run_dir: Path, plan: Row, summary: Row, ended: bool) -> list[Row]:
    """Return each device's share of the work: that of an ended run, else the newest, else the planned."""
    if ended and summary.get("devices"):
        return [{"id": row["id"], "share": _finite(row.get("share"))} for row in summary["devices"]]
    for line in reversed(last_rows(run_dir / METRICS, _TAIL_BYTES) if not ended else []):
        shares = _shares(line)
        if shares:
            return shares
    devices = plan.get("cards") or plan.get("devices") or []
    shares = plan.get("card_shares") or plan.get("shares") or []
    return [{"id": row["id"], "share": share} for row, share in zip(devices, shares, strict=False)]


def _shares(line: Row) -> list[Row]:
    return [
        {"id": name.split("/")[1], "share": _finite(value)}
        for name, value in line.items()
        if name.startswith("device/") and name.endswith("/share")
    ]


def _read(path: Path) -> Row:
    try:
        facts = path.stat()
    except OSError:
        return {}
    return _read_once(path, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=512)
def _read_once(path: Path, mtime_ns: int, size: int) -> Row:
    with suppress(OSError, ValueError):
        if path.name == "plan.json":
            return Plan.read_checked(path).to_dict()
        summary: Row = read_json(path)
        return {} if summary_problem(summary) else summary
    return {}


def _finite(value: Any) -> float | None:
    """Return a finite number, and `None` instead of NaN and infinities, which JSON lacks."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
