"""The database of samples and trainings.

Any number of processes may write; each call is one transaction. An existing sample of the same device and
moment stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import Connection, delete, func, select, update

from hetexp.core.config import RetentionConfig
from hetexp.monitor.history import Series, View, read_history
from hetexp.monitor.processes import lives
from hetexp.monitor.retention import roll_up
from hetexp.monitor.sample import Device, Sample, host_name
from hetexp.monitor.tables import (
    RAW,
    VALUES,
    WRITES,
    device_metrics,
    devices,
    insert_into,
    open_engine,
    trainings,
)

ACTIVE = ("pending", "running")
"""States of trainings that have not ended."""
KEPT_SECONDS = 3600.0
"""How long a device without new samples is still shown, as stale."""
ABANDONED = "its launcher was killed, and reported nothing"


class Store:
    """The monitor's database.

    Args:
        url: as `monitor.url`; `None`: SQLite's file in `$HETEXP_HOME`.

    Raises:
        SetupError: as `hetexp.monitor.tables.open_engine`.
        sqlalchemy.exc.SQLAlchemyError: the database cannot be reached any more; of any method.
    """

    def __init__(self, url: str | None = None) -> None:
        self.url = url
        self.engine = open_engine(url)
        self._ids: dict[str, tuple[int, Device]] = {}

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def write(self, samples: Sequence[Sample], seconds: float) -> None:
        """Add samples of one moment.

        Args:
            seconds: since the epoch, to the millisecond.
        """
        if not samples:
            return
        with self._writing() as connection:
            self._write_devices(connection, [sample.device for sample in samples])
            rows = [self._row(sample, round(seconds * 1000)) for sample in samples]
            connection.execute(insert_into(connection, device_metrics).on_conflict_do_nothing(), rows)

    def latest(self, seconds: float | None = None) -> list[dict[str, Any]]:
        """Return each device's facts and newest sample, in the order of hosts and numbers.

        Args:
            seconds: since the epoch; only devices that were sampled since then.
        """
        inner = device_metrics.alias()
        newest = select(func.max(inner.c.time_ms)).where(inner.c.device_id == devices.c.id).scalar_subquery()
        each = select(devices.c.id, newest.label("time_ms")).subquery()  # one look at the key a device
        same = (device_metrics.c.device_id == each.c.id) & (device_metrics.c.time_ms == each.c.time_ms)
        query = (
            select(devices, device_metrics)
            .select_from(each)
            .join(devices, devices.c.id == each.c.id)
            .join(device_metrics, same)
            .order_by(devices.c.host, devices.c.number.is_(None), devices.c.number, devices.c.key)
        )
        with self.engine.connect() as connection:
            rows = [dict(row) for row in connection.execute(query).mappings()]
        if seconds is not None:  # not in the query: SQLite would read all samples to find the new ones
            rows = [row for row in rows if row["time_ms"] >= round(seconds * 1000)]
        for row in rows:
            row["time"] = row.pop("time_ms") / 1000
            del row["device_id"], row["level"]
        return rows

    def history(
        self,
        since: float,
        until: float | None = None,
        view: View = "aggregated",
        max_points: int = 600,
        keys: Sequence[str] | None = None,
    ) -> list[Series]:
        """Return the samples between two moments, as `hetexp.monitor.history.read_history`."""
        with self.engine.connect() as connection:
            return read_history(connection, since, until or time.time(), view, max_points, keys)

    def roll_up(self, retention: RetentionConfig, now: float | None = None) -> int:
        """Replace old samples of this host by means, drop the oldest, and return how many rows went."""
        with self._writing() as connection:
            return roll_up(connection, retention, host_name(), now or time.time())

    def begin(self, training: dict[str, Any]) -> None:
        """Add a training, or begin again one that has run before; values that are not given are null."""
        row = {column.name: training.get(column.name) for column in trainings.columns}
        with self._writing() as connection:
            insert = insert_into(connection, trainings)
            changed = {name: insert.excluded[name] for name in row if name not in ("id", "created")}
            connection.execute(insert.on_conflict_do_update(index_elements=["id"], set_=changed), [row])

    def update(self, training_id: str, **values: Any) -> None:
        """Change columns of a training."""
        with self._writing() as connection:
            connection.execute(update(trainings).where(trainings.c.id == training_id), values)

    def trainings(
        self,
        states: Iterable[str] | None = None,
        host: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> list[dict[str, Any]]:
        """Return trainings, the newest first."""
        newest_first = (trainings.c.created.desc(), trainings.c.id)
        query = select(trainings).order_by(*newest_first).limit(limit).offset(offset)
        if states is not None:
            query = query.where(trainings.c.state.in_(list(states)))
        if host is not None:
            query = query.where(trainings.c.host == host)
        with self.engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def training(self, training_id: str) -> dict[str, Any] | None:
        """Return one training."""
        with self.engine.connect() as connection:
            result = connection.execute(select(trainings).where(trainings.c.id == training_id))
            row = result.mappings().first()
        return dict(row) if row is not None else None

    def forget(self, training_id: str) -> None:
        """Remove a training."""
        with self._writing() as connection:
            connection.execute(delete(trainings).where(trainings.c.id == training_id))

    def bury(self, now: float | None = None) -> list[str]:
        """Mark trainings of this host as failed whose launcher is gone; return their ids."""
        gone = [
            row["id"]
            for row in self.trainings(ACTIVE, host_name())
            if row["pid"] is not None and not lives(row["pid"], row["process_mark"])
        ]
        if not gone:
            return []
        ended = {"state": "failed", "error": ABANDONED, "ended": now or time.time()}
        with self._writing() as connection:
            # A training may have reported its end since then.
            still = trainings.c.id.in_(gone) & trainings.c.state.in_(ACTIVE)
            connection.execute(update(trainings).where(still), ended)
        return gone

    def _writing(self) -> AbstractContextManager[Connection]:
        return self.engine.execution_options(**{WRITES: True}).begin()

    def _write_devices(self, connection: Connection, sampled: Sequence[Device]) -> None:
        """Write new and changed devices, and keep their numbers in the database."""
        new = [device for device in sampled if self._ids.get(device.key, (0, None))[1] != device]
        if not new:
            return
        insert = insert_into(connection, devices)
        changed = {field.name: insert.excluded[field.name] for field in fields(Device) if field.name != "key"}
        upsert = insert.on_conflict_do_update(index_elements=["key"], set_=changed)
        connection.execute(upsert, [asdict(device) for device in new])
        by_key = {device.key: device for device in new}
        query = select(devices.c.key, devices.c.id).where(devices.c.key.in_(list(by_key)))
        self._ids |= {key: (number, by_key[key]) for key, number in connection.execute(query)}

    def _row(self, sample: Sample, time_ms: int) -> dict[str, Any]:
        return {
            "device_id": self._ids[sample.device.key][0],
            "time_ms": time_ms,
            "level": RAW,
            "state": sample.state,
            "reason": sample.reason,
            **{name: getattr(sample, name) for name in VALUES},
            "throttled": list(sample.throttled) if sample.throttled is not None else None,
            "users": [asdict(user) for user in sample.users],
        }


def with_ages(rows: Sequence[dict[str, Any]], now: float, fresh_seconds: float) -> list[dict[str, Any]]:
    """Return the rows of `Store.latest` that a screen shows, with `age_seconds` and `stale`.

    A device without new samples is stale: its machine may be off, or cut off. It is shown for `KEPT_SECONDS`;
    an emulated device ends with its run.

    Args:
        now: seconds since the epoch.
        fresh_seconds: age up to which a sample is news.
    """
    aged = [row | {"age_seconds": max(0.0, now - row["time"])} for row in rows]
    aged = [row | {"stale": row["age_seconds"] > fresh_seconds} for row in aged]
    return [
        row for row in aged if row["age_seconds"] <= KEPT_SECONDS and not (row["stale"] and row["emulated"])
    ]
