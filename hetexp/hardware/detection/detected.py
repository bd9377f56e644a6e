"""A detected card: its facts, its latest readings, and the reasons that keep it from use."""

from __future__ import annotations

from dataclasses import dataclass

from hetexp.core.device import DeviceSpec


@dataclass(frozen=True)
class Process:
    """A process that holds a card."""

    pid: int
    memory_bytes: int | None = None
    """Memory that it holds on the card; `None` if the driver does not say."""
    computes: bool = True
    """Whether it computes; `False`: it only draws."""


@dataclass(frozen=True, kw_only=True)
class Sensors:
    """Sensor values of a device at one moment; `None` if a value is not known, never 0."""

    utilisation: float | None = None
    """Fraction of the last moments in which it was busy, 0 to 1."""
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    clock_mhz: float | None = None
    """Clock of its cores."""
    memory_clock_mhz: float | None = None
    fan: float | None = None
    """Speed of its fan as a fraction of the highest, 0 to 1."""
    fan_rpm: float | None = None
    """The same in turns a minute, if the driver reports only that."""
    throttled: tuple[str, ...] | None = None
    """Why its clocks are held back, in words; empty if they are not."""


@dataclass(frozen=True, kw_only=True)
class Reading(Sensors):
    """A driver's reading of a card at one moment."""

    memory_free_bytes: int | None = None
    processes: tuple[Process, ...] | None = None


@dataclass(frozen=True)
class Seen:
    """One device as a torch build reports it from its own interpreter (`hetexp.hardware.detection.probe`)."""

    index: int
    name: str
    memory_bytes: int | None = None
    uuid: str | None = None
    pci: str | None = None
    """Address as the kernel writes it."""
    architecture: str | None = None
    """`sm_86`; of NVIDIA's cards only."""
    integrated: bool = False
    """Whether its memory is the host's; of NVIDIA's and AMD's cards only."""


@dataclass(frozen=True)
class DetectedCard:
    """One card of the machine, usable or not."""

    spec: DeviceSpec
    reading: Reading = Reading()
    lost: str | None = None
    """The driver's words when it could no longer reach the card."""
    undriven: str | None = None
    """Why no program can use it, whatever its torch, with the fix: `the amdgpu driver is not loaded …`."""
    hidden_by: str | None = None
    """The visibility variable that hides it, `CUDA_VISIBLE_DEVICES=1`."""
    python: str | None = None
    """Interpreter whose torch drives it; `None`: this process's own, or none at all (`unusable`)."""
    unusable: str | None = None
    """Why no interpreter that hetexp knows drives it, with the command that fixes it."""
    busy: str | None = None
    """Who uses it at the moment."""

    @property
    def why_not(self) -> str | None:
        """Why it cannot be used now, the most lasting reason first; `None` if it can."""
        if self.lost is not None:
            return f"lost: {self.lost}"
        hidden = f"hidden by {self.hidden_by}" if self.hidden_by is not None else None
        busy = f"busy: {self.busy}" if self.busy is not None else None
        return self.undriven or self.unusable or hidden or busy

    @property
    def state(self) -> str:
        """One word: `available`, `busy`, `hidden`, `unusable` or `lost`."""
        if self.lost is not None:
            return "lost"
        if self.undriven is not None or self.unusable is not None:
            return "unusable"
        if self.hidden_by is not None:
            return "hidden"
        return "busy" if self.busy is not None else "available"
