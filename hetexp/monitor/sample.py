"""Samples of devices at one moment. An unknown value is null, never 0."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass, fields
from typing import Any

from hetexp.core.device import DeviceSpec
from hetexp.hardware.detection.detected import Reading, Sensors


@dataclass(frozen=True)
class Device:
    """A device that is sampled."""

    key: str
    """Identity of the device: constant, and unique among all machines."""
    host: str
    device: str
    """`cuda:0`, as plans and `hetexp gpus` call it; the processor is `cpu`."""
    number: int | None
    """Number in `hetexp gpus`; `None`: the device is no card."""
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
            run_id: the run of an emulated device, as emulated devices of several runs share their names.
        """
        host = host_name()
        identity = spec.uuid or spec.pci or spec.id
        return cls(
            key="/".join(part for part in (host, run_id, identity) if part is not None),
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
class Sample(Sensors):
    """The state of a device at one moment; a modelled device is busy while it computes."""

    device: Device
    state: str = "ok"
    """`ok`; `lost`: its driver cannot reach it any more; `unusable`: no program can use it."""
    reason: str | None = None
    """Why it is not `ok`."""
    memory_used_bytes: int | None = None
    """Memory in use; of an emulated device the peak of its rank so far."""
    memory_total_bytes: int | None = None
    users: tuple[User, ...] = ()


def of_reading(device: Device, reading: Reading, total: int | None, users: tuple[User, ...]) -> Sample:
    """Return the sample of a card from its driver's reading.

    Args:
        total: bytes of the card's memory.
    """
    free = reading.memory_free_bytes
    used = max(0, total - free) if total is not None and free is not None else None
    sensors = {field.name: getattr(reading, field.name) for field in fields(Sensors)}
    return Sample(device, memory_used_bytes=used, memory_total_bytes=total, users=users, **sensors)


def as_dict(sample: Sample) -> dict[str, Any]:
    """Return a sample and its device's facts as plain types, as `Store.latest` does."""
    values = asdict(sample)
    throttled = list(sample.throttled) if sample.throttled is not None else None
    users = [asdict(user) for user in sample.users]
    return {**values.pop("device"), **values, "throttled": throttled, "users": users}


def host_name() -> str:
    """Return this machine's name."""
    return socket.gethostname() or "localhost"
