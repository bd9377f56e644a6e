"""What the dashboard's server does under load, as a process of its own with a database of its own.

    python benchmarks/bench_dashboard.py [--clients 200] [--seconds 60] [--devices 8]

First 30 days of samples of so many emulated devices are written, as the monitor keeps them (an hour of
seconds, a day of ten seconds, else minutes), and every view is asked for over HTTP, again and again:
milliseconds, the median and the slowest. Then so many WebSockets listen for so many seconds while the
server samples this machine each second: a client that misses a moment, or is dropped, is a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VIEWS = (
    "/system/gpus",
    "/system/metrics?view=aggregated&since=600",
    "/system/metrics?view=aggregated&since=3600",
    "/system/metrics?view=per_gpu&since=600",
    "/system/metrics?view=per_gpu&since=3600&points=1000",
    "/trainings",
)
LONG_VIEWS = tuple(
    f"/system/metrics?view={view}&since={days * 86400}&points=240"
    for view in ("aggregated", "per_gpu")
    for days in (1, 7, 30)
)
ROUNDS = 20
LIMIT_MILLISECONDS = 100.0
"""Of the views of an hour and less."""
OPEN_SECONDS = 60.0


def samples(count: int) -> list[Any]:
    """Return one sample of each of so many cards."""
    from hetexp.core.device import GIB
    from hetexp.monitor.sample import Device, Sample, User, host_name

    host = host_name()
    devices = [
        Device(
            f"{host}/bench/{n}",
            host,
            f"emulated:{n}",
            None,
            "T4",
            "nvidia",
            "emulated",
            emulated=True,
            run_id="bench",
        )
        for n in range(count)
    ]
    return [
        Sample(
            one,
            utilisation=0.1 * place,
            memory_used_bytes=place * GIB,
            memory_total_bytes=16 * GIB,
            temperature_celsius=60.0,
            power_watts=70.0,
            users=(User("bench", place),),
        )
        for place, one in enumerate(devices)
    ]


@contextmanager
def served(folder: Path, url: str) -> Iterator[str]:
    """Give the address of a server while the context lasts."""
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "hetexp.cli", "dashboard", "--port=0", f"monitor.url={url}"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the server did not start"
        yield address
    finally:
        process.terminate()
        process.wait()


def views(address: str) -> dict[str, list[float]]:
    """Return the milliseconds that each view takes."""
    import httpx

    found: dict[str, list[float]] = {}
    with httpx.Client(base_url=f"{address}/api/v1", timeout=60) as client:
        for view in (*VIEWS, *LONG_VIEWS):
            client.get(view)  # a connection of its own, a first query's preparation
            times = []
            for _ in range(ROUNDS):
                begun = time.perf_counter()
                answer = client.get(view)
                times.append((time.perf_counter() - begun) * 1000)
                assert answer.status_code == 200, answer.text
            found[view] = times
    return found


async def listen(address: str, ready: asyncio.Semaphore, ending: asyncio.Event) -> tuple[list[float], bool]:
    """Return the moments of all samples that one client gets, and whether it was dropped."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed

    moments: list[float] = []
    where = f"{address.replace('http', 'ws')}/api/v1/live"
    async with connect(where, open_timeout=OPEN_SECONDS, max_size=2**24, compression=None) as socket:
        await socket.recv()  # what is known to begin with
        ready.release()

        async def read() -> None:
            while True:
                message = json.loads(await socket.recv())
                if message["kind"] == "sample":
                    moments.append(message["time"])

        reading, waiting = asyncio.create_task(read()), asyncio.create_task(ending.wait())
        await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
        dropped = reading.done() and isinstance(reading.exception(), ConnectionClosed)
        for task in (reading, waiting):
            task.cancel()
        await asyncio.gather(reading, waiting, return_exceptions=True)
        return moments, dropped


async def crowd(address: str, url: str, clients: int, seconds: int) -> dict[str, Any]:
    """Let many clients listen while samples are written, and compare what each got with what was written."""
    from hetexp.monitor.store import Store

    ready, ending = asyncio.Semaphore(0), asyncio.Event()
    tasks = [asyncio.create_task(listen(address, ready, ending)) for _ in range(clients)]
    for _ in range(clients):
        await asyncio.wait_for(ready.acquire(), OPEN_SECONDS)
    store, begun = Store(url), time.time()
    await asyncio.sleep(seconds)
    until = time.time()
    await asyncio.sleep(2.0)
    ending.set()
    got = await asyncio.gather(*tasks)
    with store.engine.connect() as connection:
        from sqlalchemy import select

        from hetexp.monitor.tables import device_metrics

        times = connection.scalars(select(device_metrics.c.time_ms).distinct())
        written = {time_ms / 1000 for time_ms in times if begun + 1 <= time_ms / 1000 <= until}
    store.close()
    lost = sum(len(written - set(moments)) for moments, _ in got)
    dropped = sum(one for _, one in got)
    return {"clients": clients, "seconds": seconds, "samples": len(written), "lost": lost, "dropped": dropped}


def main() -> int:
    """Print the figures as JSON; return 1 where a view is too slow or a sample was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--devices", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = f"sqlite:///{folder / 'bench.sqlite'}"
        fill(url, options.devices)
        with served(folder, url) as address:
            times = views(address)
            heard = asyncio.run(crowd(address, url, options.clients, options.seconds))
    shown = {
        view: {"median_ms": round(statistics.median(one), 1), "slowest_ms": round(max(one), 1)}
        for view, one in times.items()
    }
    print(json.dumps({"views": shown, "websockets": heard}, indent=2))
    slow = any(shown[view]["median_ms"] >= LIMIT_MILLISECONDS for view in VIEWS)
    return int(slow or heard["lost"] > 0 or heard["dropped"] > 0 or heard["samples"] == 0)


def fill(url: str, devices: int) -> None:
    """Write the samples of the last hour, and the means of the last day and of the last 30."""
    from sqlalchemy import select

    from hetexp.monitor.store import Store
    from hetexp.monitor.tables import MINUTE, TEN_SECONDS, device_metrics

    store, now, each = Store(url), int(time.time()), samples(devices)
    for second in range(3600, 0, -1):
        store.write(each, now - second)
    hour, day = now - 3600, now - 86400
    means = [(TEN_SECONDS, range(day, hour, 10)), (MINUTE, range(now - 30 * 86400, day, 60))]
    with store.engine.begin() as connection:
        newest = select(device_metrics).where(device_metrics.c.time_ms == (now - 1) * 1000)
        like = [dict(row) for row in connection.execute(newest).mappings()]
        for level, moments in means:
            for first in range(0, len(moments), 1000):
                some = [(moment, row) for moment in moments[first : first + 1000] for row in like]
                rows = [{**row, "time_ms": moment * 1000, "level": level} for moment, row in some]
                connection.execute(device_metrics.insert(), rows)
    store.close()


if __name__ == "__main__":
    sys.exit(main())
