"""Level Zero Sysman, Intel's library of card facts, asked so that one query that fails costs one field.

Names and units: https://oneapi-src.github.io/level-zero-spec/level-zero/latest/sysman/api.html. pyzes is its
Python binding, which raises OSError when it is imported without the library; it opens no card for computing
and heeds no affinity mask.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hetexp.hardware.backends.sysfs import positive
from hetexp.hardware.detection.machine import Machine

_OK = 0
"""`ZE_RESULT_SUCCESS`."""
_ALL_ENGINES = 0
"""`ZES_ENGINE_GROUP_ALL`."""


@dataclass(frozen=True)
class Card:
    """What Sysman says of a card."""

    address: str
    """On the PCI bus, as the kernel writes it."""
    name: str | None = None
    """`Intel(R) Arc(TM) A770 Graphics`."""
    driver: str | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    temperature_celsius: float | None = None


def cards(machine: Machine) -> dict[str, Card]:
    """Return Intel's cards by address; none if the library is absent or its driver does not answer."""
    library = machine.library("pyzes")
    if library is None:
        return {}
    with suppress(Exception):  # whatever a binding makes of a driver that is not as it expects
        if library.zesInit(0) == _OK:
            described = [_card(library, device) for device in _devices(library)]
            return {card.address: card for card in described if card is not None}
    return {}


class Watch:
    """What Sysman tells of one card again and again.

    Args:
        library: pyzes.
        device: its handle of the card.
    """

    def __init__(self, library: Any, device: Any) -> None:
        self._library, self._device = library, device
        self._engine = _whole_engine(library, device)

    def temperature(self) -> float | None:
        """Return degrees Celsius."""
        return _temperature(self._library, self._device)

    def memory(self) -> tuple[int | None, int | None]:
        """Return the total and free bytes."""
        return _memory(self._library, self._device)

    def active(self) -> tuple[float, float] | None:
        """Return two counters, of the time in which any engine worked and of all time, in microseconds."""
        if self._engine is None:
            return None
        with suppress(Exception):
            stats = self._library.zes_engine_stats_t()
            if self._library.zesEngineGetActivity(self._engine, ctypes.byref(stats)) == _OK:
                return float(stats.activeTime), float(stats.timestamp)
        return None


def watches(machine: Machine) -> dict[str, Watch]:
    """Return what tells Intel's cards' state, by address; none if the library or its driver is absent."""
    library = machine.library("pyzes")
    by_address: dict[str, Watch] = {}
    with suppress(Exception):
        if library is not None and library.zesInit(0) == _OK:
            for device in _devices(library):
                address = _address(library, device)
                if address is not None:
                    by_address[address] = Watch(library, device)
    return by_address


def _whole_engine(library: Any, device: Any) -> Any | None:
    """Return the handle that counts all engines of a card; `None`: it has none, or several tiles have one."""
    engines = []
    with suppress(Exception):
        for engine in _listed(library.zesDeviceEnumEngineGroups, (device,), library.zes_engine_handle_t):
            facts = _filled(
                library, "zesEngineGetProperties", engine, "zes_engine_properties_t", "ENGINE_PROPERTIES"
            )
            if facts is not None and facts.type == _ALL_ENGINES:
                engines.append(engine)
    return engines[0] if len(engines) == 1 else None


def _address(library: Any, device: Any) -> str | None:
    pci = _filled(library, "zesDevicePciGetProperties", device, "zes_pci_properties_t", "PCI_PROPERTIES")
    if pci is None:
        return None
    where = pci.address
    return f"{where.domain:04x}:{where.bus:02x}:{where.device:02x}.{where.function:x}"


def _devices(library: Any) -> list[Any]:
    drivers = _listed(library.zesDriverGet, (), library.zes_driver_handle_t)
    return [
        device
        for driver in drivers
        for device in _listed(library.zesDeviceGet, (driver,), library.zes_device_handle_t)
    ]


def _card(library: Any, device: Any) -> Card | None:
    address = _address(library, device)
    if address is None:
        return None
    facts = _filled(library, "zesDeviceGetProperties", device, "zes_device_properties_t", "DEVICE_PROPERTIES")
    total, free = _memory(library, device)
    return Card(
        address,
        name=_text(facts.core.name) if facts is not None else None,
        driver=_text(facts.driverVersion) if facts is not None else None,
        memory_bytes=total,
        memory_free_bytes=free,
        temperature_celsius=_temperature(library, device),
    )


def _memory(library: Any, device: Any) -> tuple[int | None, int | None]:
    """Return the total and free bytes of a card's own memory, summed over its tiles."""
    sizes: list[int | None] = []
    free: list[int | None] = []
    with suppress(Exception):
        for module in _listed(library.zesDeviceEnumMemoryModules, (device,), library.zes_mem_handle_t):
            facts = _filled(
                library, "zesMemoryGetProperties", module, "zes_mem_properties_t", "MEM_PROPERTIES"
            )
            state = _filled(library, "zesMemoryGetState", module, "zes_mem_state_t", "MEM_STATE")
            if facts is not None and facts.location != library.ZES_MEM_LOC_DEVICE:
                continue
            physical = positive(facts.physicalSize) if facts is not None else None
            # Some drivers know only what may be allocated.
            sizes.append(physical or (positive(state.size) if state is not None else None))
            free.append(state.free if state is not None else None)
    total = _sum(sizes)
    return total, _sum(free) if total is not None else None


def _sum(numbers: list[int | None]) -> int | None:
    """Return a sum, `None` if a part of it is not known or there are no parts."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None


def _temperature(library: Any, device: Any) -> float | None:
    with suppress(Exception):
        for sensor in _listed(library.zesDeviceEnumTemperatureSensors, (device,), library.zes_temp_handle_t):
            facts = _filled(
                library, "zesTemperatureGetProperties", sensor, "zes_temp_properties_t", "TEMP_PROPERTIES"
            )
            degrees = ctypes.c_double(0.0)
            if facts is None or facts.type != library.ZES_TEMP_SENSORS_GPU:
                continue
            if library.zesTemperatureGetState(sensor, ctypes.byref(degrees)) == _OK and degrees.value > 0:
                return degrees.value
    return None


def _listed(function: Any, of: tuple[Any, ...], kind: Any) -> list[Any]:
    """Return the handles that a function gives when it is asked for their number first."""
    count = ctypes.c_uint32(0)
    if function(*of, ctypes.byref(count), None) != _OK or count.value == 0:
        return []
    handles = (kind * count.value)()
    if function(*of, ctypes.byref(count), handles) != _OK:
        return []
    # Plain numbers come out of an array: the library's functions want its own type again.
    return [kind(getattr(handle, "value", handle)) for handle in handles[: count.value]]


def _filled(library: Any, function: str, handle: Any, structure: str, kind: str) -> Any | None:
    """Return a structure that a function fills, `None` if it does not."""
    with suppress(Exception):
        facts = getattr(library, structure)()
        facts.stype = getattr(library, f"ZES_STRUCTURE_TYPE_{kind}")
        if getattr(library, function)(handle, ctypes.byref(facts)) == _OK:
            return facts
    return None


def _text(value: bytes | str) -> str | None:
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
    return text.strip() or None
