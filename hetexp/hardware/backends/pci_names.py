"""Maps a PCI id to a card's name and architecture, and to whether it is part of a processor.

It serves cards that no driver names, above all cards without a driver. The table is `pci_names.txt`, from
pci.ids (https://pci-ids.ucw.cz). An id often stands for several cards; the name then lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("pci_names.txt")
WORDS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}
"""Spelling of the vendors."""


@dataclass(frozen=True)
class Chip:
    """The facts that all cards with one PCI id share."""

    name: str
    """`AMD Radeon RX 6600/6600 XT`; `AMD GPU 0x744c` if the table does not list the id."""
    architecture: str | None = None
    """`sm_86`, `gfx1100`, `xe-hpg`."""
    integrated: bool = False
    """Whether it is part of a processor."""
    listed: bool = False
    """Whether the table lists it."""


def chip(vendor: str, device_id: int | None) -> Chip:
    """Return the table's entry of an id.

    Args:
        vendor: `nvidia`, `amd` or `intel`.
        device_id: the vendor's number of the chip, `0x56a0`; `None` if it is not known.
    """
    number = "" if device_id is None else f" 0x{device_id:04x}"
    return _chips().get((vendor, device_id), Chip(f"{WORDS[vendor]} GPU{number}"))


@cache
def _chips() -> dict[tuple[str, int | None], Chip]:
    chips: dict[tuple[str, int | None], Chip] = {}
    vendor, architecture, integrated = "", "", False
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if not line.startswith(" "):
            vendor, architecture, *rest = line.split()
            integrated = rest == ["integrated"]
            continue
        name, _, ids = line.strip().rpartition(": ")
        entry = Chip(f"{WORDS[vendor]} {name}", architecture, integrated, listed=True)
        chips.update({(vendor, int(number, 16)): entry for number in ids.split()})
    return chips
