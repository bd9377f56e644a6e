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
    """`cpu`, `cuda` or `emulated`: the file in `hetexp/hardware` that drives it."""
    index: int
    """Number within the backend, as that backend's own tools count."""
    name: str
    """Name for people; an emulated device says so here."""
    vendor: str
    """`nvidia`, `intel`, `amd`, `apple` or `cpu`."""
    memory_bytes: int | None = None
    """Total memory; `None` where it could not be read."""
    uuid: str | None = None
    """NVML's UUID: the only name that never means another card after a reboot."""
    driver: str | None = None
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

    @property
    def emulated(self) -> bool:
        """Whether its numbers are not those of hardware as it is: emulated, slowed or limited."""
        return self.backend == "emulated" or self.slow != 1.0 or self.limited

    def __str__(self) -> str:
        return f"{self.id} ({self.name})"
