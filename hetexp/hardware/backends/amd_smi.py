"""Reads AMD SMI; a query that fails costs only its field.

Names and units are those of https://rocm.docs.amd.com/projects/amdsmi. The library comes with ROCm; without a
driver its import raises KeyError.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hetexp.core.errors import logged
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import normalised

_SENSORS = ("EDGE", "HOTSPOT", "JUNCTION")
"""Sensors of a card's temperature, the preferred first; MI300 has none at its edge."""
_POWERS = ("current_socket_power", "average_socket_power", "socket_power")
"""Fields of the power in watts: newer cards have the first, older ones the second."""

_HELD_BACK = ((0xFF, "power cap"), (0xFF << 16, "current limit"), (0xFFEF << 32, "too hot"))
"""Bits of `indep_throttle_status`, as `SMU_THROTTLER_…_BIT` in Linux's amdgpu_smu.h counts them. That of the
hot spot (36) is left out: cards at their highest clock set it, too."""


@contextmanager
def opened(machine: Machine) -> Iterator[dict[str, Smi]]:
    """Open AMD SMI and yield its cards by PCI address; none if it fails."""
    library = machine.library("amdsmi")
    if library is None or not _succeeds(library, "amdsmi_init"):
        yield {}
        return
    try:
        yield _cards(library)
    finally:
        _succeeds(library, "amdsmi_shut_down")


class Smi:
    """A card of AMD SMI."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def name(self) -> str | None:
        """Return the name on the market, `Radeon RX 7900 XTX`."""
        name = self._field("amdsmi_get_gpu_asic_info", "market_name")
        return name if isinstance(name, str) and not name.startswith(("N/A", "0x")) else None

    def utilisation(self) -> float | None:
        """Return the fraction of the last moments in which the card was busy."""
        percent = self._field("amdsmi_get_gpu_activity", "gfx_activity")
        return percent / 100 if isinstance(percent, (int, float)) and 0 <= percent <= 100 else None

    def temperature(self) -> float | None:
        """Return degrees Celsius of the first sensor of the card."""
        kinds = getattr(self._library, "AmdSmiTemperatureType", None)
        current = getattr(getattr(self._library, "AmdSmiTemperatureMetric", None), "CURRENT", None)
        for sensor in _SENSORS:
            kind = getattr(kinds, sensor, None)
            degrees = self._ask("amdsmi_get_temp_metric", kind, current) if kind is not None else None
            if isinstance(degrees, (int, float)) and degrees > 0:
                return float(degrees)
        return None

    def power(self) -> float | None:
        """Return the power of the card in watts."""
        for name in _POWERS:
            watts = self._field("amdsmi_get_power_info", name)
            if isinstance(watts, (int, float)) and watts > 0:
                return float(watts)
        return None

    def energy_joules(self) -> float | None:
        """Return the energy since the driver was loaded; the library counts units of some microjoules."""
        answer = self._ask("amdsmi_get_energy_count")
        if not isinstance(answer, Mapping):
            return None
        count = answer.get("energy_accumulator", answer.get("power"))  # the second before ROCm 6.4
        size = answer.get("counter_resolution")
        valid = isinstance(count, (int, float)) and isinstance(size, (int, float)) and count * size > 0
        return count * size / 1e6 if valid else None

    def throttled(self) -> tuple[str, ...] | None:
        """Return why the card's clocks are held back, in words."""
        bits = self._field("amdsmi_get_gpu_metrics_info", "indep_throttle_status")
        if not isinstance(bits, int):
            return None
        return tuple(words for mask, words in _HELD_BACK if bits & mask)

    def _field(self, function: str, name: str) -> Any:
        answer = self._ask(function)
        return answer.get(name) if isinstance(answer, Mapping) else None

    def _ask(self, function: str, *args: Any) -> Any:
        with logged(f"AMD SMI does not answer {function}"):  # for a value that a card lacks
            return getattr(self._library, function)(self._handle, *args)
        return None


def _cards(library: Any) -> dict[str, Smi]:
    cards = {}
    with logged("AMD SMI lists no cards", logging.WARNING):
        for handle in library.amdsmi_get_processor_handles():
            with logged("AMD SMI gives no address of a card"):  # one that was lost hides no other
                address = library.amdsmi_get_gpu_device_bdf(handle)
                cards[normalised(address)] = Smi(library, handle)
    return cards


def _succeeds(library: Any, function: str) -> bool:
    with logged(f"AMD SMI does not answer {function}"):
        getattr(library, function)()
        return True
    return False
