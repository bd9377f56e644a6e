"""Lists the cards on the PCI bus as the kernel sees them, whatever drivers and libraries are installed."""

from __future__ import annotations

from dataclasses import dataclass

from hetexp.hardware.detection.machine import Machine

_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA controller, 3D controller, other display controller, processing accelerator."""
VENDORS = {0x10DE: "nvidia", 0x1002: "amd", 0x8086: "intel"}

LANE_GB_PER_SECOND = {1: 0.25, 2: 0.5, 3: 8 / 8.125, 4: 16 / 8.125, 5: 32 / 8.125, 6: 8 * 242 / 256}
"""PCI Express generation → 10^9 bytes a second of one lane and direction, after line coding: 8b/10b, from
the third on 128b/130b, flits of 256 bytes with 242 for data in the sixth (PCI Express Base Specification)."""


@dataclass(frozen=True)
class PciCard:
    """A display controller or accelerator of a vendor that has a backend."""

    address: str
    """`0000:03:00.0`, in lower case."""
    vendor: str
    """`nvidia`, `amd` or `intel`."""
    device_id: int
    """The vendor's number of the chip: `0x56a0`."""
    driver: str | None
    """Kernel module bound to it: `nvidia`, `nouveau`, `amdgpu`, `i915`, `xe`, `vfio-pci`."""


def pci_cards(machine: Machine) -> list[PciCard]:
    """Return the cards of known vendors by address; empty if the system has no such list."""
    bus = machine.path("/sys/bus/pci/devices")
    cards = []
    for folder in sorted(bus.iterdir()) if bus.is_dir() else []:
        number = machine.number(folder / "vendor")
        vendor = VENDORS.get(number) if number is not None else None
        displays = (machine.text(folder / "class") or "").startswith(_DISPLAY_CLASSES)
        device_id = machine.number(folder / "device")
        if vendor is None or not displays or device_id is None:
            continue
        driver = folder / "driver"
        bound = driver.resolve().name if driver.exists() else None
        cards.append(PciCard(folder.name.lower(), vendor, device_id, bound))
    return cards


def normalised(address: str) -> str:
    """Return an address as the kernel writes it: NVML's `00000000:03:00.0`, torch's `03:00`."""
    *domain, bus, device = address.strip().lower().split(":")
    function = device if "." in device else f"{device}.0"
    return f"{int(domain[0], 16) if domain else 0:04x}:{bus}:{function}"
