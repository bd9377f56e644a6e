"""From `hardware.devices` to devices: what is there, what stands in, what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hetexp.core.config import HardwareConfig
from hetexp.core.device import GIB, DeviceSpec
from hetexp.hardware.catalogue import card, card_of
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.inventory import Inventory
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.hardware.selection import devices as module
from hetexp.hardware.selection.devices import select_devices, threads_for
from hetexp.hardware.selection.pool import Selection


def found_card(index: int, vendor: str = "nvidia") -> DeviceSpec:
    backend = {"nvidia": "cuda", "intel": "xpu"}[vendor]
    return DeviceSpec(
        id=f"{backend}:{index}",
        backend=backend,
        index=index,
        name=f"{vendor} card {index}",
        vendor=vendor,
        number=index,
    )


NVIDIA, NVIDIA_2, INTEL = found_card(0), found_card(1), found_card(0, "intel")
MIX = [{"vendor": "nvidia", "emulate_as": "rtx_3090"}, {"vendor": "intel", "emulate_as": "arc_a770"}]


NO_TORCH = "torch 2.13.0+cpu of this interpreter is not built for CUDA; run: hetexp env create cuda"


def inventory(found: Sequence[DeviceSpec], drivable: bool = True) -> Inventory:
    return Inventory([DetectedCard(device, unusable=None if drivable else NO_TORCH) for device in found])


def select(
    devices: Any, found: Sequence[DeviceSpec] = (), drivable: bool = True, **options: Any
) -> Selection:
    return select_devices(HardwareConfig(devices=devices, **options), inventory(found, drivable))


def ids(selection: Selection) -> list[str]:
    assert selection.problems == []
    return [device.id for device in selection.devices]


# ---------------------------------------------------------------- vendors and what stands in for them


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([], ["emulated:0", "emulated:1"]),
        ([NVIDIA, INTEL], ["cuda:0", "xpu:0"]),
        ([INTEL, NVIDIA, NVIDIA_2], ["cuda:0", "cuda:1", "xpu:0"]),
    ],
)
def test_auto_emulates_only_if_all_vendors_are_absent(found: list[DeviceSpec], chosen: list[str]) -> None:
    assert ids(select(MIX, found)) == chosen


@pytest.mark.parametrize(("found", "position", "absent"), [([NVIDIA], 1, "intel"), ([INTEL], 0, "nvidia")])
@pytest.mark.parametrize("missing", ["auto", "error"])
def test_a_part_of_the_mix_is_refused(
    found: list[DeviceSpec], position: int, absent: str, missing: str
) -> None:
    (problem,) = select(MIX, found, missing=missing).problems
    assert problem.startswith(f"`hardware.devices[{position}].vendor` must be")
    for part in (f"'{absent}'", found[0].name, "hardware.missing=emulate", "hardware.missing=drop"):
        assert part in problem


def test_error_refuses_every_absent_vendor() -> None:
    problems = select(MIX, [], missing="error").problems
    assert [problem.partition(" ")[0] for problem in problems] == [
        "`hardware.devices[0].vendor`",
        "`hardware.devices[1].vendor`",
    ]
    assert "no accelerator" in problems[0]


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([], ["emulated:0", "emulated:1"]),
        ([NVIDIA], ["cuda:0", "emulated:0"]),
        ([INTEL], ["emulated:0", "xpu:0"]),
        ([NVIDIA, INTEL], ["cuda:0", "xpu:0"]),
    ],
)
def test_emulate_stands_in_beside_real_cards(found: list[DeviceSpec], chosen: list[str]) -> None:
    assert ids(select(MIX, found, missing="emulate")) == chosen


@pytest.mark.parametrize(
    ("found", "drivable", "chosen"),
    [
        ([], True, ["emulated:0", "emulated:1"]),
        ([NVIDIA], True, ["emulated:0", "emulated:1"]),
        ([INTEL], True, ["emulated:0", "emulated:1"]),
        ([NVIDIA, INTEL], False, ["emulated:0", "emulated:1"]),
        ([NVIDIA, INTEL], True, ["cuda:0", "xpu:0"]),
    ],
)
def test_emulate_all_emulates_every_card_of_an_incomplete_mix(
    found: list[DeviceSpec], drivable: bool, chosen: list[str]
) -> None:
    selection = select(MIX, found, drivable, missing="emulate_all")
    assert ids(selection) == chosen
    emulated = sum("is emulated instead" in reason for reason in selection.reasons)
    assert emulated == sum(name.startswith("emulated") for name in chosen)
    assert not found or not emulated or any(str(found[0]) in reason for reason in selection.reasons)


def test_emulate_all_counts_the_cards_and_leaves_the_cpu_as_it_is() -> None:
    mix = [{"vendor": "nvidia", "emulate_as": "rtx_3090", "count": 2}, {"vendor": "cpu"}]
    assert ids(select(mix, [NVIDIA], missing="emulate_all")) == ["emulated:0", "emulated:1", "cpu:0"]
    assert ids(select(mix, [NVIDIA, NVIDIA_2], missing="emulate_all")) == ["cuda:0", "cuda:1", "cpu:0"]


@pytest.mark.parametrize(
    ("found", "chosen"),
    [([NVIDIA], ["cuda:0"]), ([INTEL], ["xpu:0"]), ([NVIDIA, INTEL], ["cuda:0", "xpu:0"])],
)
def test_drop_goes_without(found: list[DeviceSpec], chosen: list[str]) -> None:
    selection = select(MIX, found, missing="drop")
    assert ids(selection) == chosen
    assert len(selection.reasons) == 2 - len(found)
    assert all("left out (hardware.missing=drop)" in reason for reason in selection.reasons)


def test_drop_needs_a_device_that_is_left() -> None:
    selection = select(MIX, [], missing="drop")
    assert selection.problems == ["`hardware.devices` must select at least one device, but none is left."]


def test_stand_ins_say_what_they_are() -> None:
    selection = select(MIX)
    first, second = selection.devices
    assert (first.card, first.vendor, first.backend) == ("rtx_3090", "nvidia", "emulated")
    assert (second.card, second.vendor, second.index) == ("arc_a770", "intel", 1)
    assert first.memory_bytes == 24 * GIB
    assert "emulated" in first.name
    assert selection.reasons == [
        "No nvidia card was found: rtx_3090 is emulated instead.",
        "No intel card was found: arc_a770 is emulated instead.",
    ]


def test_a_stand_in_must_be_named_and_known() -> None:
    problems = select([{"vendor": "nvidia"}, {"vendor": "intel", "emulate_as": "arc_a777"}]).problems
    assert len(problems) == 2
    assert problems[0].startswith("`hardware.devices[0].emulate_as` must name the card")
    assert problems[1].startswith("`hardware.devices[1].emulate_as`")
    assert "arc_a770" in problems[1]


def test_real_devices_beside_an_absent_vendor() -> None:
    # The only vendor asked for is absent, so all of them are.
    assert ids(select(["cpu", MIX[1]], [NVIDIA])) == ["cpu:0", "emulated:0"]


# ---------------------------------------------------------------- cards of one vendor, told apart by name

A100 = replace(NVIDIA, name="NVIDIA A100-SXM4-80GB")
A100_2 = replace(found_card(2), name="NVIDIA A100-SXM4-80GB")
V100 = replace(NVIDIA_2, name="Tesla V100-SXM2-32GB")
BY_NAME = [
    {"vendor": "nvidia", "match": "A100", "emulate_as": "a100"},
    {"vendor": "nvidia", "match": "V100", "emulate_as": "v100"},
]


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([], ["emulated:0", "emulated:1"]),
        ([NVIDIA, NVIDIA_2], ["emulated:0", "emulated:1"]),  # other cards of the vendor are none of these
        ([V100, A100], ["cuda:0", "cuda:1"]),
        ([A100, V100, A100_2], ["cuda:0", "cuda:2", "cuda:1"]),
    ],
)
def test_match_selects_by_name(found: list[DeviceSpec], chosen: list[str]) -> None:
    assert ids(select(BY_NAME, found)) == chosen


def test_a_part_of_a_mix_by_name_is_refused() -> None:
    (problem,) = select(BY_NAME, [A100]).problems
    assert problem.startswith("`hardware.devices[1].match` must be in the name of a free nvidia card")
    for part in ("'V100'", A100.name, "hardware.missing=emulate", "hardware.missing=drop"):
        assert part in problem
    assert ids(select(BY_NAME, [A100], missing="emulate")) == ["cuda:0", "emulated:0"]
    dropped = select(BY_NAME, [A100], missing="drop")
    assert ids(dropped) == ["cuda:0"]
    assert dropped.reasons == ["No V100 was found: left out (hardware.missing=drop)."]


def test_entries_with_a_count_share_the_cards_of_a_vendor() -> None:
    one = {"vendor": "nvidia", "count": 1}
    assert ids(select([one, one], [NVIDIA, NVIDIA_2])) == ["cuda:0", "cuda:1"]
    assert ids(select([one, "cuda:0"], [NVIDIA, NVIDIA_2])) == ["cuda:1", "cuda:0"]
    (problem,) = select([one, one], [NVIDIA]).problems
    assert problem.startswith("`hardware.devices[1].vendor`")


def test_the_machines_own_cpu_by_vendor() -> None:
    assert ids(select([{"vendor": "cpu"}])) == ["cpu:0"]
    assert ids(select(["cpu", {"vendor": "cpu", "count": 2}])) == ["cpu:0", "cpu:1", "cpu:2"]
    assert ids(select([{"vendor": "cpu", "match": "Abacus 3", "emulate_as": "desktop_cpu_16"}])) == [
        "emulated:0"
    ]


# ---------------------------------------------------------------- hardware.cards

GAMING = replace(NVIDIA, name="NVIDIA GeForce RTX 4090")
GAMING_2 = replace(NVIDIA_2, name="NVIDIA GeForce RTX 4090")
ARC = replace(INTEL, name="Intel(R) Arc(TM) A380 Graphics")


def by_cards(cards: list[Any], found: Sequence[DeviceSpec] = (), **options: Any) -> Selection:
    return select_devices(HardwareConfig(cards=cards, **options), inventory(found))


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([], ["emulated:0", "emulated:1"]),
        ([NVIDIA], ["emulated:0", "emulated:1"]),  # some other NVIDIA card
        ([ARC, GAMING], ["cuda:0", "xpu:0"]),
        ([ARC, GAMING, GAMING_2], ["cuda:0", "xpu:0"]),  # one of each, as typed
    ],
)
def test_cards_are_real_where_all_are_found(found: list[DeviceSpec], chosen: list[str]) -> None:
    selection = by_cards(["rtx_4090", "a380"], found)
    assert ids(selection) == chosen


def test_cards_are_known_by_their_own_names_afterwards() -> None:
    first, second = by_cards(["rtx_4090", "a380"]).devices
    assert (first.card, second.card) == ("rtx_4090", "arc_a380")
    assert second.name == "Arc A380 (emulated)"


def test_a_card_named_twice_means_two() -> None:
    assert ids(by_cards(["4090", "4090"], [GAMING, GAMING_2])) == ["cuda:0", "cuda:1"]
    assert ids(by_cards(["4090", "4090"], [GAMING], missing="emulate")) == ["cuda:0", "emulated:0"]
    (problem,) = by_cards(["4090", "4090"], [GAMING]).problems
    assert problem.startswith("`hardware.cards[1]` must be a card that hetexp can drive in this machine")


def test_a_part_of_the_cards_is_refused_with_the_ways_out() -> None:
    (problem,) = by_cards(["rtx_4090", "a380"], [GAMING]).problems
    assert problem.startswith("`hardware.cards[1]` must be a card")
    for part in (
        "'arc_a380'",
        "NVIDIA GeForce RTX 4090",
        "hardware.missing=emulate",
        "hardware.missing=drop",
        "hardware=auto 'hardware.devices=[emulated:rtx_4090,emulated:arc_a380]'",
    ):
        assert part in problem


def test_unknown_cards_are_told_by_key() -> None:
    problems = by_cards(["rtx_4090", "a381", "rtx_9090"]).problems
    assert [problem.partition(" must be one of ")[0] for problem in problems] == [
        "`hardware.cards[1]`",
        "`hardware.cards[2]`",
    ]
    assert "Did you mean `a380`?" in problems[0]


# ---------------------------------------------------------------- efficiency and a catalogue of one's own


@pytest.mark.parametrize(
    "entry",
    [
        {"device": "emulated:rtx_3090", "efficiency": 0.6},
        {"vendor": "nvidia", "emulate_as": "rtx_3090", "efficiency": 0.6},
    ],
)
def test_efficiency_reaches_the_ranks_model(entry: dict[str, Any]) -> None:
    selection = select([entry, "emulated:rtx_3090"])
    chosen, other = (card_of(device) for device in selection.devices)
    flops = 35.58e12
    assert chosen.compute_seconds(flops, "float32") == pytest.approx(chosen.overhead_seconds + 1 / 0.6)
    assert other == card("rtx_3090")  # the catalogue itself is left as it was
    backend = EmulatedBackend(selection.devices[0])
    assert backend.card == chosen
    assert "RTX 3090 is emulated at efficiency 0.6 instead of the catalogue's 0.45." in selection.reasons


def test_a_real_card_has_no_efficiency_to_set() -> None:
    entry = {"vendor": "nvidia", "emulate_as": "rtx_3090", "efficiency": 0.6}
    selection = select([entry], [NVIDIA])
    assert selection.devices == [NVIDIA]
    assert selection.reasons == []


MY_CARDS = """
cards:
  my_card:
    name: My card
    vendor: nvidia
    memory_gib: 8
    tflops: {float32: 10}
    bandwidth_gb_per_second: 300
    link: pcie4x8
    match: My Card
