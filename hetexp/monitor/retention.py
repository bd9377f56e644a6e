"""Replaces old samples by means and drops the oldest: seconds for an hour, 10 s for a day, minutes for 30."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, exists, select

from hetexp.core.config import RetentionConfig
from hetexp.monitor.tables import MINUTE, RAW, TEN_SECONDS, VALUES, device_metrics, devices, insert_into

HOUR, DAY = 3600.0, 86400.0
_AT_ONCE = 20_000
"""Most rows that one transaction reads, as other writers wait for it."""
_WORST_FIRST = ("lost", "unusable", "ok")


def roll_up(connection: Connection, retention: RetentionConfig, host: str, now: float) -> int:
    """Do the work that is due, or a part of it, within one transaction.

    Only one host's devices change, so that several hosts of a database do not wait for each other.

    Args:
        connection: connection in a transaction that may write.
        now: seconds since the epoch.

    Returns:
        The number of removed rows.
    """
    local = select(devices.c.id).where(devices.c.host == host)
    steps = (
        (RAW, TEN_SECONDS, 10_000, now - retention.raw_hours * HOUR),
        (TEN_SECONDS, MINUTE, 60_000, now - retention.ten_seconds_days * DAY),
    )
    gone = 0
    for level, into, length_ms, before in steps:
        gone += _average(connection, local, level, into, length_ms, round(before * 1000))
    oldest = round((now - retention.minutes_days * DAY) * 1000)
    table = device_metrics.c
    old = delete(device_metrics).where(
        table.level == MINUTE, table.time_ms < oldest, table.device_id.in_(local)
    )
    gone += connection.execute(old).rowcount
    without = ~exists().where(table.device_id == devices.c.id)
    ended_runs = devices.c.run_id.is_not(None) & (devices.c.host == host)
    connection.execute(delete(devices).where(ended_runs, without))
    return gone


def _average(
    connection: Connection, local: Any, level: int, into: int, length_ms: int, before_ms: int
) -> int:
    """Replace whole stretches of one level that ended before a moment by their means."""
    table = device_metrics.c
    end = before_ms // length_ms * length_ms
    due = (
        select(device_metrics)
        .where(table.level == level, table.time_ms < end, table.device_id.in_(local))
        .order_by(table.time_ms)
        .limit(_AT_ONCE)
    )
    rows = connection.execute(due).mappings().all()
    if len(rows) == _AT_ONCE:  # the last stretch may go on
        end = rows[-1]["time_ms"] // length_ms * length_ms
        rows = [row for row in rows if row["time_ms"] < end]
    if not rows:
        return 0
    stretches: dict[tuple[int, int], list[Any]] = {}
    for row in rows:
        begin = row["time_ms"] // length_ms * length_ms
        stretches.setdefault((row["device_id"], begin), []).append(row)
    gone = delete(device_metrics).where(table.level == level, table.time_ms < end, table.device_id.in_(local))
    connection.execute(gone)
    means = [_mean(number, begin, into, parts) for (number, begin), parts in stretches.items()]
    # An existing mean is of more samples than the late ones.
    connection.execute(insert_into(connection, device_metrics).on_conflict_do_nothing(), means)
    return len(rows)


def _mean(number: int, begin: int, level: int, rows: Sequence[Any]) -> dict[str, Any]:
    """Return one row for several rows of a device; means leave out unknown values."""
    state = next((s for s in _WORST_FIRST if any(row["state"] == s for row in rows)), rows[-1]["state"])
    throttled = [row["throttled"] for row in rows if row["throttled"] is not None]
    users = [user for row in rows for user in row["users"]]
    return {
        "device_id": number,
        "time_ms": begin,
        "level": level,
        "state": state,
        "reason": next((row["reason"] for row in reversed(rows) if row["state"] == state), None),
        **{name: _mean_of(name, [row[name] for row in rows if row[name] is not None]) for name in VALUES},
        "throttled": list(dict.fromkeys(why for row in throttled for why in row)) if throttled else None,
        "users": [dict(pairs) for pairs in dict.fromkeys(tuple(sorted(user.items())) for user in users)],
    }


def _mean_of(name: str, values: Sequence[float]) -> float | None:
    if not values:
        return None
    mean = sum(values) / len(values)
    return round(mean) if name.endswith("_bytes") else mean
