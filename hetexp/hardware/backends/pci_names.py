"""What a PCI id says of a card: its name, its architecture, whether it is part of a processor.

For cards that no driver names, above all those without a driver. The table is `pci_names.txt`, from pci.ids
(https://pci-ids.ucw.cz); one id often stands for several cards, and then the name lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("pci_names.txt")
WORDS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}
"""How people write the vendors."""


@dataclass(frozen=True)
class Chip:
    """What is known of all cards with one PCI id."""

    name: str
    """`AMD Radeon RX 6600/6600 XT`."""
    architecture: str
    """`sm_86`, `gfx1100`, `xe-hpg`."""
    integrated: bool
    """Whether it is part of a processor."""


def card_name(vendor: str, device_id: int) -> str | None:
    """Return a card's name, vendor first; `None` for an id that the table has not.

    Args:
        vendor: `nvidia`, `amd` or `intel`.
        device_id: the vendor's number of the chip, `0x56a0`.
    """
    known = chip(vendor, device_id)
    return known.name if known is not None else None


def chip(vendor: str, device_id: int) -> Chip | None:
    """Return what the table says of an id, `None` where it says nothing."""
    return _chips().get((vendor, device_id))


def unnamed(vendor: str, device_id: int | None) -> str:
    """Return words for a card whose name is not known: `AMD GPU 0x744c`."""
    word = WORDS[vendor]
    return f"{word} GPU" if device_id is None else f"{word} GPU 0x{device_id:04x}"


@cache
def _chips() -> dict[tuple[str, int], Chip]:
    chips: dict[tuple[str, int], Chip] = {}
    vendor, architecture, integrated = "", "", False
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if not line.startswith(" "):
            vendor, architecture, *rest = line.split()
            integrated = rest == ["integrated"]
            continue
        name, _, ids = line.strip().rpartition(": ")
        found = Chip(f"{WORDS[vendor]} {name}", architecture, integrated)
        chips.update({(vendor, int(number, 16)): found for number in ids.split()})
    return chips
