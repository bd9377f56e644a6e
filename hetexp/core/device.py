"""The facts about a device as plain values, without drivers and torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GIB = 1024**3
_MARK = " (emulated)"


def plain_name(name: str) -> str:
    """Return a device's name without the mark of an emulated one."""
    return name.removesuffix(_MARK)


@dataclass(frozen=True)
class DeviceSpec:
    """One device that a rank drives."""

    id: str
    """Unique and stable within a run, for logs, charts and the summary: `cpu:0`, `cuda:1`, `emulated:0`."""
    backend: str
    """Backend in `hetexp/hardware`: `cpu`, `cuda`, `hip`, `xpu`, `mps`, `emulated`."""
    index: int
    """Number within the backend, as in that backend's own tools."""
    name: str
    """Name to show; that of an emulated device says so."""
    vendor: str
    """`nvidia`, `intel`, `amd`, `apple` or `cpu`."""
    memory_bytes: int | None = None
    """Total memory; `None` if it could not be read."""
    uuid: str | None = None
    """The vendor's unique name of the device; that of a MIG instance starts with `MIG-`."""
    driver: str | None = None
    number: int | None = None
    """Number in `hetexp gpus` and `hardware.gpu_ids`: by the order on the PCI bus, including hidden cards."""
    pci: str | None = None
    """PCI address as the kernel writes it (`0000:03:00.0`), the same in every vendor's tools."""
    pcie_generation: int | None = None
    """Highest generation of its link to the host that card and slot support, from the driver."""
    pcie_lanes: int | None = None
    """Largest number of lanes, likewise."""
    architecture: str | None = None
    """`sm_86`, `gfx1100`, `xe-hpg`."""
    integrated: bool = False
    """Whether it is part of the processor; then it is not chosen by default."""
    unified_memory: bool = False
    """Whether its memory is the host's."""
    precisions: tuple[str, ...] | None = None
    """Native precisions, by their names in the catalogue; `None`: not known."""
    memory_free_bytes: int | None = None
    """Free memory when the device was chosen."""
    power_limit_watts: float | None = None
    """The driver's power limit, or the catalogue's figure of an emulated card."""
    rates: dict[str, float] | None = field(default=None, hash=False)
    """The catalogue's peak rates in TFLOP/s by precision, if it has the card."""
    mask: str | None = None
    """Value of the vendor's visibility variable for a process that sees only this device."""
    card: str | None = None
    """Catalogue name of the card whose speed an emulated device has."""
    card_facts: dict[str, Any] | None = field(default=None, hash=False)
    """That card's figures (`hetexp.hardware.catalogue.Card`), so that a rank needs no user's own catalogue,
    and every figure of an emulated run is in its plan."""
    host: str | None = None
    """Host of the device if there are several; `None`: this machine."""
    slow: float = 1.0
    """Factor that slows a real device down."""
    limited: bool = False
    """Whether a real device may use only `memory_bytes` of its memory."""
    python: str | None = None
    """Interpreter of the rank; `None`: the launcher's own."""
    torch: str | None = None
    """Version of that interpreter's torch, from its files; `None`: not looked up."""

    @property
    def emulated(self) -> bool:
        """Whether it is emulated, slowed down or limited, so that its numbers are not the hardware's."""
        return self.backend == "emulated" or self.slow != 1.0 or self.limited

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DeviceSpec:
        """Return the device from its `dataclasses.asdict`, after JSON."""
        precisions = raw.get("precisions")
        return cls(**raw | {"precisions": tuple(precisions) if precisions is not None else None})

    def __str__(self) -> str:
        return f"{self.id} ({self.name})"
