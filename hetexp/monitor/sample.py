"""What is known of a device at one moment. What is not known is null, never 0."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from typing import Any

from hetexp.core.device import DeviceSpec
from hetexp.hardware.detection.detected import Reading


@dataclass(frozen=True)
class Device:
    """One device that is sampled."""

    key: str
    """The same for one device for ever, and no other's on any machine."""
    host: str
    device: str
    """`cuda:0`, as plans and `hetexp gpus` call it; the processor is `cpu`."""
    number: int | None
    """In `hetexp gpus`; `None`: it is no card."""
    name: str
    vendor: str
    backend: str
    uuid: str | None = None
    pci: str | None = None
    integrated: bool = False
    unified_memory: bool = False
    emulated: bool = False
    """Whether its values are modelled."""
    run_id: str | None = None
    """The run that an emulated device belongs to."""

    @classmethod
    def of(cls, spec: DeviceSpec, run_id: str | None = None) -> Device:
        """Return a device of this machine.

        Args:
            run_id: of the run whose device it is, where it is emulated: another's has the same name.
        """
        host = host_name()
        own = spec.uuid or spec.pci or spec.id
        return cls(
            key="/".join([host, *([run_id] if run_id is not None else []), own]),
            host=host,
            device=spec.id,
            number=spec.number,
            name=spec.name,
            vendor=spec.vendor,
            backend=spec.backend,
            uuid=spec.uuid,
            pci=spec.pci,
            integrated=spec.integrated,
            unified_memory=spec.unified_memory,
            emulated=spec.backend == "emulated",
            run_id=run_id,
        )


@dataclass(frozen=True)
class User:
    """A rank that uses a device."""

    run: str
    """The run's id; of a run that has no plan yet the name of its folder."""
    rank: int | None = None
    """`None`: not known yet."""


@dataclass(frozen=True)
class Sample:
    """One device at one moment; `None` if a value is not known."""

    device: Device
    state: str = "ok"
    """`ok`; `lost`: its driver cannot reach it any more; `unusable`: no program can use it."""
    reason: str | None = None
    """Why it is not `ok`."""
    utilisation: float | None = None
    """Fraction of the last moments in which it was busy, 0 to 1; modelled, in which it computed."""
    memory_used_bytes: int | None = None
    """What is not free; of an emulated device the most that its rank needed so far."""
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    fan: float | None = None
    """Fraction of its highest speed."""
    fan_rpm: float | None = None
    throttled: tuple[str, ...] | None = None
    """Why its clocks are held back; empty where they are not."""
    users: tuple[User, ...] = ()


def of_reading(device: Device, reading: Reading, total: int | None, users: tuple[User, ...]) -> Sample:
    """Return the sample of a card from what its driver says.

    Args:
        total: bytes of its memory.
    """
    free = reading.memory_free_bytes
    return Sample(
        device,
        utilisation=reading.utilisation,
        memory_used_bytes=max(0, total - free) if total is not None and free is not None else None,
        memory_total_bytes=total,
        temperature_celsius=reading.temperature_celsius,
        power_watts=reading.power_watts,
        power_limit_watts=reading.power_limit_watts,
        clock_mhz=reading.clock_mhz,
        memory_clock_mhz=reading.memory_clock_mhz,
        fan=reading.fan,
        fan_rpm=reading.fan_rpm,
        throttled=reading.throttled,
        users=users,
    )


def as_dict(sample: Sample) -> dict[str, Any]:
    """Return a sample and its device's facts as plain types, as `Store.latest` does."""
    values = asdict(sample)
    throttled = list(sample.throttled) if sample.throttled is not None else None
    users = [asdict(user) for user in sample.users]
    return {**values.pop("device"), **values, "throttled": throttled, "users": users}


def host_name() -> str:
    """Return this machine's name."""
    return socket.gethostname() or "localhost"
