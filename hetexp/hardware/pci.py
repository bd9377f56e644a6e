"""Cards that are in the machine and that nothing here can drive: the kernel knows them all."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from hetexp.core.device import DeviceSpec

PCI_DEVICES = Path("/sys/bus/pci/devices")
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380")
"""VGA controller, 3D controller, other display controller."""
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}


def undriven_cards(found: Sequence[DeviceSpec], root: Path = PCI_DEVICES) -> list[str]:
    """Return each card of a known vendor that no backend found, as words for a message.

    Args:
        found: what the backends found; a vendor that has a card in it is not looked at again.
        root: the kernel's list of PCI devices.
    """
    driven = {device.vendor for device in found}
    cards = []
    for device in sorted(root.iterdir()) if root.is_dir() else []:
        with contextlib.suppress(OSError):  # a device that was just taken out
            vendor = _VENDORS.get(_read(device / "vendor"))
            displays = _read(device / "class").startswith(_DISPLAY_CLASSES)
            if vendor is None or vendor in driven or not displays:
                continue
            kind = "integrated graphics" if device.name.startswith("0000:00:") else "card"
            model = _read(device / "device").removeprefix("0x")
            cards.append(
                f"{vendor} {kind} {model} at {device.name} is present, but not usable with this build of "
                "hetexp and torch"
            )
    return cards


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()
