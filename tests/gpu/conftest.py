"""Tests on real NVIDIA cards; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from hetexp.hardware.detection.builds import own_build
from hetexp.hardware.detection.inventory import detect

CARDS = (
    sum(
        card.spec.backend == "cuda" and card.state == "available"
        for card in detect(builds=[own_build()]).cards
    )
    if torch.version.cuda is not None
    else 0
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" not in item.path.parts:
            continue
        item.add_marker(pytest.mark.gpu)
        needed = 2 if "two_cards" in item.name else 1
        if needed > CARDS:
            reason = f"needs {needed} NVIDIA card(s) and a CUDA build of torch; found {CARDS}"
            item.add_marker(pytest.mark.skip(reason=reason))
