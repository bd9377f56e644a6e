"""Ranks that torchrun, SLURM or another engine has started, compared with those of the launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import TINY, TRAIN
from support import Run, Train, difference

from hetexp.hosts.channel import PLAIN

SIZES = [word for word in TINY if not word.startswith(("hardware.devices", "sweep", "monitor"))]
OPTIONS = (*SIZES, "hardware=cpu", "trainer.precision=float64", "trainer.max_steps=6")
ROUNDING = 1e-12
"""What "exact" means in float64."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Ranks:
    """Processes of one job, as an engine starts them: each with its own variables."""

    def __init__(self, folder: Path, commands: list[list[str]], environments: list[dict[str, str]]) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_"))}
        inherited |= {"OMP_NUM_THREADS": "1"}
        self._screens = [folder / f"screen_{place}.txt" for place in range(len(commands))]
        self._processes = []
        for path, command, own in zip(self._screens, commands, environments, strict=True):
            with path.open("wb") as screen:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=inherited | own,
                        stdin=subprocess.DEVNULL,
                        stdout=screen,
                        stderr=subprocess.STDOUT,
                    )
                )

    def wait(self) -> list[int]:
        try:
            return [process.wait(100) for process in self._processes]
        finally:
            for process in self._processes:
                process.kill()

    @property
    def screens(self) -> list[str]:
        return [path.read_text(errors="replace") for path in self._screens]


def torch_variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{size}",
        "LOCAL_RANK": f"{rank}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }


def slurm_variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": f"{rank}",
        "SLURM_NTASKS": f"{size}",
        "SLURM_LOCALID": f"{rank}",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "MASTER_PORT": f"{port}",
    }


def start(folder: Path, environments: list[dict[str, str]], *overrides: str) -> Ranks:
    command = [sys.executable, str(TRAIN), *OPTIONS, "hydra.run.dir=run", *overrides]
    return Ranks(folder, [command] * len(environments), environments)


def run_in(folder: Path) -> Run:
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return Run(folder / "run", summary, "")


def same(one: Run, other: Run) -> None:
    assert len(one.losses) == len(other.losses) == 6
    for mine, its in zip(one.losses, other.losses, strict=True):
        assert abs(mine - its) <= ROUNDING * abs(its)
    assert difference(one.parameters(), other.parameters()) <= ROUNDING


def test_torchrun_on_two_hosts_trains_as_the_launcher_does(train: Train, tmp_path: Path) -> None:
    """Two instances of torchrun with two processes each."""
    port = free_port()
    words = [*OPTIONS, "balancing=equal", "hydra.run.dir=run"]
    commands = [
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
            *("--node-rank", f"{node}", "--master-addr", "127.0.0.1", "--master-port", f"{port}"),
            *(str(TRAIN), *words),
        ]
        for node in (0, 1)
    ]
    ranks = Ranks(tmp_path, commands, [{}, {}])
    assert ranks.wait() == [0, 0], ranks.screens
    torchrun = run_in(tmp_path)
    assert (torchrun.summary["status"], torchrun.summary["world_size"]) == ("completed", 4)
    assert torchrun.summary["comm"]["backend"] == "shm + gloo"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]
    assert "need hetexp's own launcher and are off" in ranks.screens[0]
    assert [screen.count(PLAIN) for screen in ranks.screens] == [1, 0]
    assert "Result" not in ranks.screens[1]
    four = "hardware.devices=[cpu,cpu,cpu,cpu]"
    launcher = train(*OPTIONS, "balancing=equal", four)
    same(torchrun, launcher)


@pytest.mark.parametrize("variables", [torch_variables, slurm_variables])
def test_each_engines_variables(variables: Any, tmp_path: Path, train: Train) -> None:
    """Ray Train sets the first ones. Unequal shares are split as the launcher splits them."""
    port = free_port()
    shares = ("balancing=manual", "balancing.weights=[0.75,0.25]")
    ranks = start(tmp_path, [variables(rank, 2, port) for rank in (0, 1)], *shares)
    assert ranks.wait() == [0, 0], ranks.screens
    assert PLAIN not in "".join(ranks.screens)  # one host
    found = run_in(tmp_path)
    assert [device["local_batch"] for device in found.summary["devices"]] == [12, 4]
    same(found, train(*OPTIONS, *shares, "hardware.devices=[cpu,cpu]"))


def test_what_is_wrong_is_told_once_and_all_end(tmp_path: Path) -> None:
    port = free_port()
    ranks = start(tmp_path, [torch_variables(rank, 2, port) for rank in (0, 1)], "optimizer.lr=-1")
    assert ranks.wait() == [2, 1]
    first, second = ranks.screens
    assert "Invalid learning rate: -1" in first
    assert second.strip().splitlines() == ["rank 1 ends: rank 0 has given up (its output says why)."]
    assert not (tmp_path / "run").exists()


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    port = free_port()
    fails = 'fault.events=[{device: "cpu:1", kind: device_error, at_step: 2}]'
    ranks = start(tmp_path, [torch_variables(rank, 2, port) for rank in (0, 1)], fails, "balancing=equal")
    assert ranks.wait() == [1, 1], ranks.screens
    summary = run_in(tmp_path).summary
    assert summary["status"] == "failed"
    assert "rank 1, cpu:1, failed" in ranks.screens[0]


def test_a_missing_variable_is_one_line(tmp_path: Path) -> None:
    ranks = start(tmp_path, [{"RANK": "1", "WORLD_SIZE": "2"}])
    assert ranks.wait() == [2]
    (line,) = ranks.screens[0].strip().splitlines()
    assert "`LOCAL_RANK` must be set, but is not; `MASTER_ADDR` must be set" in line


RAYS_WORKER = """
import sys
import threading
import torch.distributed as dist
from hetexp.engine import train_function
dist.init_process_group("gloo")  # as Ray Train does before it calls the worker's function
summary = train_function(sys.argv[1:], run_dir="run")
print("goes on", None if summary is None else summary["status"])
print("threads:", [thread.name for thread in threading.enumerate()])
"""


def test_function_for_ray_train(tmp_path: Path) -> None:
    """Variables and group are those that ray.train.torch.config sets; ray itself is not installed.

    No thread of a training may be left: one inside torch's store at the interpreter's end aborts the process.
    """
    port = free_port()
    environments = [torch_variables(rank, 2, port) | {"NODE_RANK": "0"} for rank in (0, 1)]
    command = [sys.executable, "-c", RAYS_WORKER, *OPTIONS, "balancing=equal"]
    ranks = Ranks(tmp_path, [command] * 2, environments)
    assert ranks.wait() == [0, 0], ranks.screens
    assert "goes on completed" in ranks.screens[0]
    assert "goes on None" in ranks.screens[1]
    assert all("threads: ['MainThread']" in screen for screen in ranks.screens)
    assert len(run_in(tmp_path).losses) == 6
