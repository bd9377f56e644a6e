"""What Intel's visibility variables hide; a card is visible only if they clearly select it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetexp.core.device import DeviceSpec
from hetexp.hardware.backends.xpu_mask import (
    BUS_ORDER,
    HIERARCHY,
    MASK,
    SELECTOR,
    hidden,
    in_level_zero_order,
)


def card(index: int, pci: str, integrated: bool = False, name: str = "Arc A770") -> DeviceSpec:
    return DeviceSpec(f"xpu:{index}", "xpu", index, name, "intel", pci=pci, integrated=integrated)


IGPU = card(0, "0000:00:02.0", integrated=True, name="UHD Graphics 770")
FIRST, SECOND = card(1, "0000:03:00.0"), card(2, "0000:07:00.0")
CARDS = [IGPU, FIRST, SECOND]
"""Level Zero counts: 0 FIRST, 1 SECOND, 2 IGPU."""


def visible(
    environ: Mapping[str, str], cards: list[DeviceSpec] = CARDS, tiles: Mapping[str, int] | None = None
) -> tuple[list[DeviceSpec], list[str]]:
    by, problems = hidden(cards, environ, tiles or {})
    return [one for one in cards if one.id not in by], problems


def test_discrete_cards_come_first_unless_along_the_bus() -> None:
    assert in_level_zero_order(CARDS) == [FIRST, SECOND, IGPU]
    assert in_level_zero_order(CARDS, along_the_bus=True) == [IGPU, FIRST, SECOND]


@pytest.mark.parametrize(
    ("value", "left", "problem"),
    [
        ("0", [FIRST], None),
        ("1", [SECOND], None),
        ("2", [IGPU], None),
        ("0,1", [FIRST, SECOND], None),
        (" 1 , 2 ", [IGPU, SECOND], None),
        ("0.0", [FIRST], None),
        ("0.1", [], "name whole cards"),
        ("", [], "is empty, which Level Zero takes for all. Unset it."),
        ("-1", [], "names '-1'."),
        ("3", [], "names '3'."),
        ("0,9", [], "names '9' ('0,9')"),
        ("0,0", [], "name each card once"),
        ("0,", [], "names '' ('0,')"),
        ("default", [], "names 'default'"),
        ("0.0.0", [], "names '0.0.0'"),
        ("GPU-1", [], "names 'GPU-1'"),
        ("²", [], "names '²'"),
    ],
)
def test_an_affinity_mask(value: str, left: list[DeviceSpec], problem: str | None) -> None:
    found, problems = visible({MASK: value})
    assert found == left
    if problem is None:
        assert problems == []
    else:
        (told,) = problems
        assert told.startswith(f"`{MASK}` must name ")
        assert problem in told


def test_a_mask_counts_along_the_bus_where_that_is_ordered() -> None:
    assert visible({MASK: "0", BUS_ORDER: "1"}) == ([IGPU], [])
    assert visible({MASK: "0", BUS_ORDER: "0"}) == ([FIRST], [])


class TestTiles:
    """Two Max 1550 of two tiles each."""

    MAX = [card(0, "0000:4b:00.0", name="Max 1550"), card(1, "0000:51:00.0", name="Max 1550")]
    TILES = {"xpu:0": 2, "xpu:1": 2}

    @pytest.mark.parametrize("hierarchy", [{}, {HIERARCHY: "FLAT"}, {HIERARCHY: "COMBINED"}])
    @pytest.mark.parametrize(
        ("value", "places", "problem"),
        [
            ("0,1", [0], None),
            ("2,3", [1], None),
            ("0,1,2,3", [0, 1], None),
            ("0", [], "name all tiles of Max 1550 or none"),
            ("1,2", [], "name all tiles of Max 1550 or none"),
            ("4", [], "(0 to 3), but names '4'"),
            ("0.1", [], "name whole cards"),
        ],
    )
    def test_are_devices_of_their_own_by_default(
        self, hierarchy: dict[str, str], value: str, places: list[int], problem: str | None
    ) -> None:
        found, problems = visible({MASK: value, **hierarchy}, self.MAX, self.TILES)
        assert found == [self.MAX[place] for place in places]
        assert (problems == []) if problem is None else (problem in problems[0])

    @pytest.mark.parametrize(
        ("value", "places", "problem"),
        [
            ("0", [0], None),
            ("1", [1], None),
            ("0,1", [0, 1], None),
            ("0.0", [], "whole"),
            ("2", [], "names '2'"),
        ],
    )
    def test_belong_to_their_card_in_a_composite_hierarchy(
        self, value: str, places: list[int], problem: str | None
    ) -> None:
        found, problems = visible({MASK: value, HIERARCHY: "COMPOSITE"}, self.MAX, self.TILES)
        assert found == [self.MAX[place] for place in places]
        assert (problems == []) if problem is None else (problem in problems[0])


@pytest.mark.parametrize(
    ("value", "left", "problem"),
    [
        ("level_zero:0", [FIRST], None),
        ("level_zero:*", CARDS, None),
        ("LEVEL_ZERO:GPU", CARDS, None),
        ("*:gpu", CARDS, None),
        ("*:1", [SECOND], None),
        ("*:7", [], None),
        ("level_zero:0,2", [IGPU, FIRST], None),
        ("level_zero:0;level_zero:1", [FIRST, SECOND], None),
        ("opencl:*", [], None),
        ("opencl:7", [], None),
        ("cuda:0;level_zero:1", [SECOND], None),
        ("level_zero:cpu", [], None),
        ("!level_zero:2", [FIRST, SECOND], None),
        ("!opencl:*", CARDS, None),
        ("level_zero:*;!level_zero:0", [IGPU, SECOND], None),
        ("!*:*", [], None),
        ("!level_zero:0;level_zero:*", [], "say what to discard (!…) last"),
        ("level_zero:9", [], "(3, counted from 0), but names 9"),
        ("level_zero:0.1", [], "names '0.1'"),
        ("level_zero:0.*", [], "names '0.*'"),
        ("level_zero:*.*", [], "names '*.*'"),
        ("level_zero:", [], "names ''"),
        ("level_zero", [], "holds 'level_zero'"),
        ("", [], "holds ''"),
        ("0", [], "holds '0'"),
        ("metal:0", [], "holds 'metal:0'"),
        ("level_zero:gpu0", [], "names 'gpu0'"),
        ("level_zero:0;", [], "holds ''"),
    ],
)
def test_a_selector(value: str, left: list[DeviceSpec], problem: str | None) -> None:
    found, problems = visible({SELECTOR: value})
    assert found == left
    if problem is None:
        assert problems == []
    else:
        (told,) = problems
        assert told.startswith(f"`{SELECTOR}` must ")
        assert problem in told


def test_a_selector_counts_what_the_mask_leaves() -> None:
    assert visible({MASK: "1,2", SELECTOR: "level_zero:0"}) == ([SECOND], [])
    by, _ = hidden(CARDS, {MASK: "1,2", SELECTOR: "level_zero:0"}, {})
    assert by == {"xpu:1": f"{MASK}=1,2", "xpu:0": f"{SELECTOR}=level_zero:0"}


def test_without_variables_all_are_visible() -> None:
    assert visible({HIERARCHY: "FLAT", "PATH": "/bin"}) == (CARDS, [])


NUMBERS = st.one_of(st.integers(-1, 4).map(str), st.sampled_from(["0.0", "1.1", "*", "gpu", "cpu", "", "٣"]))
TERMS = st.builds(
    "{}{}:{}".format,
    st.sampled_from(["", "!", " "]),
    st.sampled_from(["level_zero", "*", "opencl", "cuda", "nonsense", ""]),
    st.lists(NUMBERS, min_size=1, max_size=3).map(",".join),
)
ANYTHING = st.text(max_size=12).filter(lambda text: "\x00" not in text)


@given(
    st.one_of(st.none(), st.lists(NUMBERS, max_size=4).map(",".join), ANYTHING),
    st.one_of(st.none(), st.lists(TERMS, max_size=3).map(";".join), ANYTHING),
    st.sampled_from([{}, {BUS_ORDER: "1"}, {HIERARCHY: "FLAT"}, {HIERARCHY: "COMPOSITE"}]),
)
def test_whatever_they_hold_a_visible_card_was_named(
    mask: str | None, selector: str | None, more: dict[str, str]
) -> None:
    environ = {name: value for name, value in ((MASK, mask), (SELECTOR, selector)) if value is not None}
    found, problems = visible({**environ, **more})
    assert all(told.startswith("`") for told in problems)
    order = in_level_zero_order(CARDS, more.get(BUS_ORDER) == "1")
    if mask is not None:
        named = {part.strip().removesuffix(".0") for part in mask.split(",")}
        assert all(str(order.index(one)) in named for one in found)
    if selector is not None and found:
        assert ":" in selector
    if problems:  # a variable that is not understood selects nothing
        assert found == []
