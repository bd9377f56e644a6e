"""torchft under the same kills: its lighthouse, three replicas, and a supervisor that starts them again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchlib.runs import free_port

from chaos_lab.jobs import until
from chaos_lab.long_run import Account, account
from chaos_lab.orders import RANKS
from chaos_lab.schedule import SIGNALS, Fault

REPLICA = Path(__file__).resolve().parent.parent / "rivals" / "torchft_replica.py"


@dataclass(frozen=True)
class Settings:
    """How torchft is set, in its own words; milliseconds."""

    heartbeat_timeout: int = 1000
    """Silence after which the lighthouse counts a replica as dead, as `fault.heartbeat_seconds` is."""
    join_timeout: int = 1000
    """How long it waits for replicas that live but do not take part."""
    quorum_tick: int = 50
    respawn_seconds: float = 0.5


def rival(
    folder: Path, interpreter: Path, faults: Sequence[Fault], step_seconds: float, settings: Settings
) -> Account:
    """Train three replicas as long as the faults go on, kill them as hetexp's ranks are, and restart them.

    Args:
        interpreter: one that has torchft.
    """
    records = folder / "torchft.records"
    records.mkdir(parents=True)
    kills = [fault for fault in faults if fault.kind in ("kill", "segfault")]
    with _lighthouse(folder, interpreter, settings) as address:
        environment = {
            **os.environ,
            "TORCHFT_LIGHTHOUSE": address,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }

        def start(number: int) -> subprocess.Popen[bytes]:
            words = ["--number", str(number), "--records", str(records), "--steps", "1000000000"]
            words += ["--step-seconds", str(step_seconds)]
            with (folder / f"torchft_{number}.log").open("ab") as log:
                command = [str(interpreter), str(REPLICA), *words]
                return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

        replicas = [start(number) for number in range(RANKS)]
        moments = []
        try:
            if not until(lambda: sum(path.stat().st_size > 500 for path in records.iterdir()) == RANKS, 120):
                raise RuntimeError(f"torchft did not begin to train: see {folder}/torchft_0.log")
            begun = time.monotonic()
            for fault in kills:
                time.sleep(max(0.0, begun + fault.seconds - time.monotonic()))
                number = fault.device % RANKS
                replicas[number].send_signal(signal.Signals[SIGNALS[fault.kind]])
                moments.append(time.monotonic())
                replicas[number].wait()
                time.sleep(settings.respawn_seconds)
                replicas[number] = start(number)
            time.sleep(max(0.0, begun + faults[-1].seconds + 15.0 - time.monotonic()))
        finally:
            for replica in replicas:
                replica.kill()
                replica.wait()
    return account("torchft", records, moments)


@contextlib.contextmanager
def _lighthouse(folder: Path, interpreter: Path, settings: Settings) -> Iterator[str]:
    port = free_port()
    command = [
        *(str(interpreter.parent / "torchft_lighthouse"), "--bind", f"[::]:{port}", "--min_replicas", "1"),
        *("--heartbeat_timeout_ms", str(settings.heartbeat_timeout)),
        *("--join_timeout_ms", str(settings.join_timeout)),
        *("--quorum_tick_ms", str(settings.quorum_tick)),
    ]
    with (folder / "lighthouse.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://localhost:{port}"
    finally:
        process.kill()
        process.wait()
