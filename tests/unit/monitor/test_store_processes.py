"""Several processes write at once, and one of them is killed: nothing that was committed is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra `monitor` is not installed")

from sqlalchemy import func, select, text

from hetexp.monitor.store import Store
from hetexp.monitor.tables import device_metrics, devices

WRITER = """
import sys
from hetexp.monitor.sample import Device, Sample
from hetexp.monitor.store import Store

url, name, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
own, shared = (Device(key, "host", key, 0, key, "cpu", "cpu") for key in (name, "shared"))
store = Store(url)
for row in range(rows):
    store.write([Sample(own, utilisation=0.5), Sample(shared, utilisation=0.5)], float(row))
    print(row, flush=True)
"""


def writer(url: str, name: str, rows: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, url, name, str(rows)], stdout=subprocess.PIPE, text=True
    )


def rows_of(store: Store, key: str) -> int:
    query = select(func.count()).select_from(device_metrics).join(devices)
    with store.engine.connect() as connection:
        return int(connection.scalar(query.where(devices.c.key == key)) or 0)


def test_four_writers_at_once(url: str) -> None:
    """They also make the tables at once, and sample one device at the same moments."""
    started = [writer(url, f"writer-{place}", 40) for place in range(4)]
    for one in started:
        told, _ = one.communicate(timeout=60)
        assert one.returncode == 0
        assert len(told.splitlines()) == 40
    store = Store(url)
    assert [rows_of(store, f"writer-{place}") for place in range(4)] == [40] * 4
    assert rows_of(store, "shared") == 40
    store.close()


def test_a_writer_that_is_killed_loses_nothing_that_it_had_committed(url: str, tmp_path: Path) -> None:
    store = Store(url)
    for attempt in range(2):
        one = writer(url, f"killed-{attempt}", 10**6)
        assert one.stdout is not None
        for _ in range(30 + attempt):
            told = int(one.stdout.readline())
        os.kill(one.pid, signal.SIGKILL)
        told = max([told, *(int(line) for line in one.stdout.read().splitlines())])
        one.wait()
        one.stdout.close()
        assert told + 1 <= rows_of(store, f"killed-{attempt}") <= told + 2
    if url.startswith("sqlite"):
        with store.engine.connect() as connection:
            assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
            assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
            assert connection.scalar(text("PRAGMA synchronous")) == 1
    store.close()
