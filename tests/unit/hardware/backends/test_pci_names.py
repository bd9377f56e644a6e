"""The table of PCI ids."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from hetexp.hardware.backends import pci_names
from hetexp.hardware.backends.hip import IN_PROCESSORS, native_precisions
from hetexp.hardware.backends.pci_names import Chip, chip
from hetexp.hardware.backends.xpu import _PRECISIONS, _TOO_OLD

TABLE = Path(pci_names.__file__).with_name("pci_names.txt")
HEADING = re.compile(r"(nvidia sm_[0-9]+|amd gfx[0-9a-f]+|intel [a-z0-9+-]+)( integrated)?")
ROW = re.compile(r"  \S.*\S: [0-9a-f]{4}( [0-9a-f]{4})*")


@pytest.mark.parametrize(
    ("vendor", "device_id", "name"),
    [
        ("nvidia", 0x2204, "NVIDIA GeForce RTX 3090"),
        ("nvidia", 0x1EB8, "NVIDIA Tesla T4"),
        ("nvidia", 0x2335, "NVIDIA H200 SXM 141GB"),
        ("amd", 0x744C, "AMD Radeon RX 7900 XT/7900 XTX/7900 GRE"),
        ("amd", 0x164E, "AMD Radeon Graphics (Raphael)"),
        ("amd", 0x74A1, "AMD Instinct MI300X"),
        ("intel", 0x56A0, "Intel Arc A770"),
        ("intel", 0xE20B, "Intel Arc B580"),
        ("intel", 0xA780, "Intel UHD Graphics 770"),
    ],
)
def test_common_cards_have_names(vendor: str, device_id: int, name: str) -> None:
    assert chip(vendor, device_id).name == name
    assert chip(vendor, device_id).listed


def test_an_id_means_a_card_of_its_vendor_only() -> None:
    assert chip("intel", 0x1902) != chip("amd", 0x1902)
    assert not chip("intel", 0x744C).listed


def test_a_card_that_the_table_has_not_is_told_by_its_id() -> None:
    assert chip("amd", 0x0001) == Chip("AMD GPU 0x0001")
    assert chip("intel", None) == Chip("Intel GPU")


def test_every_line_of_the_table_is_read() -> None:
    ids: Counter[tuple[str, str]] = Counter()
    vendor = ""
    for number, line in enumerate(TABLE.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            assert HEADING.fullmatch(line), f"line {number}"
            vendor = line.split()[0]
            continue
        assert ROW.fullmatch(line), f"line {number}"
        ids.update((vendor, one) for one in line.rpartition(": ")[2].split())
    assert [one for one, count in ids.items() if count > 1] == []
    assert all(chip(vendor, int(number, 16)).listed for vendor, number in ids)


def test_what_is_known_of_architectures_covers_the_table() -> None:
    chips = {(vendor, one.architecture): one for (vendor, _), one in pci_names._chips().items()}
    for (vendor, architecture), one in chips.items():
        if vendor == "amd":
            assert native_precisions(architecture) is not None
            assert one.integrated == (architecture in IN_PROCESSORS), architecture
        if vendor == "intel":
            assert (architecture in _PRECISIONS) != (architecture in _TOO_OLD), architecture
