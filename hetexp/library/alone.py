"""A script without a launcher: one device in this process, and a run folder made for the first line."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.hardware.backend import backend_class
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.logger.base import Logger, RunInfo
from hetexp.logger.jsonl import MetricsFile


def device_alone() -> DeviceSpec:
    """Return the best device that this process's torch drives; among several cards, the current one."""
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            index = module.current_device()
            backend = "hip" if kind == "cuda" and torch.version.hip else kind
            facts = module.get_device_properties(index)
            return DeviceSpec(
                id=f"{backend}:{index}",
                backend=backend,
                index=index,
                name=facts.name,
                vendor=backend_class(backend).vendor,
                memory_bytes=facts.total_memory,
            )
    if torch.backends.mps.is_available():
        return DeviceSpec("mps:0", "mps", 0, "Apple GPU", backend_class("mps").vendor)
    return CpuBackend.describe(0)


def torch_device_alone(device: DeviceSpec) -> torch.device:
    """Return the device for tensors; among several visible cards, the one with this index."""
    kind = backend_class(device.backend).torch_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, device.index)


def plan_alone(device: DeviceSpec, run_dir: Path) -> Plan:
    """Return the plan of one device that takes every sample; `setup` completes it."""
    name = Path(sys.argv[0]).name or "script"
    config: dict[str, Any] = {
        "hardware": {"devices": [device.id.partition(":")[0] if device.backend == "mps" else device.id]},
        "strategy": {"_target_": "hetexp.strategy.single.Single"},
        "balancing": {"_target_": "hetexp.balancing.equal.Equal"},
        "model": {},
        "data": {},
        "optimizer": {},
        "logger": {"_target_": "hetexp.logger.base.NoLogger"},
        "trainer": {"global_batch_size": 1, "max_epochs": 1},
        "fault": {"events": []},
    }
    return Plan(
        run_id=f"{Path(name).stem}-{secrets.token_hex(3)}",
        run_dir=str(run_dir.absolute()),
        name=name,
        group=None,
        config=config,
        devices=(device,),
        strategy="single",
        shares=(1.0,),
        local_batch_sizes=(1,),
        collective_backend="gloo",
        threads=(torch.get_num_threads(),),
        precisions=("float32",),
        working_dir=str(Path.cwd()),
        script=name,
    )


class FirstLine(Logger):
    """Writes `metrics.jsonl` into a run's folder, which it makes for the first line.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._file: MetricsFile | None = None

    def start(self, run: RunInfo) -> None:
        """Do nothing: a run without a line needs no file."""

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        if self._file is None:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._file = MetricsFile(self._run_dir / "metrics.jsonl")
        self._file.log(metrics, step)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        if self._file is not None:
            self._file.finish(summary, exit_code)
