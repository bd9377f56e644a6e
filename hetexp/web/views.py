"""Rows of the database and files of run folders, as the API shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hetexp.core.lines import last_rows
from hetexp.monitor.history import Series
from hetexp.monitor.sample import host_name
from hetexp.monitor.store import ACTIVE
from hetexp.web.job import log_tail, read_job

METRICS = "metrics.jsonl"
TAIL_LINES = 200
_TAIL_BYTES = 256 * 1024
_MOST_BYTES = 64 * 1024 * 1024
"""Of a run's metrics, from the end."""
_SHOWN = (
    "samples_per_second",
    "step_seconds",
    "imbalance",
    "train/learning_rate",
    "train/epoch",
    "eval/loss",
    "eval/accuracy",
)
Row = dict[str, Any]


def device(row: Row) -> Row:
    """Return a device and its newest sample, as `GET /system/gpus` shows them."""
    total, used = row["memory_total_bytes"], row["memory_used_bytes"]
    users = row["users"]
    emulated = row["emulated"]
    return {
        "id": row["device"],
        "key": row["key"],
        "name": row["name"],
        "vendor": row["vendor"],
        "backend": row["backend"],
        "index": row["number"],
        "environment": None,
        "emulated": emulated,
        "integrated": row["integrated"],
        "lost": row["state"] == "lost",
        "state": row["state"],
        "reason": row["reason"],
        "selectable": row["state"] == "ok" and not emulated,
        "run": row["run_id"],
        "memory_total_bytes": total,
        "memory_used_bytes": used,
        "memory_free_bytes": total - used if total is not None and used is not None else None,
        "utilisation": row["utilisation"],
        "temperature_c": row["temperature_celsius"],
        "power_w": row["power_watts"],
        "power_limit_w": row["power_limit_watts"],
        "clock_mhz": row["clock_mhz"],
        "memory_clock_mhz": row["memory_clock_mhz"],
        "throttle": row["throttled"],
        "fan": row["fan"],
        "busy": bool(users),
        "busy_by": users[0] if users else None,
        "time": row.get("time"),
    }


def series(one: Series, facts: dict[str, Row]) -> Row:
    """Return samples over time, as `GET /system/metrics` shows them.

    Args:
        facts: of the devices, by key.
    """
    own = facts.get(one.key or "", {})
    return {
        "device": one.device,
        "key": one.key,
        "name": own.get("name"),
        "run": own.get("run_id"),
        "time": one.times,
        "utilisation": one.values["utilisation"],
        "memory_used_bytes": one.values["memory_used_bytes"],
        "memory_total_bytes": one.values["memory_total_bytes"],
        "temperature_c": one.values["temperature_celsius"],
        "power_w": one.values["power_watts"],
        "clock_mhz": one.values["clock_mhz"],
        "fan": one.values["fan"],
    }


def training(row: Row, waits_for: Sequence[str] = (), with_log: bool = False) -> Row:
    """Return a training, as the API shows it.

    Args:
        waits_for: what keeps it from starting.
        with_log: whether the end of its log comes along.
    """
    here = row["host"] == host_name()
    run_dir = Path(row["run_dir"])
    job = read_job(run_dir) if here else None
    plan = _read(run_dir / "plan.json") if here else {}
    ended = row["state"] not in ACTIVE
    summary = _read(run_dir / "summary.json") if here and ended else {}
    choices = plan.get("choices") or {}
    shown = {name: row[name] for name in ("id", "name", "state", "gpu_ids", "distributed", "emulated")}
    shown |= {
        "strategy": row["strategy"],
        "balancing": choices.get("balancing") or (job.balancing if job is not None else None),
        "progress": row["progress"],
        "step": row["step"],
        "steps": row["steps"],
        "loss": row["loss"],
        "samples_per_second": row["samples_per_second"],
        "efficiency": _finite(summary.get("efficiency")),
        "split": _split(run_dir, plan, summary, ended) if here else [],
        "error": row["error"],
        "host": row["host"],
        "run_dir": row["run_dir"],
        "report_url": f"/api/v1/trainings/{row['id']}/report" if summary else None,
        "created": row["created"],
        "started": row["started"],
        "ended": row["ended"],
        "waits_for": list(waits_for),
        "stopping": not ended and job is not None and job.stop_asked is not None,
        "experiment": job.experiment if job is not None else None,
        "overrides": job.overrides if job is not None else {},
    }
    if with_log:
        shown["log_tail"] = log_tail(run_dir, TAIL_LINES) if here else []
    return shown


def metrics(row: Row, since_step: int, limit: int) -> list[Row]:
    """Return the lines of a run's log after a step, the last so many of them."""
    if row["host"] != host_name():
        return []
    found = []
    for line in last_rows(Path(row["run_dir"]) / METRICS, _MOST_BYTES):
        if "step" not in line or line["step"] <= since_step:
            continue
        shown = {
            name.rpartition("/")[2] if name.startswith("train/") else name: line.get(name) for name in _SHOWN
        }
        values = {name: _finite(value) for name, value in shown.items()}
        split = _shares(line)
        found.append(
            {"step": line["step"], "loss": _finite(line.get("train/loss")), **values, "split": split}
        )
    return found[-limit:]


def _split(run_dir: Path, plan: Row, summary: Row, ended: bool) -> list[Row]:
    """Return each device's share of the work: as it was in the end, as it is, or as it is planned."""
    if ended and summary.get("devices"):
        return [{"id": one["id"], "share": _finite(one.get("share"))} for one in summary["devices"]]
    for line in reversed(last_rows(run_dir / METRICS, _TAIL_BYTES) if not ended else []):
        shares = _shares(line)
        if shares:
            return shares
    devices = plan.get("cards") or plan.get("devices") or []
    shares = plan.get("card_shares") or plan.get("shares") or []
    return [{"id": one["id"], "share": share} for one, share in zip(devices, shares, strict=False)]


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
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _finite(value: Any) -> float | None:
    """Return a number that JSON can tell; a loss may be NaN or infinite."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
