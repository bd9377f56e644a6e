"""Reads Level Zero Sysman, Intel's library of card facts; a query that fails costs only its field.

Names and units: https://oneapi-src.github.io/level-zero-spec/level-zero/latest/sysman/api.html. pyzes is its
Python binding, whose import raises OSError without the library. It opens no card for computing and ignores
affinity masks.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cached_property
from typing import Any

from hetexp.core.errors import logged
from hetexp.hardware.backends.sysfs import positive
from hetexp.hardware.detection.machine import Machine

_OK = 0
"""`ZE_RESULT_SUCCESS`."""
_ALL_ENGINES = 0
"""`ZES_ENGINE_GROUP_ALL`."""


class Card:
    """One card as Sysman reports it.

    Args:
        library: pyzes.
        device: handle of the card.
        address: address on the PCI bus, as the kernel writes it.
    """

    def __init__(self, library: Any, device: Any, address: str) -> None:
        self.address = address
        self._library, self._device = library, device
        facts = _filled(library, "zesDeviceGetProperties", device, "device_properties")
        self.name = _text(facts.core.name) if facts is not None else None
        """`Intel(R) Arc(TM) A770 Graphics`."""
        self.driver = _text(facts.driverVersion) if facts is not None else None

    def memory(self) -> tuple[int | None, int | None]:
        """Return the total and free bytes of the card's own memory, summed over its tiles."""
        library = self._library
        sizes: list[int | None] = []
        free: list[int | None] = []
        with logged("Level Zero gives no memory sizes"):
            for module in self._handles(library.zesDeviceEnumMemoryModules, library.zes_mem_handle_t):
                facts = _filled(library, "zesMemoryGetProperties", module, "mem_properties")
                state = _filled(library, "zesMemoryGetState", module, "mem_state")
                if facts is not None and facts.location != library.ZES_MEM_LOC_DEVICE:
                    continue
                physical = positive(facts.physicalSize) if facts is not None else None
                # Some drivers know only what may be allocated.
                sizes.append(physical or (positive(state.size) if state is not None else None))
                free.append(state.free if state is not None else None)
        total = _sum(sizes)
        return total, _sum(free) if total is not None else None

    def temperature(self) -> float | None:
        """Return degrees Celsius of the GPU."""
        library = self._library
        with logged("Level Zero gives no temperature"):
            for sensor in self._handles(library.zesDeviceEnumTemperatureSensors, library.zes_temp_handle_t):
                facts = _filled(library, "zesTemperatureGetProperties", sensor, "temp_properties")
                degrees = ctypes.c_double(0.0)
                if facts is None or facts.type != library.ZES_TEMP_SENSORS_GPU:
                    continue
                if library.zesTemperatureGetState(sensor, ctypes.byref(degrees)) == _OK and degrees.value > 0:
                    return degrees.value
        return None

    def active(self) -> tuple[float, float] | None:
        """Return the time in which any engine worked and the time of the counter, in microseconds."""
        if self._whole_engine is None:
            return None
        with logged("Level Zero gives no activity"):
            stats = self._library.zes_engine_stats_t()
            if self._library.zesEngineGetActivity(self._whole_engine, ctypes.byref(stats)) == _OK:
                return float(stats.activeTime), float(stats.timestamp)
        return None

    @cached_property
    def _whole_engine(self) -> Any | None:
        """Handle that counts all engines of the card; `None`: none, or several tiles have one each."""
        library, engines = self._library, []
        with logged("Level Zero gives no engines"):
            for engine in self._handles(library.zesDeviceEnumEngineGroups, library.zes_engine_handle_t):
                facts = _filled(library, "zesEngineGetProperties", engine, "engine_properties")
                if facts is not None and facts.type == _ALL_ENGINES:
                    engines.append(engine)
        return engines[0] if len(engines) == 1 else None

    def _handles(self, function: Any, kind: Any) -> list[Any]:
        return _listed(function, (self._device,), kind)


def cards(machine: Machine) -> dict[str, Card]:
    """Return Intel's cards by address; none if the library is absent or its driver does not answer."""
    library = machine.library("pyzes")
    by_address: dict[str, Card] = {}
    # Whatever a binding makes of a driver that is not as it expects.
    with logged("Level Zero lists no cards", logging.WARNING):
        if library is None or library.zesInit(0) != _OK:
            return {}
        for driver in _listed(library.zesDriverGet, (), library.zes_driver_handle_t):
            for device in _listed(library.zesDeviceGet, (driver,), library.zes_device_handle_t):
                pci = _filled(library, "zesDevicePciGetProperties", device, "pci_properties")
                if pci is not None:
                    place = pci.address
                    address = f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}.{place.function:x}"
                    by_address[address] = Card(library, device, address)
    return by_address


def _sum(numbers: list[int | None]) -> int | None:
    """Return a sum, `None` if a part of it is not known or there are no parts."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None


def _listed(function: Any, of: tuple[Any, ...], kind: Any) -> list[Any]:
    """Return the handles that a function gives after it was asked for their number."""
    count = ctypes.c_uint32(0)
    if function(*of, ctypes.byref(count), None) != _OK or count.value == 0:
        return []
    handles = (kind * count.value)()
    if function(*of, ctypes.byref(count), handles) != _OK:
        return []
    # Plain numbers come out of an array: the library's functions want its own type again.
    return [kind(getattr(handle, "value", handle)) for handle in handles[: count.value]]


def _filled(library: Any, function: str, handle: Any, kind: str) -> Any | None:
    """Return the structure that a function fills, `None` if it fails.

    Args:
        kind: `pci_properties` for `zes_pci_properties_t`.
    """
    with logged(f"Level Zero does not answer {function}"):
        facts = getattr(library, f"zes_{kind}_t")()
        facts.stype = getattr(library, f"ZES_STRUCTURE_TYPE_{kind.upper()}")
        if getattr(library, function)(handle, ctypes.byref(facts)) == _OK:
            return facts
    return None


def _text(value: bytes | str) -> str | None:
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
    return text.strip() or None