"""


def test_a_card_of_ones_own_is_selected_and_survives_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "my_cards.yaml"
    path.write_text(MY_CARDS)
    for selection in (
        select(["emulated:my_card"], catalogue=str(path)),
        select([{"vendor": "nvidia", "emulate_as": "my_card"}], catalogue=str(path)),
        by_cards(["my_card"], catalogue=str(path)),
    ):
        assert ids(selection) == ["emulated:0"]
        path_free = DeviceSpec.from_dict(json.loads(json.dumps(asdict(selection.devices[0]))))
        assert path_free == selection.devices[0]
        assert EmulatedBackend(path_free).card.tflops == {"float32": 10}
    mine = replace(NVIDIA, name="NVIDIA My Card")
    assert ids(by_cards(["my_card"], [mine], catalogue=str(path))) == ["cuda:0"]


def test_what_is_wrong_with_the_catalogue_is_told_alone(tmp_path: Path) -> None:
    path = tmp_path / "my_cards.yaml"
    path.write_text(MY_CARDS.replace("10}", "-10}").replace("pcie4x8", "pcie9"))
    selection = select(["emulated:my_card"], catalogue=str(path))
    (problem,) = selection.problems  # and not that my_card is unknown
    assert problem.startswith("`hardware.catalogue: cards.my_card.tflops.float32`")
    assert (
        select(["cpu"], catalogue=str(tmp_path / "none.yaml"))
        .problems[0]
        .startswith("`hardware.catalogue` must be the path")
    )


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("entry", "found", "chosen"),
    [
        ({"device": "cpu", "count": 3}, [], ["cpu:0", "cpu:1", "cpu:2"]),
        ({"device": "cpu:2", "count": 2}, [], ["cpu:2", "cpu:3"]),
        ({"device": "emulated:rtx_3090", "count": 2}, [], ["emulated:0", "emulated:1"]),
        ({"vendor": "nvidia", "count": 1}, [NVIDIA, NVIDIA_2], ["cuda:0"]),
        ({"vendor": "nvidia", "count": 2}, [NVIDIA, NVIDIA_2], ["cuda:0", "cuda:1"]),
        ({"vendor": "nvidia", "emulate_as": "rtx_3090", "count": 2}, [], ["emulated:0", "emulated:1"]),
    ],
)
def test_counts(entry: dict[str, Any], found: list[DeviceSpec], chosen: list[str]) -> None:
    assert ids(select([entry], found)) == chosen


def test_more_cards_than_there_are() -> None:
    (problem,) = select([{"vendor": "nvidia", "count": 3}], [NVIDIA, NVIDIA_2]).problems
    assert problem.startswith("`hardware.devices[0].count` must be at most 2")
    assert "3" in problem


@pytest.mark.parametrize("device", ["cuda:0", "auto"])
def test_a_named_device_has_no_count(device: str) -> None:
    (problem,) = select([{"device": device, "count": 2}], [NVIDIA]).problems
    assert problem.startswith("`hardware.devices[0].count` must be absent")


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        (["cpu"], ["cpu:0"]),
        (["cpu", "cpu"], ["cpu:0", "cpu:1"]),
        (["cpu:1"], ["cpu:1"]),
        (["cuda:1", "cuda:0"], ["cuda:1", "cuda:0"]),  # rank order is the order of the list
        (["cuda:0", "cpu"], ["cuda:0", "cpu:0"]),
        (["emulated:rtx_3090", "cpu", "emulated:arc_a770"], ["emulated:0", "cpu:0", "emulated:1"]),
    ],
)
def test_named_devices(devices: list[str], chosen: list[str]) -> None:
    assert ids(select(devices, [NVIDIA, NVIDIA_2])) == chosen


@pytest.mark.parametrize(
    "devices", [["cpu:1", "cpu"], ["cpu:2", "cpu"], [{"device": "cpu:1", "count": 2}, "cpu"]]
)
def test_a_cpu_without_a_number_gets_a_free_one(devices: list[Any]) -> None:
    chosen = ids(select(devices))
    assert len(set(chosen)) == len(chosen) >= 2


@pytest.mark.parametrize(
    "name", ["cuda:9", "cuda", "gpu", "CPU", "cpu:x", "cpu:", "", "emulated", "xpu:0", "cuda:0:1", "cpu 0"]
)
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    (problem,) = select([name], [NVIDIA]).problems
    assert problem.startswith("`hardware.devices[0].device` must be one of ")
    for known in ("auto", "cpu", "cuda:0", "emulated:CARD", f"but is '{name}' instead"):
        assert known in problem


def test_an_unknown_card_to_emulate() -> None:
    (problem,) = select(["cpu", "emulated:rtx_3091"]).problems
    assert problem.startswith("`hardware.devices[1]`")
    assert "rtx_3090" in problem


@pytest.mark.parametrize(
    ("devices", "twice"),
    [
        (["cpu:0", "cpu:0"], "cpu:0"),
        (["cuda:0", "cuda:0"], "cuda:0"),
        (["cuda:0", {"vendor": "nvidia"}], "cuda:0"),
        ([{"device": "cpu", "count": 2}, "cpu:1"], "cpu:1"),
        (["auto", "cuda:1"], "cuda:1"),
    ],
)
def test_no_device_twice(devices: list[Any], twice: str) -> None:
    (problem,) = select(devices, [NVIDIA, NVIDIA_2]).problems
    assert problem.startswith(f"`hardware.devices` must name each device once, but names {twice} twice.")
    assert ("share_devices" in problem) == twice.startswith("cuda")


def test_every_problem_at_once() -> None:
    problems = select(
        ["tpu", {"vendor": "amd"}, {"device": "cpu", "python": "/no/such"}], missing="error"
    ).problems
    assert [problem.split("`")[1] for problem in problems] == [
        "hardware.devices[0].device",
        "hardware.devices[1].vendor",
        "hardware.devices[2].python",
    ]


# ---------------------------------------------------------------- auto


@pytest.mark.parametrize(
    ("found", "drivable", "chosen"),
    [
        ([], True, ["cpu:0"]),
        ([NVIDIA], True, ["cuda:0"]),
        ([NVIDIA, NVIDIA_2], True, ["cuda:0", "cuda:1"]),
        ([NVIDIA], False, ["cpu:0"]),
    ],
)
def test_auto(found: list[DeviceSpec], drivable: bool, chosen: list[str]) -> None:
    selection = select("auto", found, drivable)
    assert ids(selection) == chosen
    assert len(selection.reasons) == 1 + (not drivable)


def test_auto_tells_why_a_card_was_left_out() -> None:
    first, second = select("auto", [NVIDIA], drivable=False).reasons
    assert first == f"{NVIDIA} is left out: not usable: {NO_TORCH}."
    assert second == "No accelerator can be used: the CPU trains alone."


def test_auto_with_an_interpreter_that_may_drive_the_card() -> None:
    selection = select([{"device": "auto", "python": sys.executable}], [NVIDIA], drivable=False)
    assert ids(selection) == ["cuda:0"]
    assert selection.devices[0].python == sys.executable


@pytest.mark.parametrize("devices", [["auto", "cpu"], ["cpu", "auto"]])
def test_auto_beside_the_cpu(devices: list[str]) -> None:
    assert sorted(ids(select(devices, [NVIDIA]))) == ["cpu:0", "cuda:0"]
    assert ids(select(devices, [])) in (["cpu:0"], ["cpu:0", "cpu:1"])


# ---------------------------------------------------------------- whose torch drives them


@pytest.mark.parametrize("entry", [{"device": "cuda:0"}, {"vendor": "nvidia"}])
def test_a_card_that_torch_cannot_drive_is_refused(entry: dict[str, Any]) -> None:
    (problem,) = select(["cpu", entry], [NVIDIA], drivable=False).problems
    assert problem == (
        f"`hardware.devices[1]` must be a device that can be used, but {NVIDIA} is not usable: {NO_TORCH}."
    )
    assert select(["cpu", entry], [NVIDIA], drivable=True).problems == []


def test_another_interpreter_may_drive_it() -> None:
    devices = ["cpu", {"vendor": "nvidia", "python": sys.executable}]
    selection = select(devices, [NVIDIA, NVIDIA_2], drivable=False)
    assert ids(selection) == ["cpu:0", "cuda:0", "cuda:1"]
    assert [device.python for device in selection.devices] == [None, sys.executable, sys.executable]
    assert [device.name for device in selection.devices[1:]] == [NVIDIA.name, NVIDIA_2.name]


def test_the_found_devices_are_left_as_they_were() -> None:
    select([{"device": "cuda:0", "python": sys.executable}], [NVIDIA])
    assert NVIDIA.python is None


# ---------------------------------------------------------------- threads


def test_threads_as_wanted() -> None:
    devices = select(["cpu", "cuda:0"], [NVIDIA]).devices
    assert threads_for(devices, 3) == (3, 3)


@pytest.mark.parametrize(
    ("names", "cores", "threads"),
    [
        (["cpu"], 8, (8,)),
        (["cpu", "cpu"], 8, (4, 4)),
        (["cpu", "emulated:rtx_3090", "emulated:arc_a770"], 8, (2, 2, 2)),
        (["cpu", "cpu", "cpu"], 2, (1, 1, 1)),
        (["cuda:0"], 32, (4,)),  # more would collate a batch more slowly
        (["cuda:0", "cuda:1"], 32, (4, 4)),
        (["cuda:0", "cuda:1"], 6, (3, 3)),
        (["cuda:0", "cuda:1"], 1, (1, 1)),
        (["cpu", "cuda:0"], 16, (12, 4)),  # the CPU's rank computes on the rest
        (["cpu", "cuda:0", "cpu"], 9, (3, 3, 3)),
        (["cpu", "cuda:0"], 2, (1, 1)),
        (["cpu", "cuda:0"], 1, (1, 1)),
    ],
)
def test_all_ranks_share_the_cores_and_a_cards_rank_takes_few(
    monkeypatch: pytest.MonkeyPatch, names: list[str], cores: int, threads: tuple[int, ...]
) -> None:
    monkeypatch.setattr(module, "cpu_count", lambda: cores)
    devices = select(names, [NVIDIA, NVIDIA_2]).devices
    assert threads_for(devices, None) == threads


@pytest.mark.parametrize(("cores", "threads"), [(16, (4, 4)), (12, (2, 2)), (4, (1, 1))])
def test_loader_processes_take_cores_from_a_cards_rank(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: tuple[int, ...]
) -> None:
    monkeypatch.setattr(module, "cpu_count", lambda: cores)
    assert threads_for(select(["cuda:0", "cuda:1"], [NVIDIA, NVIDIA_2]).devices, None, loaders=4) == threads
