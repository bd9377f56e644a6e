"""Samples over time as a limited number of means, of each device or of all devices together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import BigInteger, ColumnElement, Connection, Select, case, cast, func, select

from hetexp.monitor.tables import device_metrics, devices

View = Literal["aggregated", "per_gpu"]
MOST_POINTS = 1000
"""No screen shows more."""
COMBINED: dict[str, Any] = {
    "utilisation": func.avg,
    "memory_used_bytes": func.sum,
    "memory_total_bytes": func.sum,
    "temperature_celsius": func.max,
    "power_watts": func.sum,
    "clock_mhz": func.avg,
    "fan": func.avg,
}
"""Values of a history, with the function that combines those of several devices."""


@dataclass(frozen=True)
class Series:
    """Values over time of a device, or of all devices together."""

    key: str | None
    """Key of the device; `None`: all together."""
    device: str | None
    times: list[float]
    """Seconds since the epoch at which each point begins."""
    values: dict[str, list[float | None]]
    """Name → value of each point, `None` if it is not known; several devices are combined by `COMBINED`."""


def read_history(
    connection: Connection,
    since: float,
    until: float,
    view: View,
    max_points: int,
    keys: Sequence[str] | None = None,
) -> list[Series]:
    """Return the samples from one moment until before another.

    Args:
        since, until: seconds since the epoch.
        max_points: most points of a series, and never more than `MOST_POINTS`. Points are means of equal
            stretches, in which each sample counts alike.
        keys: of the devices; all of them by default. Together, those of a processor are left out if there
            is any other device.
    """
    chosen = _chosen(connection, keys, together=view == "aggregated")
    if not chosen or until <= since:
        return []
    stretch = max(1, math.ceil((until - since) * 1000 / max(1, min(max_points, MOST_POINTS))))
    # Stretches begin at multiples of their length: a later query gets the same ones.
    begin = cast(device_metrics.c.time_ms, BigInteger) // stretch * stretch
    means = (
        select(device_metrics.c.device_id, begin.label("begin"), *_means())
        .where(
            device_metrics.c.device_id.in_([number for number, *_ in chosen]),
            device_metrics.c.time_ms >= math.floor(since * 1000) // stretch * stretch,
            device_metrics.c.time_ms < math.floor(until * 1000),
        )
        .group_by(device_metrics.c.device_id, "begin")
    )
    if view == "per_gpu":
        rows = connection.execute(means.order_by(device_metrics.c.device_id, "begin")).all()
        return _per_device(rows, chosen)
    return [_series(None, None, connection.execute(_together(means)).all())]


def _chosen(connection: Connection, keys: Sequence[str] | None, together: bool) -> list[tuple[int, str, str]]:
    """Return number, key and name of the requested devices."""
    order = (devices.c.host, devices.c.number.is_(None), devices.c.number, devices.c.key)
    query = select(devices.c.id, devices.c.key, devices.c.device, devices.c.backend).order_by(*order)
    if keys is not None:
        query = query.where(devices.c.key.in_(list(keys)))
    rows = connection.execute(query).all()
    others = [row for row in rows if row.backend != "cpu"]
    kept = others if together and keys is None and others else rows
    return [(row.id, row.key, row.device) for row in kept]


def _means() -> list[ColumnElement[Any]]:
    columns = device_metrics.c
    return [
        (func.max if name == "memory_total_bytes" else func.avg)(columns[name]).label(name)
        for name in COMBINED
    ]


def _together(means: Select[Any]) -> Select[Any]:
    """Return the query that combines the devices' means."""
    part = means.subquery()
    columns = part.c
    # The total of devices whose use is known.
    total = case((columns.memory_used_bytes.is_not(None), columns.memory_total_bytes))
    combined = [
        combine(total if name == "memory_total_bytes" else columns[name]).label(name)
        for name, combine in COMBINED.items()
    ]
    return (
        select(func.min(columns.device_id), columns.begin, *combined)
        .group_by(columns.begin)
        .order_by(columns.begin)
    )


def _per_device(rows: Sequence[Any], chosen: Sequence[tuple[int, str, str]]) -> list[Series]:
    by_device: dict[int, list[Any]] = {}
    for row in rows:
        by_device.setdefault(row[0], []).append(row)
    return [_series(key, device, by_device[number]) for number, key, device in chosen if number in by_device]


def _series(key: str | None, device: str | None, rows: Sequence[Any]) -> Series:
    columns = list(zip(*rows, strict=True)) or [()] * (2 + len(COMBINED))
    values = {
        name: [float(value) if value is not None else None for value in column]
        for name, column in zip(COMBINED, columns[2:], strict=True)
    }
    return Series(key, device, [begin / 1000 for begin in columns[1]], values)
