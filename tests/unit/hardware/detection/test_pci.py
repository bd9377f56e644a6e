"""Case 22: what is on the bus is told, whatever drives it, and is never mistaken for absent."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_drivers import ARC_A770, RX_7900_XTX, UHD_770, FakeCard, recorded_machine, write

from hetexp.hardware.detection.inventory import detect
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import PciCard, normalised, pci_cards


def test_cards_of_all_vendors_by_address(tmp_path: Path) -> None:
    nvidia = FakeCard("0000:01:00.0", "nvidia", 0x2204, None)
    machine = recorded_machine(tmp_path, ARC_A770, nvidia, UHD_770)
    assert pci_cards(machine) == [
        PciCard("0000:00:02.0", "intel", 0xA780, "i915"),
        PciCard("0000:01:00.0", "nvidia", 0x2204, None),
        PciCard("0000:03:00.0", "intel", 0x56A0, "i915"),
    ]


@pytest.mark.parametrize(
    ("pci_class", "counts"),
    [("0x030000", True), ("0x030200", True), ("0x038000", True), ("0x120000", True), ("0x040300", False)],
)
def test_only_what_displays_or_computes_is_a_card(tmp_path: Path, pci_class: str, counts: bool) -> None:
    card = FakeCard("0000:01:00.0", "amd", 0x738C, "amdgpu", pci_class=pci_class)
    assert bool(pci_cards(recorded_machine(tmp_path, card))) == counts


def test_other_vendors_and_devices_taken_out_meanwhile_are_left_out(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, UHD_770)
    other = "/sys/bus/pci/devices/0000:05:00.0"
    write(tmp_path, {f"{other}/vendor": "0x1d0f", f"{other}/device": "0xec20", f"{other}/class": "0x030000"})
    (tmp_path / "sys/bus/pci/devices/0000:09:00.0").mkdir()
    assert [card.address for card in pci_cards(machine)] == [UHD_770.address]


def test_a_system_without_a_list_of_the_bus(tmp_path: Path) -> None:
    assert pci_cards(Machine(root=tmp_path)) == []


@pytest.mark.parametrize(
    "written", ["0000:03:00.0", "00000000:03:00.0", "03:00", "03:00.0", "0000:03:00", " 0000:03:00.0 "]
)
def test_addresses_are_brought_to_one_form(written: str) -> None:
    assert normalised(written) == "0000:03:00.0"


def test_upper_case_and_other_domains() -> None:
    assert normalised("0001:C5:00.0") == "0001:c5:00.0"


def test_cards_that_no_kernel_driver_drives_are_told_with_the_fix(tmp_path: Path) -> None:
    cards = [
        FakeCard("0000:03:00.0", "amd", 0x744C, None),
        FakeCard("0000:04:00.0", "amd", 0x73FF, "vfio-pci"),
        FakeCard("0000:07:00.0", "intel", 0x56A5, None),
    ]
    inventory = detect(recorded_machine(tmp_path, *cards), builds=[])
    assert [card.spec.name for card in inventory.cards] == [
        "AMD Radeon RX 7900 XT/7900 XTX/7900 GRE",
        "AMD Radeon RX 6600/6600 XT",
        "Intel Arc A380",
    ]
    assert [card.undriven for card in inventory.cards] == [
        "no kernel driver is bound to it; load amdgpu (sudo modprobe amdgpu)",
        "it is reserved for a virtual machine (vfio-pci); give it back to amdgpu",
        "no kernel driver is bound to it; load xe or i915 (sudo modprobe xe)",
    ]
    assert {card.state for card in inventory.cards} == {"unusable"}


def test_both_vendors_are_numbered_along_the_bus(tmp_path: Path) -> None:
    arc = FakeCard("0000:07:00.0", "intel", 0x56A5, "i915")
    inventory = detect(recorded_machine(tmp_path, arc, RX_7900_XTX, UHD_770), builds=[])
    assert [(card.spec.number, card.spec.id) for card in inventory.cards] == [
        (0, "xpu:0"),
        (1, "hip:0"),
        (2, "xpu:1"),
    ]
