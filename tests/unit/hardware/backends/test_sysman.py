"""Sysman as pyzes binds it, with a library that fills the library's own structures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_drivers import GIB, FakeZes, ZesCard

from hetexp.hardware.backends import sysman
from hetexp.hardware.detection.machine import Machine

A770 = ZesCard("0000:03:00.0")


def cards(tmp_path: Path, library: Any) -> dict[str, sysman.Card]:
    def load(name: str) -> Any:
        assert name == "pyzes"
        if isinstance(library, Exception):
            raise library
        return library

    return sysman.cards(Machine(root=tmp_path, load=load))


def facts(card: sysman.Card) -> dict[str, Any]:
    total, free = card.memory()
    memory = {"memory_bytes": total, "memory_free_bytes": free}
    names = {"address": card.address, "name": card.name, "driver": card.driver}
    return {**names, **memory, "temperature_celsius": card.temperature()}


def test_cards_are_described(tmp_path: Path) -> None:
    igpu = ZesCard("0000:00:02.0", "Intel(R) UHD Graphics 770", memory=(), degrees=0.0)
    by_address = cards(tmp_path, FakeZes(A770, igpu))
    assert {address: facts(card) for address, card in by_address.items()} == {
        "0000:03:00.0": {
            "address": "0000:03:00.0",
            "name": "Intel(R) Arc(TM) A770 Graphics",
            "driver": "1.6.33578",
            "memory_bytes": 16 * GIB,
            "memory_free_bytes": 15 * GIB,
            "temperature_celsius": 44.0,
        },
        "0000:00:02.0": {
            "address": "0000:00:02.0",
            "name": "Intel(R) UHD Graphics 770",
            "driver": "1.6.33578",
            "memory_bytes": None,
            "memory_free_bytes": None,
            "temperature_celsius": None,
        },
    }


def test_tiles_are_added(tmp_path: Path) -> None:
    two = ZesCard("0000:4b:00.0", memory=(64 * GIB, 64 * GIB), free=60 * GIB)
    (card,) = cards(tmp_path, FakeZes(two)).values()
    assert card.memory() == (128 * GIB, 120 * GIB)


def test_a_physical_size_of_0_is_not_a_size(tmp_path: Path) -> None:
    (card,) = cards(tmp_path, FakeZes(ZesCard("0000:03:00.0", memory=(0,), free=0))).values()
    assert card.memory() == (None, None)


def test_a_tile_of_unknown_size_makes_the_sum_unknown(tmp_path: Path) -> None:
    two = ZesCard("0000:4b:00.0", memory=(64 * GIB, 0))
    (card,) = cards(tmp_path, FakeZes(two)).values()
    assert card.memory() == (None, None)


def test_the_hosts_memory_is_not_the_cards(tmp_path: Path) -> None:
    (card,) = cards(tmp_path, FakeZes(ZesCard("0000:03:00.0", location=0))).values()
    assert card.memory()[0] is None


@pytest.mark.parametrize("error", [OSError("libze_loader.so.1"), ImportError("pyzes"), KeyError("x")])
def test_without_the_library_there_are_none(tmp_path: Path, error: Exception) -> None:
    assert cards(tmp_path, error) == {}


ALL = ("zesInit", "zesDriverGet", "zesDeviceGet", "zesDevicePciGetProperties")
NONE_OF = {
    "zesDeviceGetProperties": {"name", "driver"},
    "zesDeviceEnumMemoryModules": {"memory_bytes", "memory_free_bytes"},
    "zesMemoryGetProperties": set(),
    "zesMemoryGetState": {"memory_free_bytes"},
    "zesDeviceEnumTemperatureSensors": {"temperature_celsius"},
    "zesTemperatureGetProperties": {"temperature_celsius"},
    "zesTemperatureGetState": {"temperature_celsius"},
}


def test_every_function_that_is_asked_is_made_to_fail() -> None:
    assert {*ALL, *NONE_OF} == set(FakeZes.FUNCTIONS)


@pytest.mark.parametrize("how", ["fails", "raises"])
@pytest.mark.parametrize("function", FakeZes.FUNCTIONS)
def test_a_function_that_fails_costs_its_fields(tmp_path: Path, function: str, how: str) -> None:
    by_address = cards(tmp_path, FakeZes(A770, **{how: [function]}))
    if function in ALL:
        assert by_address == {}
        return
    (card,) = by_address.values()
    assert {name for name, value in facts(card).items() if value is None} == NONE_OF[function]
