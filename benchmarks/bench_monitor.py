"""What the monitor costs: a core's share for 8 devices, the launcher's time, queries of an hour's rows.

    python benchmarks/bench_monitor.py
    python benchmarks/bench_monitor.py --seconds 60 --url postgresql://me@/database

Devices are this machine's own, and emulated ones up to `--devices`, of a run folder that it makes and logs
into each second. The core's share is the process's own time (`time.process_time`, all threads), which counts
what drivers do on its behalf, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetexp.core.config import COMPONENTS, Config, MonitorConfig
from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.plan import Plan
from hetexp.monitor.follow import followed
from hetexp.monitor.runs import RunWatch
from hetexp.monitor.sample import Device, Sample, User
from hetexp.monitor.sampler import Sampler
from hetexp.monitor.store import Store

HOUR = 3600
START = 1_700_000_000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=20, help="how long devices are sampled")
    parser.add_argument("--url", help="of the database; a new file of SQLite by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = options.url or f"sqlite:///{folder / 'monitor.sqlite'}"
        figures: dict[str, Any] = {"sampling": sampling(folder, url, options.devices, options.seconds)}
        figures["launcher"] = launcher(folder, url)
        figures["queries_ms"] = queries(options.url or f"sqlite:///{folder / 'hour.sqlite'}", options.devices)
    print(json.dumps(figures, indent=2))


def emulated(count: int) -> list[DeviceSpec]:
    return [
        DeviceSpec(f"emulated:{n}", "emulated", n, "T4", "nvidia", 16 * GIB, power_limit_watts=70.0)
        for n in range(count)
    ]


def plan_of(folder: Path, count: int) -> Plan:
    devices = emulated(count)
    return Plan(
        run_id="bench",
        run_dir=str(folder),
        name="bench",
        group=None,
        config={"trainer": {"global_batch_size": 8 * count}, "fault": {"events": []}},
        devices=tuple(devices),
        strategy="ddp",
        shares=(1 / count,) * count,
        local_batch_sizes=(8,) * count,
        collective_backend="gloo",
        threads=(1,) * count,
    )


def sampling(folder: Path, url: str, devices: int, seconds: int) -> dict[str, Any]:
    """Sample each second as the process beside a launcher does, and count its time."""
    with Sampler() as sampler:
        own = len(sampler.sample())
        count = max(1, devices - own)
        plan_of(folder, count).write(folder / "plan.json")
        watch, store = RunWatch(folder), Store(url)
        metrics, pause = (folder / "metrics.jsonl").open("a"), []
        used = 0.0
        for second in range(seconds):
            line: dict[str, Any] = {"step": second, "train/loss": 1.0, "samples_per_second": 10.0}
            for number in range(count):
                line |= {f"device/emulated:{number}/share": 1 / count}
                line |= {f"device/emulated:{number}/samples_per_second": 20.0}
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
            time.sleep(1.0)
            began, before = time.perf_counter(), time.process_time()
            watch.look()
            store.trainings(("pending", "running"))
            samples = sampler.sample([watch])
            store.write(samples, START - HOUR + second)
            used += time.process_time() - before
            pause.append(time.perf_counter() - began)
        store.close()
        metrics.close()
    return {
        "real_devices": own,
        "devices": len(samples),
        "core_percent": round(100 * used / seconds, 3),
        "wall_ms_median": round(1000 * statistics.median(pause), 2),
    }


def launcher(folder: Path, url: str) -> dict[str, float]:
    """Time what the launcher waits for: the start of the process beside it, a word to it, and its end."""
    plan = plan_of(folder, 2)
    plan.write(folder / "plan.json")
    (folder / "logs").mkdir(exist_ok=True)
    raw: dict[str, Any] = {name: {} for name in COMPONENTS}
    config = Config(
        **raw,
        hardware={"devices": [{"device": "cpu"}]},  # type: ignore[arg-type]
        trainer={"global_batch_size": 8, "max_steps": 1},  # type: ignore[arg-type]
        monitor=MonitorConfig(url=url),
    )
    began = time.perf_counter()
    with followed(replace(plan, run_id="bench-launcher"), config) as follower:
        started = time.perf_counter()
        follower.ready(10)
        answered = time.perf_counter()
        time.sleep(10.0)
        ending = time.perf_counter()
    ended = time.perf_counter()
    return {
        "start_ms": round(1000 * (started - began), 2),
        "word_ms": round(1000 * (answered - started), 3),
        "end_ms": round(1000 * (ended - ending), 1),
    }


def queries(url: str, count: int) -> dict[str, float]:
    """Time each view of an hour of samples each second."""
    store = Store(url)
    specs = [Device.of(spec, "bench-hour") for spec in emulated(count)]
    for second in range(HOUR):
        values: dict[str, Any] = {
            "utilisation": 0.5,
            "memory_used_bytes": GIB,
            "memory_total_bytes": 16 * GIB,
        }
        rows = [Sample(one, **values, power_watts=35.0, users=(User("bench-hour", 0),)) for one in specs]
        store.write(rows, START + second)
    keys = [one.key for one in specs]
    asked: dict[str, Callable[[], object]] = {
        "latest": store.latest,
        "aggregated": lambda: store.history(START, START + HOUR, "aggregated", 600, keys),
        "per_gpu": lambda: store.history(START, START + HOUR, "per_gpu", 600, keys),
        "per_gpu, 1000 points": lambda: store.history(START, START + HOUR, "per_gpu", 1000, keys),
        "per_gpu, last 5 minutes": lambda: store.history(
            START + HOUR - 300, START + HOUR, "per_gpu", 60, keys
        ),
    }
    medians = {}
    for name, ask in asked.items():
        times = []
        for _ in range(7):
            began = time.perf_counter()
            ask()
            times.append(time.perf_counter() - began)
        medians[name] = round(1000 * statistics.median(times), 1)
    store.close()
    return medians


if __name__ == "__main__":
    main()
