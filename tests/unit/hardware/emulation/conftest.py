from __future__ import annotations

import pytest
from fake_clock import Clock

from hetexp.hardware.emulation import pacing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that sleeping devices turn on themselves."""
    fake = Clock()
    monkeypatch.setattr(pacing, "time", fake)
    return fake
