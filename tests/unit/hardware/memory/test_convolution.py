"""What cuDNN takes for convolutions, against an H100 (`benchmarks/bench_convolutions.py --record`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetexp.hardware.memory.convolution import Convolution
from hetexp.hardware.memory.rules import MIB
from hetexp.hardware.memory.trace import cuda_block

RECORDED = json.loads((Path(__file__).parents[3] / "recorded" / "convolutions_h100.json").read_text())
ROWS: list[dict[str, int]] = [dict(zip(RECORDED["columns"], row, strict=True)) for row in RECORDED["rows"]]
Said = Callable[[Convolution], int]
PASSES: dict[str, Said] = {
    "forward": Convolution.forward_bytes,
    "input": Convolution.input_gradient_bytes,
    "weight": Convolution.weight_gradient_bytes,
}


def convolution(row: dict[str, Any]) -> Convolution:
    return Convolution(row["batch"], row["inputs"], row["outputs"], row["size"], row["size"])


@pytest.mark.parametrize("name", PASSES)
def test_most_choices_are_right(name: str) -> None:
    right = [(PASSES[name](convolution(row)) > 0) == (row[name] > 0) for row in ROWS]
    assert sum(right) / len(right) > 0.85


@pytest.mark.parametrize(("name", "share"), [("forward", 1.0), ("input", 1.0), ("weight", 0.84)])
def test_what_an_algorithm_takes_is_right_to_the_block(name: str, share: float) -> None:
    taken = [(PASSES[name](convolution(row)), row[name]) for row in ROWS if row[name]]
    right = [said == found or cuda_block(said) == found for said, found in taken if said]
    assert len(right) > 20
    assert sum(right) / len(right) >= share


def test_the_last_layers_of_a_convnet_by_hand() -> None:
    """512 to 512 channels of 28 × 28 pixels, 32 images."""
    layer = Convolution(32, 512, 512, 28, 28)
    transform = 8 * 32 * 17  # 30 × 30 pixels with their border, of complex numbers half
    images, weights = 32 * 512 * transform, 512 * 512 * transform
    assert layer.forward_bytes() == 2 * (images + weights) + 9 * MIB == 2321 * MIB
    assert layer.input_gradient_bytes() == 2 * images + weights == 1224 * MIB
    tiles = 32 * 7 * 7
    assert layer.weight_gradient_bytes() == 4 * 36 * (2 * tiles * 512 + 512 * 512) == 256.5 * MIB


def test_small_ones_take_nothing() -> None:
    for small in (Convolution(256, 3, 64, 32, 32), Convolution(256, 16, 16, 56, 56)):
        assert not small.forward_bytes()
        assert not small.input_gradient_bytes()
        assert not small.weight_gradient_bytes()
