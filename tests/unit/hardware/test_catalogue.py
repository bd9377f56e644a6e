"""The catalogue: complete entries, and no guess about a card that is not in it."""

from __future__ import annotations

import pytest

from hetexp.core.config import VENDORS
from hetexp.core.errors import ConfigError
from hetexp.hardware.catalogue import Card, card, catalogue

NAMES = sorted(catalogue())


def test_there_is_a_card_of_both_vendors_of_the_shipped_mix() -> None:
    assert {"nvidia", "intel"} <= {one.vendor for one in catalogue().values()}


@pytest.mark.parametrize("name", NAMES)
def test_every_card_is_complete_and_names_its_source(name: str) -> None:
    known = card(name)
    assert isinstance(known, Card)
    assert known.vendor in VENDORS
    assert known.name.strip()
    assert len(known.source) > 10
    assert "float32" in known.tflops  # what a run computes in by default
    assert 0 < known.efficiency <= 1
    assert 0 < known.overhead_seconds < 1


@pytest.mark.parametrize("name", NAMES)
def test_names_can_be_typed_as_a_device(name: str) -> None:
    assert name.isidentifier()
    assert name == name.lower()


def test_modelled_seconds_by_hand() -> None:
    known = card("rtx_3090")
    flops = 35.58e12 * 0.45  # what the card does in a second
    assert known.compute_seconds(flops, "float32") == pytest.approx(1.0 + known.overhead_seconds)
    assert known.compute_seconds(0, "float32") == known.overhead_seconds
    assert known.compute_seconds(1e12, "float64") > known.compute_seconds(1e12, "float32")


def test_an_unknown_card_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError) as refused:
        card("rtx_3091")
    (problem,) = refused.value.problems
    for name in NAMES:
        assert name in problem
    assert "'rtx_3091'" in problem
    assert "Did you mean `rtx_3090`?" in problem
    assert "catalogue.yaml" in problem
