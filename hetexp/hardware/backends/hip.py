"""AMD cards: found by the kernel and AMD SMI without torch, driven by a ROCm build of torch as `cuda`.

A card is identified by its address on the bus. ROCm counts in its own order, GPUs in processors included
(`hetexp.hardware.backends.kfd`). So a rank gets its card by UUID if the card has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.backends import amd_smi, hip_mask, kfd, sysfs
from hetexp.hardware.backends.accelerator import CudaNamespaceBackend, bare_uuid
from hetexp.hardware.backends.pci_names import WORDS, Chip, chip
from hetexp.hardware.base import CardLostError, Counter, Gauge
from hetexp.hardware.detection.detected import DetectedCard, Process, Reading
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import PciCard, pci_cards

if TYPE_CHECKING:
    import torch

IN_PROCESSORS = (
    *("gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037"),
    *("gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
)
"""Chips that are part of a processor (https://llvm.org/docs/AMDGPUUsage.html#processors, column `APU`)."""
_SMALL_BYTES = GIB
"""An unknown chip that has no more memory of its own than this is part of a processor."""
_BFLOAT16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""Beginnings of architectures that multiply bfloat16 in hardware: CDNA's matrix cores, RDNA 3 and 4
(https://rocm.docs.amd.com/en/latest/reference/precision-support.html)."""
_CONTAINER = "--device /dev/kfd --device /dev/dri"


class HipBackend(CudaNamespaceBackend):
    """Drives one AMD card, the only one that its process sees; RCCL answers as `nccl`."""

    name: ClassVar[str] = "hip"
    platform: ClassVar[str] = "ROCm"
    vendor: ClassVar[str] = "amd"
    drivers = ("/sys/module/amdgpu", "/dev/dxg")
    wheel: ClassVar[str] = "rocm"
    native_collective: ClassVar[str | None] = "nccl"
    native_aborts: ClassVar[bool] = True

    @classmethod
    def cards(cls, machine: Machine, on_bus: Sequence[PciCard]) -> list[DetectedCard]:
        nodes = {node.address: node for node in reversed(kfd.nodes(machine))}
        addresses = sorted({card.address for card in on_bus} | nodes.keys())
        if not addresses:
            return []
        by_address = {card.address: card for card in on_bus}
        busy = kfd.computing(machine, [node.gpu_id for node in nodes.values()])
        with amd_smi.opened(machine) as reported:
            facts = [
                _Facts(machine, address, by_address.get(address), nodes.get(address), reported.get(address))
                for address in addresses
            ]
            return [_detected(card, busy) for card in facts]

    @classmethod
    def hide(cls, cards: Sequence[DetectedCard], machine: Machine) -> tuple[list[DetectedCard], list[str]]:
        nodes = kfd.nodes(machine)
        if not cards or not nodes:  # ROCm sees no card whatever the variables say
            return list(cards), []
        nvidia_too = any(card.vendor == "nvidia" for card in pci_cards(machine))
        hidden, problems = hip_mask.hidden(nodes, machine.environ, nvidia_too)
        return [replace(card, hidden_by=hidden.get(card.spec.pci or "")) for card in cards], problems

    @classmethod
    def environment(cls, spec: DeviceSpec) -> dict[str, str]:
        # Only the variable that ROCm applies first: a second one would count the remaining cards.
        return {hip_mask.ROCR: spec.mask or spec.uuid or str(spec.index)}

    def torch_device(self) -> torch.device:
        try:
            return super().torch_device()
        except SetupError as error:
            if self._module().is_available():
                raise
            raise SetupError(f"{error}{_foreign_chip(self.spec.architecture)}") from error

    @classmethod
    @contextmanager
    def gauges(cls, cards: Sequence[DetectedCard], machine: Machine) -> Iterator[list[Gauge | None]]:
        on_bus = {card.address: card for card in pci_cards(machine)}
        with amd_smi.opened(machine) as reported:
            yield [
                partial(_gauged, _Facts(machine, pci, on_bus.get(pci), None, reported.get(pci)), card.spec)
                if (pci := card.spec.pci) is not None
                else None
                for card in cards
            ]

    @contextmanager
    def energy_counter(self, machine: Machine) -> Iterator[Counter | None]:
        with amd_smi.opened(machine) as reported:
            card = reported.get(self.spec.pci or "")
            yield card.energy_joules if card is not None else None

    def _seen_uuid(self, module: Any) -> str | None:
        """Return ROCm's UUID as KFD writes it: HIP's is 16 bytes, each the code of a hexadecimal digit."""
        seen = super()._seen_uuid(module)
        with suppress(ValueError):
            digits = bytes.fromhex(bare_uuid(seen or "")).decode("ascii")
            if len(digits) == 16 and int(digits, 16):
                return f"GPU-{digits.lower()}"
        return None

    def computes_in(self, precision: str) -> bool | None:
        # torch says that every ROCm card has bfloat16.
        native = native_precisions(self.spec.architecture)
        return precision in native if native is not None else super().computes_in(precision)


@dataclass(frozen=True)
class _Facts(sysfs.KernelCard):
    """A card's entries in the kernel's lists and in AMD SMI."""

    kfd_node: kfd.Node | None
    smi: amd_smi.Smi | None

    @property
    def chip(self) -> Chip:
        entry = self.bus or self.kfd_node
        return chip("amd", entry.device_id if entry is not None else None)

    @property
    def architecture(self) -> str | None:
        return (self.kfd_node.architecture if self.kfd_node is not None else None) or self.chip.architecture


def native_precisions(architecture: str | None) -> tuple[str, ...] | None:
    """Return the native precisions of a chip, `None` if the chip is not known.

    Args:
        architecture: `gfx1100`.
    """
    if architecture is None or not architecture.startswith(("gfx9", "gfx10", "gfx11", "gfx12")):
        return None
    half = ("bfloat16", "float16") if architecture.startswith(_BFLOAT16) else ("float16",)
    return ("float64", "float32", *half)


def _detected(card: _Facts, busy: dict[int, tuple[Process, ...]]) -> DetectedCard:
    integrated, unified = _part_of_processor(card)
    total, free = _memory(card, unified)
    node = card.kfd_node
    uuid = node.uuid if node is not None else None
    spec = DeviceSpec(
        id=f"hip:{node.index if node is not None else 0}",
        backend="hip",
        index=node.index if node is not None else 0,
        name=_name(card),
        vendor="amd",
        memory_bytes=total,
        uuid=uuid,
        driver=sysfs.driver_version(card.machine, card.bus.driver if card.bus is not None else None),
        pci=card.address,
        architecture=card.architecture,
        integrated=integrated,
        unified_memory=unified,
        precisions=native_precisions(card.architecture),
        mask=(uuid or str(node.index)) if node is not None else None,
    )
    lost = _lost(card)
    if lost is not None:
        return DetectedCard(spec, lost=lost)
    processes = busy.get(node.gpu_id) if node is not None else None
    return DetectedCard(spec, _reading(card, free, processes), undriven=_undriven(card))


def _name(card: _Facts) -> str:
    """Return the card's name with its vendor: AMD SMI's, the board's own, that of its PCI id."""
    name = card.smi.name() if card.smi is not None else None
    name = name or card.machine.text(card.folder / "product_name") or None
    if name is None:
        return card.chip.name
    return name if name.startswith(WORDS["amd"]) else f"{WORDS['amd']} {name}"


def _part_of_processor(card: _Facts) -> tuple[bool, bool]:
    """Return whether a card is part of a processor, and whether its memory is the host's."""
    if "MI300A" in card.chip.name:  # the accelerator that its machine was bought for
        return False, True
    if card.architecture is not None:
        integrated = card.architecture in IN_PROCESSORS
        return integrated, integrated
    dedicated, shared = _pools(card)
    integrated = dedicated is not None and shared is not None and dedicated <= _SMALL_BYTES < shared
    return integrated, integrated


def _pools(card: _Facts) -> tuple[int | None, int | None]:
    """Return the bytes of a card's own memory, and the bytes of the host's that it may use."""
    dedicated, shared = (card.number(f"mem_info_{pool}_total") for pool in ("vram", "gtt"))
    return sysfs.positive(dedicated), sysfs.positive(shared)


def _memory(card: _Facts, unified: bool) -> tuple[int | None, int | None]:
    """Return a card's total and free bytes.

    If the memory is the host's, ROCm takes all of it from the larger of two pools: the memory that the
    firmware set aside, or the memory that the driver may borrow (`apu_prefer_gtt` in Linux's amdgpu). No
    program gets the sum of both, and the driver cannot borrow more than the host has.
    """
    dedicated, shared = _pools(card)
    host, available = sysfs.host_memory(card.machine)
    pool, total = "vram", dedicated
    if unified and shared is not None and shared > (dedicated or 0):
        pool, total = "gtt", min(shared, host) if host is not None else shared
    used = card.number(f"mem_info_{pool}_used")
    if total is None or used is None:
        return total, None
    free = max(0, total - used)
    return total, min(free, available) if pool == "gtt" and available is not None else free


def _reading(card: _Facts, free: int | None, processes: tuple[Process, ...] | None) -> Reading:
    smi = card.smi
    utilisation = sysfs.percent(card.number("gpu_busy_percent"))
    heat = card.reading(1000, "temp1_input")
    power = card.reading(1e6, "power1_average", "power1_input")
    if smi is not None:
        utilisation = smi.utilisation() if utilisation is None else utilisation
        heat = smi.temperature() if heat is None else heat
        power = smi.power() if power is None else power
    return Reading(
        memory_free_bytes=free,
        utilisation=utilisation,
        temperature_celsius=heat,
        power_watts=power,
        power_limit_watts=card.reading(1e6, "power1_cap"),
        clock_mhz=card.reading(1e6, "freq1_input"),
        memory_clock_mhz=card.reading(1e6, "freq2_input"),
        fan=card.fan(),
        throttled=smi.throttled() if smi is not None else None,
        processes=processes,
    )


def _gauged(card: _Facts, spec: DeviceSpec) -> Reading:
    lost = _lost(card) if card.folder.exists() else "it is no longer on the PCI bus"
    if lost is not None:
        raise CardLostError(lost)
    _, free = _memory(card, spec.unified_memory)
    return _reading(card, free, None)


def _lost(card: _Facts) -> str | None:
    if card.bus is None:
        return "it is no longer on the PCI bus; restart the machine"
    answer = card.off_the_bus()
    if answer is not None or card.bus.driver != "amdgpu":
        return answer
    if card.machine.text(card.folder / "mem_info_vram_total") is None:
        return "the amdgpu driver says nothing of it any more; see sudo dmesg, then restart the machine"
    return None


def _undriven(card: _Facts) -> str | None:
    assert card.bus is not None
    wrong = sysfs.wrong_driver(card.bus, ("amdgpu",)) or sysfs.closed(card.machine, "/dev/kfd", _CONTAINER)
    if wrong is not None:
        return wrong
    node = card.node("renderD")
    if node is not None:
        wrong = sysfs.closed(card.machine, f"/dev/dri/{node.name}", _CONTAINER)
    if wrong is None and card.kfd_node is None:
        return "ROCm's part of the kernel driver does not list it: ROCm does not support its chip"
    return wrong


def _foreign_chip(architecture: str | None) -> str:
    """Return a hint for chips that ROCm's wheels hold no code for."""
    if architecture is None:
        return ""
    return (
        f" If this torch was built without code for {architecture} (torch.cuda.get_arch_list()), setting "
        "HSA_OVERRIDE_GFX_VERSION to that of a related chip may help."
    )
