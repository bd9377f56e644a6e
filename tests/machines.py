"""Machines for tests: several launchers on one, each with an address and a home of its own."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BASE = (
    "data=synthetic",
    "model=mlp",
    "logger=none",
    "monitor=none",
    "diagram=false",
    "balancing=equal",
    "hardware.threads_per_rank=1",
)


@dataclass
class Machine:
    """A launcher that plays one machine."""

    name: str
    process: subprocess.Popen[bytes]
    run_dir: Path
    screen_path: Path

    @property
    def screen(self) -> str:
        return self.screen_path.read_text(encoding="utf-8")

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))
        return found

    def steps(self) -> int:
        """Return how far the run has come, by the metrics in this machine's folder."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)

    def wait(self, seconds: float = 120.0) -> int:
        return self.process.wait(seconds)


class Cluster:
    """Several machines, the first of which leads.

    Args:
        devices: each machine's entry of `devices`, as Hydra reads it.
    """

    def __init__(self, folder: Path, devices: Sequence[str], *overrides: str) -> None:
        self.folder, self.overrides = folder, overrides
        self.names = [chr(ord("a") + number) for number in range(len(devices))]
        self.addresses = [f"127.0.0.{number + 2}" for number in range(len(devices))]
        self.token_file = folder / "token"
        self.token_file.write_text(secrets.token_hex(32))
        self.token_file.chmod(0o600)
        with socket.create_server((self.addresses[0], 0)) as server:
            self.port: int = server.getsockname()[1]
        hosts = zip(self.names, self.addresses, devices, strict=True)
        told = ",".join(f"{{name: {n}, address: {a}, devices: {d}}}" for n, a, d in hosts)
        self.hosts = f"cluster.hosts=[{told}]"
        self.machines: list[Machine] = []

    def start(self, name: str, *overrides: str) -> Machine:
        """Start the command of a machine."""
        run_dir, home = self.folder / name / "run", self.folder / name / "home"
        home.mkdir(parents=True, exist_ok=True)
        screen = self.folder / name / "screen"
        words = [
            *(self.hosts, f"cluster.port={self.port}", f"cluster.token_file={self.token_file}"),
            *(f"node={name}", f"hydra.run.dir={run_dir}", "cluster.join_seconds=100"),
            *(*BASE, *self.overrides, *overrides),
        ]
        with screen.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"HETEXP_HOME": str(home), "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
            )
        machine = Machine(name, process, run_dir, screen)
        self.machines.append(machine)
        return machine

    def end(self) -> None:
        """End whatever is left."""
        for machine in self.machines:
            machine.process.kill()
            machine.process.wait(10)


def until(happened: Callable[[], bool], machines: Sequence[Machine], seconds: float = 240.0) -> None:
    """Return when something has happened; fail where it does not in time, or a machine has ended."""
    deadline = time.monotonic() + seconds
    while not happened():
        screens = "\n".join(f"--- {one.name}\n{one.screen}" for one in machines)
        assert time.monotonic() < deadline, screens
        assert all(one.process.poll() is None for one in machines), screens
        time.sleep(0.02)
