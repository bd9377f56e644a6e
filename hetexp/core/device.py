"""What is known of a device: plain facts, no driver, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GIB = 1024**3


@dataclass(frozen=True)
class DeviceSpec:
    """One device that a rank drives.

    `id` is stable within a run and keys logs, charts and the summary: `cpu:0`, `cuda:1`, `emulated:0`.
    """

    id: str
    backend: str
    """`cpu`, `cuda`, `hip`, `xpu`, `mps`, `emulated`: the file in `hetexp/hardware` that drives it."""
    index: int
    """Number within the backend, as that backend's own tools count."""
    name: str
    """Name for people; an emulated device says so here."""
    vendor: str
    """`nvidia`, `intel`, `amd`, `apple` or `cpu`."""
    memory_bytes: int | None = None
    """Total memory; `None` where it could not be read."""
    uuid: str | None = None
    """Vendor's own name of this very device; a MIG instance's starts with `MIG-`."""
    driver: str | None = None
    number: int | None = None
    """Its id in `hetexp gpus` and `hardware.gpu_ids`: cards are numbered as they sit on the PCI bus, whatever
    a visibility variable hides."""
    pci: str | None = None
    """Address on the bus as the kernel writes it, `0000:03:00.0`: the same in every vendor's tools."""
    pcie_generation: int | None = None
    """Of its link to the host, the highest that card and slot can do, as the driver tells it."""
    pcie_lanes: int | None = None
    """Likewise."""
    architecture: str | None = None
    """`sm_86`, `gfx1100`, `xe-hpg`."""
    integrated: bool = False
    """Whether it is part of the processor; then it is not chosen by default."""
    unified_memory: bool = False
    """Whether its memory is the host's."""
    precisions: tuple[str, ...] | None = None
    """Precisions that it computes in natively, as the catalogue names them; `None`: not known."""
    memory_free_bytes: int | None = None
    """Of it, what was free when the device was chosen."""
    power_limit_watts: float | None = None
    """What the driver lets it draw, or the catalogue's figure of an emulated card."""
    rates: dict[str, float] | None = field(default=None, hash=False)
    """Peak rates of the catalogue in TFLOP/s by precision, where it knows the card."""
    mask: str | None = None
    """What the vendor's visibility variable must be so that a process sees this device only."""
    card: str | None = None
    """Catalogue name of the card that an emulated device is paced to."""
    card_facts: dict[str, Any] | None = field(default=None, hash=False)
    """That card's figures as selected (`hetexp.hardware.catalogue.Card`): a rank need not find a person's own
    catalogue, and every figure of an emulated run is in its plan."""
    host: str | None = None
    """Machine that an emulated device is in, where a mix spans several; `None`: this one."""
    slow: float = 1.0
    """Factor by which a real device is made slower than it is."""
    limited: bool = False
    """Whether a real device may use only `memory_bytes` of what it has."""
    python: str | None = None
    """Interpreter of the rank; `None` means the launcher's own."""
    torch: str | None = None
    """Version of that interpreter's torch as its files say; `None`: not looked up."""

    @property
    def emulated(self) -> bool:
        """Whether its numbers are not those of hardware as it is: emulated, slowed or limited."""
        return self.backend == "emulated" or self.slow != 1.0 or self.limited

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DeviceSpec:
        """Return what `dataclasses.asdict` made plain and JSON carried."""
        precisions = raw.get("precisions")
        return cls(**raw | {"precisions": tuple(precisions) if precisions is not None else None})

    def __str__(self) -> str:
        return f"{self.id} ({self.name})"
