"""Apple's GPU: found by `sysctl`, driven by torch as `mps`. A Mac has one, and its memory is the host's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.backends.accelerator import AcceleratorBackend
from hetexp.hardware.backends.sysfs import positive
from hetexp.hardware.base import Gauge
from hetexp.hardware.detection.detected import DetectedCard, Reading
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import PciCard

if TYPE_CHECKING:
    import torch

FACTS = ("machdep.cpu.brand_string", "hw.memsize", "kern.osproductversion", "hw.optional.arm64")
"""Names that `sysctl` is asked for: chip, memory in bytes, version of macOS, whether the chip is Apple's."""
STATISTICS = ("ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
"""Prints `"PerformanceStatistics" = {"Device Utilization %"=12,…}` of the GPU."""
_LENT = 0.65
"""Least part of the memory that Metal lends the GPU: `recommendedMaxWorkingSetSize` is 65 % to 75 % of it
(sgl-project/sglang#21443). The rank reads the figure from torch.mps.recommended_max_memory."""
_OLDEST_MACOS = (14, 0)
"""Needed by MPS of torch 2.8 and newer (pytorch/pytorch#173149) and by bfloat16 (pytorch/pytorch#119641)."""
_BFLOAT16_FROM = 3
"""The first generation of M chips that computes in bfloat16; on M1 and M2 Metal imitates it
(huggingface/transformers#40458)."""


class MpsBackend(AcceleratorBackend):
    """Drives the GPU of a Mac; torch's module for it lacks many functions of the other modules."""

    name: ClassVar[str] = "mps"
    platform: ClassVar[str] = "Apple's GPUs"
    torch_type: ClassVar[str] = "mps"
    vendor: ClassVar[str] = "apple"

    _held: int | None = None
    """Most bytes that Metal had given this process in any reading."""

    @classmethod
    def cards(cls, machine: Machine, on_bus: Sequence[PciCard]) -> list[DetectedCard]:
        if machine.platform != "darwin":
            return []
        facts = _facts(machine)
        if facts.get("hw.optional.arm64") != "1":  # Intel's Macs: torch has no wheels for them any more
            return []
        chip = facts.get("machdep.cpu.brand_string") or "Apple GPU"
        total = _memory(facts)
        system = _version(facts.get("kern.osproductversion"))
        spec = DeviceSpec(
            id="mps:0",
            backend="mps",
            index=0,
            name=chip,
            vendor="apple",
            memory_bytes=total,
            driver=f"macOS {facts['kern.osproductversion']}" if system is not None else None,
            unified_memory=True,
            precisions=_precisions(chip),
        )
        undriven = None
        if system is not None and system < _OLDEST_MACOS:
            undriven = (
                f"torch needs macOS {_OLDEST_MACOS[0]} or newer for it, and this is "
                f"{facts['kern.osproductversion']}; update macOS"
            )
        return [DetectedCard(spec, Reading(memory_free_bytes=_free(machine, total)), undriven=undriven)]

    @classmethod
    @contextmanager
    def gauges(cls, cards: Sequence[DetectedCard], machine: Machine) -> Iterator[list[Gauge | None]]:
        yield [partial(_gauged, card.spec, machine) for card in cards]

    @classmethod
    def environment(cls, spec: DeviceSpec) -> dict[str, str]:
        return {}  # there is no other card that could be seen

    def torch_device(self) -> torch.device:
        import torch

        if not torch.backends.mps.is_available():
            why = "sees no GPU, as in a virtual machine" if torch.backends.mps.is_built() else "has no MPS"
            raise SetupError(
                f"{self.spec} cannot be driven by torch {torch.__version__}, which {why}; its driver is "
                f"{self.spec.driver or 'not known'}. Run `hetexp doctor` to see why, or give the device an "
                "interpreter whose torch can (`python:` in `hardware.devices`)."
            )
        return torch.device("mps", 0)

    def limit_memory(self, num_bytes: int) -> bool:
        module = self._module()
        # The fraction is of what Metal lends; 0 would mean no limit.
        module.set_per_process_memory_fraction(min(1.0, num_bytes / module.recommended_max_memory()))
        return True

    def free_memory_bytes(self) -> int | None:
        module = self._module()
        most = int(module.recommended_max_memory())
        if self.spec.limited and self.spec.memory_bytes is not None:
            most = min(most, self.spec.memory_bytes)
        return max(0, most - int(module.current_allocated_memory()))

    def mark(self) -> Any:
        self._look_at_memory()
        return super().mark()

    def synchronize(self) -> None:
        super().synchronize()
        self._look_at_memory()

    def random_states(self) -> list[torch.Tensor]:
        return [self._module().get_rng_state()]

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        self._module().set_rng_state(states[0])

    def peak_memory_bytes(self) -> int | None:
        """Return the most memory that Metal has given this process in any reading.

        torch.mps counts no peak. Its allocator keeps the memory that it got, so that readings between the
        phases of a step come close to the peak.
        """
        self._look_at_memory()
        return self._held

    def _look_at_memory(self) -> None:
        self._held = max(self._held or 0, int(self._module().driver_allocated_memory()))


def _facts(machine: Machine) -> dict[str, str]:
    """Return the `FACTS` that `sysctl` knows."""
    facts = {}
    for line in (machine.run(["sysctl", *FACTS]) or "").splitlines():
        name, colon, value = line.partition(": ")
        if colon and name in FACTS:
            facts[name] = value.strip()
    return facts


def _memory(facts: dict[str, str]) -> int | None:
    with suppress(KeyError, ValueError):
        return positive(int(facts["hw.memsize"]))
    return None


def _free(machine: Machine, total: int | None) -> int | None:
    """Return the bytes that macOS could give now, and no more than Metal lends."""
    text = machine.run(["vm_stat"]) or ""
    size = re.search(r"page size of ([0-9]+) bytes", text)
    pages = re.findall(r"^Pages (?:free|inactive|speculative): +([0-9]+)\.", text, re.MULTILINE)
    if size is None or not pages or total is None:
        return None
    return min(int(total * _LENT), int(size[1]) * sum(int(count) for count in pages))


def _gauged(spec: DeviceSpec, machine: Machine) -> Reading:
    """Return the values that every user may read; temperature, power and clocks need root (powermetrics)."""
    usage = re.search(r'"Device Utilization %" *= *([0-9]+)', machine.run(STATISTICS) or "")
    return Reading(
        memory_free_bytes=_free(machine, spec.memory_bytes),
        utilisation=min(1.0, int(usage[1]) / 100) if usage is not None else None,
    )


def _version(text: str | None) -> tuple[int, int] | None:
    match = re.match(r"([0-9]+)(?:\.([0-9]+))?", text or "")
    return (int(match[1]), int(match[2] or 0)) if match is not None else None


def _precisions(chip: str) -> tuple[str, ...]:
    """Return the native precisions of a chip; none has float64."""
    match = re.search(r"\bM([0-9]+)\b", chip)
    modern = match is not None and int(match[1]) >= _BFLOAT16_FROM
    return ("float32", "bfloat16", "float16") if modern else ("float32", "float16")
