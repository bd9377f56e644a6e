"""`hardware.gpu_ids`: what may be written, which cards it means, and that nothing else is ever trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetexp.core.config import HardwareConfig
from hetexp.core.device import GIB, DeviceSpec
from hetexp.hardware.detection.detected import DetectedCard, Reading
from hetexp.hardware.detection.inventory import Inventory
from hetexp.hardware.selection.devices import select_devices
from hetexp.hardware.selection.pool import Selection
from hetexp.hardware.selection.request import CardRequest, find_card, parse_card_request


def card(number: int, backend: str, name: str, **facts: Any) -> DetectedCard:
    vendor = {"cuda": "nvidia", "hip": "amd", "xpu": "intel"}[backend]
    reading = facts.pop("reading", Reading())
    unusable = facts.pop("unusable", None)
    index = facts.pop("index", 0)
    facts |= {"name": name, "vendor": vendor, "number": number}
    spec = DeviceSpec(id=f"{backend}:{index}", backend=backend, index=index, **facts)
    return DetectedCard(spec, reading, unusable=unusable)


RTX_3090 = card(
    0,
    "cuda",
    "NVIDIA GeForce RTX 3090",
    uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    pci="0000:01:00.0",
    memory_bytes=24 * GIB,
    reading=Reading(memory_free_bytes=2 * GIB, power_limit_watts=350.0),
)
RTX_4090 = card(
    1,
    "cuda",
    "NVIDIA GeForce RTX 4090",
    index=1,
    uuid="GPU-8932aaaa-d72c-4106-c12f-20bd9faed9f6",
    pci="0000:03:00.0",
    reading=Reading(memory_free_bytes=20 * GIB, power_limit_watts=450.0),
)
UHD = card(2, "xpu", "Intel UHD Graphics 770", pci="0000:00:02.0", integrated=True)
ARC = card(
    3,
    "xpu",
    "Intel Arc A770 Graphics",
    index=1,
    pci="0000:0a:00.0",
    reading=Reading(memory_free_bytes=15 * GIB, power_limit_watts=225.0),
)
RX = card(4, "hip", "AMD Radeon RX 7900 XTX", pci="0000:0c:00.0", unusable="no ROCm build of torch")
BOX = [RTX_3090, RTX_4090, UHD, ARC, RX]


def select(wish: Any, cards: Sequence[DetectedCard] = BOX, **options: Any) -> Selection:
    config = HardwareConfig.model_validate({"devices": ["auto"], "gpu_ids": wish, **options})
    return select_devices(config, Inventory(list(cards)))


def ids(selection: Selection) -> list[str]:
    assert selection.problems == []
    return [device.id for device in selection.devices]


# ---------------------------------------------------------------- the grammar


@pytest.mark.parametrize(
    ("value", "wish"),
    [
        (0, CardRequest(names=("0",))),
        ([0, 2], CardRequest(names=("0", "2"))),
        ("0", CardRequest(names=("0",))),
        ("0,2", CardRequest(names=("0", "2"))),
        (["cuda:0", "xpu:0"], CardRequest(names=("cuda:0", "xpu:0"))),
        ("all", CardRequest("all")),
        (["available"], CardRequest("available")),
        ("recommend", CardRequest("recommend", 1)),
        ("recommend:2", CardRequest("recommend", 2)),
    ],
)
def test_what_is_understood(value: Any, wish: CardRequest) -> None:
    assert parse_card_request(value, "hardware.gpu_ids") == (wish, [])


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "is empty"),
        ("recommend:0", "recommend:1 or more"),
        (["all", 0], "without `all`"),
        ("0,available", "without `available`"),
        (["recommend:2", "cuda:0"], "without `recommend:2`"),
    ],
)
def test_what_is_refused(value: Any, told: str) -> None:
    _, problems = parse_card_request(value, "hardware.gpu_ids")
    assert len(problems) == 1
    assert problems[0].startswith("`hardware.gpu_ids` must")
    assert told in problems[0]


# ---------------------------------------------------------------- the cards that are meant


@pytest.mark.parametrize(
    ("wish", "chosen"),
    [
        (0, ["cuda:0"]),
        ([1, 0], ["cuda:1", "cuda:0"]),
        ([0, 3], ["cuda:0", "xpu:1"]),
        (["cuda:1", "xpu:1"], ["cuda:1", "xpu:1"]),
        (["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"], ["cuda:0"]),
        (["GPU-8932f"], ["cuda:0"]),
        (["gpu-8932A"], ["cuda:1"]),
        (["0000:03:00.0"], ["cuda:1"]),
        (["0A:00.0"], ["xpu:1"]),
        ([2], ["xpu:0"]),  # integrated, but asked for
        ([0, "cpu"], ["cuda:0", "cpu:0"]),
        (["cpu:1", 3], ["cpu:1", "xpu:1"]),
        ("all", ["cuda:0", "cuda:1", "xpu:1"]),
        ("available", ["cuda:0", "cuda:1", "xpu:1"]),
    ],
)
def test_the_card_that_is_named(wish: Any, chosen: list[str]) -> None:
    assert ids(select(wish)) == chosen


def test_the_older_key() -> None:
    config = HardwareConfig.model_validate({"devices": ["auto"], "cuda_ids": [1]})
    assert ids(select_devices(config, Inventory(BOX))) == ["cuda:1"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("9", "must be a device of this machine, but is '9'"),
        ("cuda:2", "must be a device of this machine"),
        ("GPU-8932", "but is that of cuda:0"),  # the start of both
        ("GPU-89", "must be a device of this machine"),  # too short to mean anything
        ("GPU-", "must be a device of this machine"),
        ("", "must be a device of this machine"),
        ("-1", "must be a device of this machine"),
        ("0000:09:00.0", "must be a device of this machine"),
        ("gpu", "must be a device of this machine"),
        ("4", "not usable: no ROCm build of torch"),
    ],
)
def test_a_name_that_means_no_card_is_refused_with_the_list(name: str, told: str) -> None:
    (problem,) = select([name]).problems
    assert problem.startswith("`hardware.gpu_ids` must")
    assert told in problem
    if "device of this machine" in told:
        assert "0 = cuda:0 (NVIDIA GeForce RTX 3090)" in problem


def test_every_mistake_of_a_list_at_once() -> None:
    problems = select(["9", "cuda:7", 0, 0, 4]).problems
    assert len(problems) == 4
    assert "names cuda:0 twice" in problems[-1]


def test_an_address_that_instances_share_is_refused() -> None:
    halves = [replace(RTX_3090, spec=replace(RTX_3090.spec, id=f"cuda:{i}", number=i)) for i in (0, 1)]
    assert find_card("0000:01:00.0", halves) == "one device, but is the address of cuda:0 and cuda:1"


# ---------------------------------------------------------------- busy, lost, hidden, hot, hungry


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"busy": "python (process 7) holds 4.0 GiB"}, "busy: python (process 7) holds 4.0 GiB"),
        ({"lost": "GPU is lost"}, "lost (GPU is lost)"),
        ({"undriven": "nouveau is bound to it"}, "not usable: nouveau is bound to it"),
        ({"hidden_by": "CUDA_VISIBLE_DEVICES=1"}, "hidden by CUDA_VISIBLE_DEVICES=1"),
        ({"reading": Reading(temperature_celsius=95.0)}, "at 95 °C, above hardware.max_temperature_celsius"),
    ],
)
def test_a_card_that_cannot_be_used_now(state: dict[str, Any], told: str) -> None:
    cards = [replace(RTX_3090, **state), RTX_4090]
    (problem,) = select([0, 1], cards).problems
    assert problem.startswith("`hardware.gpu_ids` must name devices that can be used, but cuda:0")
    assert told in problem
    for wish in ("available", None):
        selection = select(wish, cards)
        assert ids(selection) == ["cuda:1"]
        assert any(told in reason for reason in selection.reasons)


def test_all_takes_busy_cards_and_available_does_not() -> None:
    cards = [replace(RTX_3090, busy="somebody"), RTX_4090]
    assert ids(select("all", cards)) == ["cuda:0", "cuda:1"]
    assert ids(select("available", cards)) == ["cuda:1"]
    assert ids(select(None, cards, default_gpu_selection="all")) == ["cuda:0", "cuda:1"]


def test_all_busy_is_told_and_never_replaced_by_the_cpu() -> None:
    (problem,) = select(None, [replace(RTX_3090, busy="somebody")]).problems
    assert "all are busy (cuda:0 (NVIDIA GeForce RTX 3090): somebody)" in problem
    (problem,) = select("available", [replace(RTX_3090, busy="somebody")]).problems
    assert "'available' finds none" in problem


def test_shared_cards() -> None:
    cards = [replace(RTX_3090, busy="somebody"), RTX_4090]
    selection = select([0, 0, 1], cards, share_devices=True)
    assert ids(selection) == ["cuda:0", "cuda:0.1", "cuda:1"]
    assert selection.devices[0].uuid == selection.devices[1].uuid


def test_manual_needs_a_list() -> None:
    (problem,) = select(None, default_gpu_selection="manual").problems
    assert problem.startswith("`hardware.gpu_ids` must name the devices if")
    assert "1 = cuda:1 (NVIDIA GeForce RTX 4090)" in problem
    assert ids(select(None, [], default_gpu_selection="manual")) == ["cpu:0"]


def test_one_card_only() -> None:
    assert ids(select(None, multi_gpu_enabled=False)) == ["cuda:1"]  # the fastest of the catalogue
    (problem,) = select([0, 1], multi_gpu_enabled=False).problems
    assert "one device if `hardware.multi_gpu_enabled` is false" in problem


# ---------------------------------------------------------------- recommendation and power


def test_the_fastest_with_enough_memory_are_recommended() -> None:
    assert ids(select("recommend:1")) == ["cuda:1"]
    assert ids(select("recommend:2")) == ["cuda:0", "cuda:1"]
    config = HardwareConfig.model_validate({"devices": ["auto"], "gpu_ids": "recommend:2"})
    needy = select_devices(config, Inventory(BOX), need_bytes=lambda count: 8 * GIB // count * 2)
    assert ids(needy) == ["cuda:1", "xpu:1"]  # the 3090 has 2 GiB left
    (problem,) = select("recommend:4").problems
    assert "at most recommend:3" in problem


def test_a_budget_leaves_out_the_least_work_a_watt() -> None:
    selection = select("available", power_budget_watts=850)
    assert ids(selection) == ["cuda:0", "cuda:1"]  # the Arc gives the fewest TFLOP/s a watt
    assert any("Arc A770" in reason and "power_budget_watts" in reason for reason in selection.reasons)
    assert "The devices may draw 350 W + 450 W of the 850 W allowed." in selection.reasons


def test_a_budget_refuses_what_was_asked_for_by_name() -> None:
    (problem,) = select([0, 1, 3], power_budget_watts=850).problems
    assert problem.startswith("`hardware.power_budget_watts` must be at least 1025")
    (problem,) = select([2], power_budget_watts=850).problems
    assert "the power limit of xpu:0 (Intel UHD Graphics 770) is not known" in problem
    (problem,) = select([1], device_power_watts=400).problems
    assert "limited to 450 W, above hardware.device_power_watts (400)" in problem


# ---------------------------------------------------------------- whatever is typed

ENTRIES = st.one_of(
    st.integers(-3, 12),
    st.sampled_from(
        ["cuda:0", "cuda:1", "cuda:9", "xpu:0", "hip:0", "cpu", "cpu:3", "all", "available", "recommend:2"]
    ),
    st.sampled_from(["GPU-8932f937", "GPU-8932", "gpu-", "0000:01:00.0", "0a:00.0", "MIG-1", "0,1", "[0]"]),
    st.text(max_size=12),
)
NAMES = ("busy", "lost", "hidden_by", "unusable", "undriven")
FLAWS: list[dict[str, Any]] = [{}, *({flaw: "x"} for flaw in NAMES)]
STATES = st.sampled_from(FLAWS)


@given(
    st.one_of(st.none(), ENTRIES, st.lists(ENTRIES, max_size=4)),
    st.lists(STATES, min_size=5, max_size=5),
    st.booleans(),
)
def test_never_a_crash_and_never_a_card_that_was_not_meant(
    wish: Any, states: list[dict[str, Any]], share: bool
) -> None:
    cards = [replace(one, **state) for one, state in zip(BOX, states, strict=True)]
    selection = select(wish, cards, share_devices=share)
    if selection.problems:
        return
    assert selection.devices
    by_number = {one.spec.number: one for one in cards}
    for device in selection.devices:
        if device.backend == "cpu":
            continue
        assert device.number is not None
        found = by_number[device.number]
        assert found.lost is found.undriven is found.unusable is found.hidden_by is None
        assert device.uuid == found.spec.uuid
        if isinstance(wish, (list, int)):
            typed = [str(entry) for entry in (wish if isinstance(wish, list) else [wish])]
            names = {str(device.number), found.spec.id, (found.spec.uuid or "-").lower(), found.spec.pci}
            starts = [t for t in typed if (found.spec.uuid or "-").lower().startswith(t.lower())]
            words = [t for t in typed if t.partition(":")[0] in ("all", "available", "recommend")]
            assert words or starts or names & {*typed, *(f"0000:{t}" for t in typed)}
