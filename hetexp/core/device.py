"""What is known of a device: plain facts, no driver, no torch."""

from __future__ import annotations

from dataclasses import dataclass

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
    python: str | None = None
    """Interpreter of the rank; `None` means the launcher's own."""

    @property
    def emulated(self) -> bool:
        return self.backend == "emulated"

    def __str__(self) -> str:
        return f"{self.id} ({self.name})"
