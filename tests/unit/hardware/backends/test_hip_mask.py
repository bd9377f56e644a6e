"""What AMD's visibility variables hide, value by value; a card is visible only if they clearly select it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetexp.hardware.backends.hip_mask import HIP, ROCR, hidden
from hetexp.hardware.backends.kfd import Node

UUIDS = ["GPU-61ad34e0f1c2b3a4", "GPU-61ad99990000aaaa", None, "GPU-beef000000000001"]
NODES = [Node(i, 1000 + i, f"0000:0{i}:00.0", "gfx1100", 0x744C, uuid) for i, uuid in enumerate(UUIDS)]


def visible(environ: Mapping[str, str], nvidia_too: bool = False) -> tuple[list[int], list[str]]:
    by, problems = hidden(NODES, environ, nvidia_too)
    return [node.index for node in NODES if node.address not in by], problems


@pytest.mark.parametrize("variable", [ROCR, *HIP])
@pytest.mark.parametrize(
    ("value", "left", "problem"),
    [
        ("0", [0], None),
        ("2,0", [0, 2], None),
        (" 1 , 0 ", [0, 1], None),
        ("0,1,", [0, 1], None),
        ("", [], None),
        ("  ", [], None),
        ("-1", [], None),
        ("0,-1,1", [0], None),
        ("GPU-beef000000000001", [3], None),
        ("gpu-BEEF", [3], None),
        ("GPU-61ad3,2", [0, 2], None),
        ("GPU-61ad", [], "'GPU-61ad' begins the UUIDs of 2"),
        ("GPU-", [], "names 'GPU-'"),
        ("GPU-dddd", [], "names 'GPU-dddd'"),
        ("0,0", [0], "names one twice by '0' ('0,0')"),
        ("0,GPU-61ad34e0", [0], "names one twice by 'GPU-61ad34e0'"),
        ("2,9", [2], "names '9' ('2,9')"),
        ("9", [], "names '9'."),
        ("99999999999999999999", [], "names '99999999999999999999'"),
        ("all", [], "names 'all'"),
        ("0,,1", [0], "names ''"),
        ("²", [], "names '²'"),
        ("0x1", [], "names '0x1'"),
    ],
)
def test_a_value(variable: str, value: str, left: list[int], problem: str | None) -> None:
    found, problems = visible({variable: value})
    assert found == left
    if problem is None:
        assert problems == []
    else:
        (told,) = problems
        assert problem in told
        assert told.startswith(f"`{variable}` must name AMD cards of this machine by number (0 to 3) or UUID")


def test_hips_variable_counts_what_rocrs_leaves() -> None:
    assert visible({ROCR: "3,1", "HIP_VISIBLE_DEVICES": "0"}) == ([3], [])
    assert visible({ROCR: "3,1", "HIP_VISIBLE_DEVICES": "1"}) == ([1], [])


def test_only_the_first_of_hips_variables_counts() -> None:
    assert visible({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0"}) == ([2], [])
    assert visible({"CUDA_VISIBLE_DEVICES": "0", "GPU_DEVICE_ORDINAL": "1"}) == ([0], [])


def test_each_hidden_card_names_the_variable_that_hides_it() -> None:
    by, _ = hidden(NODES, {ROCR: "0,1", "HIP_VISIBLE_DEVICES": "1"}, False)
    assert by == {
        "0000:00:00.0": "HIP_VISIBLE_DEVICES=1",
        "0000:02:00.0": f"{ROCR}=0,1",
        "0000:03:00.0": f"{ROCR}=0,1",
    }


def test_counting_cards_of_which_none_is_left_is_told() -> None:
    found, problems = visible({ROCR: "", "HIP_VISIBLE_DEVICES": "0"})
    assert found == []
    assert problems == [
        f"`HIP_VISIBLE_DEVICES` must name the cards that {ROCR}= leaves, which are none, but names '0'. "
        "Set one of the two variables only."
    ]


def test_beside_nvidias_cards_their_variable_is_no_mistake() -> None:
    assert visible({"CUDA_VISIBLE_DEVICES": "7"}, nvidia_too=True) == ([], [])
    assert visible({"HIP_VISIBLE_DEVICES": "7"}, nvidia_too=True)[1] != []


def test_without_variables_all_are_visible() -> None:
    assert visible({"PATH": "/bin"}) == ([0, 1, 2, 3], [])


ENTRIES = st.one_of(
    st.integers(-2, 6).map(str),
    st.sampled_from(["GPU-61ad34", "GPU-61ad", "gpu-beef", "", " 1 ", "all", "*", "MIG-1", "٣"]),
    st.text(max_size=6).filter(lambda text: "\x00" not in text),
)
VALUES = st.lists(ENTRIES, max_size=5).map(",".join)


@given(st.dictionaries(st.sampled_from([ROCR, *HIP]), VALUES, max_size=3), st.booleans())
def test_whatever_they_hold_a_visible_card_was_named(environ: dict[str, str], nvidia_too: bool) -> None:
    found, problems = visible(environ, nvidia_too)
    assert all(told.startswith("`") and told.endswith(".") for told in problems)
    if ROCR in environ:
        assert all(_named(NODES[place], place, environ[ROCR]) for place in found)
    first = next((name for name in HIP if name in environ), None)
    if first is not None and ROCR not in environ:
        assert all(_named(NODES[place], place, environ[first]) for place in found)


def _named(node: Node, place: int, value: str) -> bool:
    for entry in (part.strip() for part in value.split(",")):
        if entry == str(place) or (entry.isascii() and entry.isdecimal() and int(entry) == place):
            return True
        if len(entry) > 4 and node.uuid is not None and node.uuid.casefold().startswith(entry.casefold()):
            return True
    return False
