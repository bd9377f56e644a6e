"""The CPU as a device."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hetexp.core.device import DeviceSpec
from hetexp.hardware.base import Backend

if TYPE_CHECKING:
    import torch


_HALF_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16", "svebf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""Precision → flags of a core in the kernel's list, x86 and ARM; a core with any of them computes in it."""


class CpuBackend(Backend):
    """Computes on the cores that the rank's thread count allows."""

    name: ClassVar[str] = "cpu"
    computes_on_cpu: ClassVar[bool] = True

    @classmethod
    def describe(cls, index: int) -> DeviceSpec:
        """Return the CPU as device number `index`: several ranks may share its cores."""
        return DeviceSpec(
            id=f"cpu:{index}",
            backend="cpu",
            index=index,
            name=_cpu_name(),
            vendor="cpu",
            memory_bytes=_total_memory(),
            precisions=_native_precisions(),
        )

    @classmethod
    def environment(cls, spec: DeviceSpec) -> dict[str, str]:
        # A CPU rank must not open a context on a card that another rank owns.
        return {"CUDA_VISIBLE_DEVICES": ""}

    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def wait(self, mark: float) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def peak_memory_bytes(self) -> int | None:
        try:
            import resource
        except ImportError:  # Windows
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def cpu_count() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({cpu_count()} cores)"
    return f"{platform.processor() or platform.machine()} ({cpu_count()} cores)"


def _native_precisions(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the precisions of the cores themselves; torch imitates bfloat16 and float16 on other cores."""
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    flags = {
        word
        for line in text.splitlines()
        if line.startswith(("flags", "Features"))  # x86, ARM
        for word in line.partition(":")[2].split()
    }
    half = [name for name, any_of in _HALF_FLAGS.items() if flags & any_of]
    return ("float64", "float32", *half)


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
