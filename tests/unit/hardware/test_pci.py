"""Case 22: a card that no build here drives is told as present, not as absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetexp.core.config import HardwareConfig
from hetexp.core.device import DeviceSpec
from hetexp.hardware.pci import undriven_cards
from hetexp.hardware.selection import select_devices

CARD = DeviceSpec(id="cuda:0", backend="cuda", index=0, name="NVIDIA GeForce RTX 3090", vendor="nvidia")


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    """An RTX 3090, an Arc A770, integrated graphics, and two things that are no cards."""
    devices = {
        "0000:01:00.0": ("0x10de", "0x2204", "0x030000"),
        "0000:03:00.0": ("0x8086", "0x56a0", "0x030000"),
        "0000:00:02.0": ("0x8086", "0x4680", "0x038000"),
        "0000:01:00.1": ("0x10de", "0x1aef", "0x040300"),
        "0000:05:00.0": ("0x1d0f", "0xec20", "0x030000"),
    }
    for name, (vendor, device, kind) in devices.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, text in (("vendor", vendor), ("device", device), ("class", kind)):
            (folder / file).write_text(text + "\n")
    (tmp_path / "0000:09:00.0").mkdir()  # taken out while it is read
    return tmp_path


def test_what_a_backend_drives_is_not_told_again(bus: Path) -> None:
    told = undriven_cards([CARD], bus)
    assert len(told) == 2
    assert told[0].startswith("intel integrated graphics 4680 at 0000:00:02.0 is present")
    assert told[1].startswith("intel card 56a0 at 0000:03:00.0 is present, but not usable")


def test_without_a_driver_every_card_is_told(bus: Path) -> None:
    assert [line.split()[0] for line in undriven_cards([], bus)] == ["intel", "nvidia", "intel"]


def test_a_machine_without_pci(tmp_path: Path) -> None:
    assert undriven_cards([], tmp_path / "absent") == []


def test_auto_says_what_it_leaves_out(bus: Path) -> None:
    selection = select_devices(
        HardwareConfig.model_validate({"devices": ["auto"]}), [], undriven=undriven_cards([], bus)
    )
    assert [device.backend for device in selection.devices] == ["cpu"]
    assert any("56a0" in reason for reason in selection.reasons)


def test_a_mix_whose_vendor_is_there_and_undriven_says_so(bus: Path) -> None:
    config = HardwareConfig.model_validate({"devices": [{"vendor": "nvidia"}, {"vendor": "intel"}]})
    selection = select_devices(config, [CARD], undriven=undriven_cards([CARD], bus))
    (problem,) = selection.problems
    assert "`hardware.devices[1].vendor`" in problem
    assert "intel card 56a0 at 0000:03:00.0 is present" in problem
