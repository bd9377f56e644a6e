"""What follows `--what-if`: its grammar, and the devices that it makes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.hardware.catalogue import shipped
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.plan.predict.what_if import MOST, Change, changed, parse_changes

CARDS = sorted(shipped().cards)
EMULATED = [EmulatedBackend.describe_card(i, shipped().cards[n]) for i, n in enumerate(["t4", "l4", "t4"])]
REAL = DeviceSpec("cuda:0", "cuda", 0, "NVIDIA GeForce RTX 3090", "nvidia")
CHANGES = st.builds(
    Change,
    st.integers(1, MOST) | st.integers(-MOST, -1),
    st.sampled_from(CARDS) | st.sampled_from(["cuda:0", "emulated:3"]),
)


@given(st.lists(CHANGES, min_size=1, max_size=6), st.booleans())
def test_what_is_written_is_read(changes: list[Change], apart: bool) -> None:
    texts = [str(change) for change in changes]
    assert parse_changes(texts if apart else [",".join(texts)]) == changes


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    problems: list[str] = []
    try:
        (*_, last) = parse_changes([text])
        assert parse_changes([str(last)]) == [last]
    except ConfigError as error:
        problems = error.problems
    assert all(problem.startswith("`--what-if` must be ") for problem in problems)


@pytest.mark.parametrize("text", ["rtx_4090", "", "+", "+2rtx *", "+0*t4", f"+{MOST + 1}*t4", "+-t4", "2*t4"])
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"`--what-if` must be \+card"):
        parse_changes([text])


def test_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_changes(["rtx_4090", "+t4,l4", "-cuda:0"])
    assert len(raised.value.problems) == 2
    with pytest.raises(ConfigError) as raised:
        changed(EMULATED, [Change(1, "rtx_4091"), Change(-3, "t4"), Change(-1, "a100")], shipped())
    told = raised.value.problems
    assert len(told) == 3
    assert "Did you mean `rtx_4090`?" in told[0]
    assert "'-3*t4' instead. It finds 2 of them." in told[1]
    assert "emulated:0 = t4, emulated:1 = l4, emulated:2 = t4" in told[2]


@given(st.lists(st.tuples(st.sampled_from(CARDS), st.integers(1, 3)), max_size=4), st.integers(0, 2))
def test_cards_are_counted(added: list[tuple[str, int]], fewer: int) -> None:
    changes = [Change(count, name) for name, count in added] + ([Change(-fewer, "t4")] if fewer else [])
    devices, kept = changed(EMULATED, changes, shipped())
    expected = Counter({"t4": 2, "l4": 1})
    for name, count in added:
        expected[shipped().card(name).key] += count
    expected["t4"] -= fewer
    assert Counter(device.card for device in devices) == +expected
    assert len({device.id for device in devices}) == len(devices)
    for device, place in zip(devices, kept, strict=True):
        assert device.name.endswith("(what if)") if place is None else device == EMULATED[place]


def test_the_last_of_a_kind_goes_first_and_a_device_by_its_id() -> None:
    assert changed(EMULATED, [Change(-1, "t4")], shipped())[1] == [0, 1]
    assert changed(EMULATED, [Change(-1, "emulated:0")], shipped())[1] == [1, 2]


def test_a_real_card_goes_by_id_or_by_the_name_that_the_catalogue_has_for_it() -> None:
    for name in ("cuda:0", "rtx_3090"):
        devices, kept = changed([REAL, *EMULATED], [Change(-1, name)], shipped())
        assert devices == EMULATED
        assert kept == [1, 2, 3]


def test_no_device_left() -> None:
    with pytest.raises(ConfigError, match="leaves a device"):
        changed([REAL], [Change(-1, "cuda:0")], shipped())


def test_one_may_be_swapped_for_another() -> None:
    devices, kept = changed([REAL], [Change(1, "a100"), Change(-1, "cuda:0")], shipped())
    assert [device.card for device in devices] == ["a100"]
    assert kept == [None]
