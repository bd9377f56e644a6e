"""After a failure: does the driver say that the card itself is gone?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetexp.core.device import DeviceSpec
from hetexp.hardware.cpu import CpuBackend
from hetexp.hardware.detection import Inventory
from hetexp.hardware.found import Found
from hetexp.launch import launcher

CARD = DeviceSpec("cuda:1", "cuda", 1, "RTX 3090", "nvidia", uuid="GPU-1", pci="0000:03:00.0")
OTHER = Found(replace(CARD, id="cuda:0", uuid="GPU-0", pci="0000:01:00.0"), lost="GPU is lost")


@pytest.mark.parametrize(
    ("cards", "state"),
    [
        ([OTHER, Found(CARD)], None),
        ([OTHER, Found(CARD, lost="GPU is lost")], "lost (GPU is lost)"),
        # A driver that is gone tells no UUID; the address is the same.
        ([OTHER, Found(replace(CARD, uuid=None), undriven="nvidia is not loaded")], "nvidia is not loaded"),
        ([OTHER], "no longer in the machine's list of cards"),
    ],
)
def test_the_card_itself(monkeypatch: pytest.MonkeyPatch, cards: list[Found], state: str | None) -> None:
    monkeypatch.setattr(launcher, "detect", lambda builds: Inventory(cards))
    assert launcher.card_state(CARD) == state


def test_a_cpu_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "detect", lambda builds: pytest.fail("nobody was to be asked"))
    assert launcher.card_state(CpuBackend.describe(0)) is None
