"""`CUDA_VISIBLE_DEVICES` in every form: what it names is visible; what is unclear is reported, no guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml import (
    GIB,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    FakeCard,
    FakeInstance,
    FakeNvml,
    cards_like,
    error,
    machine_with,
    put_file,
    put_on_bus,
)
from hypothesis import example, given
from hypothesis import strategies as st

from hetexp.hardware.backends.cuda import CudaBackend
from hetexp.hardware.detection.detected import DetectedCard, Seen
from hetexp.hardware.detection.inventory import numbered
from hetexp.hardware.detection.pci import pci_cards

A, B, C = cards_like(FakeCard(), 3)
UNEQUAL = [A, replace(B, name="NVIDIA GeForce RTX 3060", memory=(12 * GIB, 11 * GIB)), C]
PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
NOWHERE = Path("/nowhere")


def hidden(
    cards: Sequence[FakeCard],
    mask: str | None,
    environ: Mapping[str, str] | None = None,
    sees: Sequence[Seen] = (),
    asked: list[str] | None = None,
    root: Path = NOWHERE,
) -> tuple[list[DetectedCard], list[str]]:
    """Return the machine's cards after the mask, and the problems."""
    environ = dict(environ or {}) | ({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    nvml = FakeNvml(cards)
    machine = machine_with(nvml, root, environ, sees, asked)
    found = numbered(CudaBackend.cards(machine, pci_cards(machine)))
    after, problems = CudaBackend.hide(found, machine)
    assert nvml.opened == 0
    # The same cards in the same order, changed in nothing else.
    assert [replace(card, hidden_by=None) for card in after] == found
    return after, problems


def places(cards: Sequence[DetectedCard], mask: str | None) -> list[int]:
    for card in cards:
        assert card.hidden_by in (None, f"CUDA_VISIBLE_DEVICES={mask}")
    return [place for place, card in enumerate(cards) if card.hidden_by is None]


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, [0, 1, 2]),
        ("", []),
        (" ", []),
        (",", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", [0]),
        ("1", [1]),
        ("2,0", [0, 2]),
        (" 1 , 0 ", [0, 1]),
        ("0,1,2", [0, 1, 2]),
        ("0,", [0]),
        ("0,-1,1", [0]),  # -1 ends the list
        ("1,NoDevFiles", [1]),
        (C.uuid, [2]),
        ("GPU-cccc", [2]),
        ("GPU-c", [2]),
        (f" {B.uuid} ,GPU-aaa", [0, 1]),
        (C.uuid.upper(), [2]),
        ("000", [0]),
    ],
)
def test_what_is_named_is_visible(mask: str | None, visible: list[int]) -> None:
    asked: list[str] = []
    cards, problems = hidden([A, B, C], mask, asked=asked)
    assert places(cards, mask) == visible
    assert problems == []
    assert asked == []
    assert [card.spec.number for card in cards] == [0, 1, 2]


@pytest.mark.parametrize(
    ("mask", "visible", "problem"),
    [
        ("0,0", [], "`CUDA_VISIBLE_DEVICES` must name each card once, but names 0 twice ('0,0')."),
        ("1,2,1", [], "names 1 twice ('1,2,1')"),
        ("0,GPU-aabb", [0], "must hold only numbers or only UUIDs, but mixes them ('0,GPU-aabb')"),
        (f"{C.uuid},0", [2], "CUDA stops reading at '0'"),
        ("0,GPU-aaaa", [0], "CUDA stops reading at 'GPU-aaaa'"),
        ("GPU-aaa,GPU-aaaa", [], "names cuda:0 twice"),
        (
            "2,9",
            [2],
            "`CUDA_VISIBLE_DEVICES` must hold numbers from 0 to 2, or UUIDs, but names 9 ('2,9').",
        ),
        ("9", [], "must hold numbers from 0 to 2, or UUIDs, but names 9."),
        ("1,9,0", [1], "but names 9 ('1,9,0')"),  # CUDA's list, too, ends there
        (f"0,{'9' * 5000}", [0], "must hold numbers from 0 to 2"),
        (
            "GPU-aa",
            [],
            f"must name one card an entry, but 'GPU-aa' begins {A.uuid} and {B.uuid}. Write more",
        ),
        ("GPU-dddd", [], "must name NVIDIA cards of this machine by number or UUID, but names 'GPU-dddd'."),
        (
            f"GPU-c,{A.uuid[:-1]}1",
            [2],
            f"but names '{A.uuid[:-1]}1' ('GPU-c,{A.uuid[:-1]}1'). Did you mean `{A.uuid}`?",
        ),
        ("gpu-aaaa0000-0000-0000-0000-000000000000", [], f"Did you mean `{A.uuid}`?"),
        ("GPU-", [], "names 'GPU-'"),
        ("G", [], "names 'G'"),
        ("MIG-1234", [], "names 'MIG-1234'"),
        ("none", [], "names 'none'"),
        ("all", [], "names 'all'"),
        ("1gpu", [], "names '1gpu'"),
        ("²", [], "names '²'"),
        ("0x1", [], "names '0x1'"),
        ("-0", [], "names '-0'"),
        ("+1", [], "names '+1'"),
        ("cuda:0", [], "names 'cuda:0'"),
        ("0;1", [], "names '0;1'"),
        ("0,,1", [0], "must name a card between two commas, but is '0,,1' instead."),
        (",1", [], "must name a card between two commas"),
    ],
)
def test_what_names_no_card_is_told(mask: str, visible: list[int], problem: str) -> None:
    cards, problems = hidden([A, B, C], mask)
    assert places(cards, mask) == visible
    assert len(problems) == 1
    assert problem in problems[0]
    assert problems[0].startswith("`CUDA_VISIBLE_DEVICES` must ")


def test_all_problems_at_once() -> None:
    cards, problems = hidden([A, B, C], "0,7,none,7")
    assert places(cards, "0,7,none,7") == [0]
    assert [problem.rpartition(", but ")[2] for problem in problems] == [
        "names 7 ('0,7,none,7').",
        "names 'none' ('0,7,none,7').",
    ]


def test_one_card_has_one_number() -> None:
    _, problems = hidden([A], "1")
    assert problems == ["`CUDA_VISIBLE_DEVICES` must hold 0, the only card's number, or UUIDs, but names 1."]


def test_no_card_no_problem() -> None:
    assert hidden([], "7,none") == ([], [])


def test_cards_without_a_driver_are_hidden_without_a_word(tmp_path: Path) -> None:
    put_on_bus(tmp_path, "0000:01:00.0", driver="nouveau")
    cards, problems = hidden([], "0", root=tmp_path)
    assert problems == []
    assert [card.state for card in cards] == ["unusable"]
    assert "nouveau" in (cards[0].why_not or "")


def test_cards_of_another_driver_have_no_number(tmp_path: Path) -> None:
    put_on_bus(tmp_path, "0000:00:01.0", driver="vfio-pci")
    put_on_bus(tmp_path, "0000:01:00.0")
    cards, problems = hidden([A], "0", root=tmp_path)
    assert problems == []
    assert [(card.spec.id, card.state) for card in cards] == [
        ("cuda:0", "unusable"),
        ("cuda:1", "available"),
    ]


# Which card a number means.

BY_UUID = [Seen(0, "b", uuid=B.uuid[4:]), Seen(1, "a", uuid=A.uuid[4:]), Seen(2, "c", uuid=C.uuid[4:])]
BY_ADDRESS = [
    Seen(0, "b", pci="0000:02:00.0"),
    Seen(1, "a", pci="0000:01:00.0"),
    Seen(2, "c", pci="0000:03:00.0"),
]


@pytest.mark.parametrize("sees", [BY_UUID, BY_ADDRESS])
@pytest.mark.parametrize(("mask", "visible"), [("0", [1]), ("1", [0]), ("2,0", [1, 2])])
def test_unequal_cards_have_cudas_numbers(sees: list[Seen], mask: str, visible: list[int]) -> None:
    asked: list[str] = []
    cards, problems = hidden(UNEQUAL, mask, sees=sees, asked=asked)
    assert places(cards, mask) == visible
    assert problems == []
    assert asked == ["cuda"]  # once, however many entries there are


@pytest.mark.parametrize("order", ["FASTEST_FIRST", "pci_bus_id", ""])
def test_only_one_word_makes_cuda_count_along_the_bus(order: str) -> None:
    cards, _ = hidden(UNEQUAL, "0", {"CUDA_DEVICE_ORDER": order}, BY_UUID)
    assert places(cards, "0") == [1]


def test_numbers_along_the_bus_need_nobody() -> None:
    asked: list[str] = []
    cards, problems = hidden(UNEQUAL, "1", PCI_ORDER, BY_UUID, asked)
    assert (places(cards, "1"), problems, asked) == ([1], [], [])


@pytest.mark.parametrize("mask", ["0", "1,0", "2,2", "0,1,2,3"])
def test_unequal_cards_that_nobody_can_number_are_refused(mask: str) -> None:
    cards, problems = hidden(UNEQUAL, mask)
    assert places(cards, mask) == []
    for problem in problems:
        assert "must name cards by UUID on this machine" in problem
        assert "CUDA counts unequal cards from the fastest" in problem
        assert "Export CUDA_DEVICE_ORDER=PCI_BUS_ID" in problem
        assert "nvidia-smi -L" in problem


@pytest.mark.parametrize("mask", ["0,1,2", "2,0,1", " 1,0 ,2"])
def test_all_of_them_need_no_order(mask: str) -> None:
    asked: list[str] = []
    cards, problems = hidden(UNEQUAL, mask, asked=asked)
    assert (places(cards, mask), problems, asked) == ([0, 1, 2], [], [])


def test_uuids_need_no_order() -> None:
    asked: list[str] = []
    mask = f"{C.uuid},GPU-aabb"
    cards, problems = hidden(UNEQUAL, mask, asked=asked)
    assert (places(cards, mask), problems, asked) == ([1, 2], [], [])


def test_one_name_two_sizes_is_two_kinds() -> None:
    small = replace(B, memory=(8 * GIB, GIB))
    assert hidden([replace(A, memory=(12 * GIB, GIB)), small], "0")[1] != []
    ecc = replace(B, memory=(24 * GIB * 15 // 16, GIB))
    assert hidden([A, ecc], "0")[1] == []
    silent = replace(B, fails={"nvmlDeviceGetMemoryInfo": error(NOT_SUPPORTED)})
    assert hidden([A, silent], "0")[1] == []


@pytest.mark.parametrize("fails", [{"handle": error(GPU_IS_LOST)}, {"*": error(GPU_IS_LOST)}])
def test_beside_a_lost_card_numbers_are_asked_for(fails: dict[str, Exception]) -> None:
    cards = [replace(A, fails=fails), B, C]
    after, problems = hidden(cards, "1", PCI_ORDER)
    assert [card.state for card in after if card.spec.uuid in (B.uuid, C.uuid)] == ["hidden", "hidden"]
    assert "beside a lost card CUDA may count otherwise" in problems[0]
    assert "Export" not in problems[0]  # it would not help
    seen = [Seen(0, "b", uuid=B.uuid[4:]), Seen(1, "c", uuid=C.uuid[4:])]
    after, problems = hidden(cards, "1", PCI_ORDER, seen)
    assert problems == []
    assert [card.spec.uuid for card in after if card.state == "available"] == [C.uuid]


def test_beside_a_card_that_may_not_be_opened_numbers_are_asked_for() -> None:
    cards = [replace(A, fails={"handle": error(NO_PERMISSION)}), B]
    assert "may not count" in hidden(cards, "0", PCI_ORDER)[1][0]


def test_cards_without_an_address_have_no_order() -> None:
    cards = [A, replace(B, fails={"nvmlDeviceGetPciInfo": error(NOT_SUPPORTED)})]
    assert "not all cards have an address" in hidden(cards, "0", PCI_ORDER)[1][0]


def test_a_number_of_a_card_that_only_torch_sees() -> None:
    cards, problems = hidden(UNEQUAL, "1", sees=[BY_UUID[0], Seen(1, "another", uuid="f" * 32)])
    assert places(cards, "1") == []
    assert "must name NVIDIA cards of this machine" in problems[0]


def test_windows_subsystem_counts_as_torch_does(tmp_path: Path) -> None:
    put_file(tmp_path, "/dev/dxg")
    sees = [Seen(0, "fast", uuid=B.uuid[4:]), Seen(1, "slow", uuid=A.uuid[4:])]
    machine = machine_with(
        FakeNvml(init=error(LIBRARY_NOT_FOUND)), tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}, sees
    )
    cards, problems = CudaBackend.hide(numbered(CudaBackend.cards(machine, [])), machine)
    assert problems == []
    assert [card.spec.name for card in cards if card.state == "available"] == ["slow"]


# MIG.

ONE = FakeInstance(ids=(7, 0))
TWO = FakeInstance(uuid="MIG-99999999-2222-3333-4444-555555555555", ids=(13, 1))
SPLIT = replace(A, name="NVIDIA A100", capability=(8, 0), instances=(ONE, TWO))
SINGLE = replace(SPLIT, instances=(ONE,))


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (ONE.uuid, [0]),
        (f"{TWO.uuid},{ONE.uuid}", [0, 1]),
        ("MIG-9999", [1]),
        (f"MIG-{A.uuid}/7/0", [0]),
        (f"MIG-{A.uuid}/13/1", [1]),
        ("MIG-GPU-aaaa/13/1", [1]),
        (f"{B.uuid},{ONE.uuid}", [0, 2]),
        ("MIG-GPU-aaaa/7/0,GPU-aabb", [0, 2]),
        ("", []),
    ],
)
def test_instances_by_either_name(mask: str, visible: list[int]) -> None:
    cards, problems = hidden([SPLIT, B], mask)
    assert places(cards, mask) == visible
    assert problems == []


def test_drivers_that_name_instances_the_old_way() -> None:
    old = replace(ONE, uuid=f"MIG-{A.uuid}/7/0")
    cards, problems = hidden([replace(SPLIT, instances=(old,))], old.uuid)
    assert places(cards, old.uuid) == [0]
    assert problems == []


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (f"MIG-{A.uuid}/7/1", "must name NVIDIA cards of this machine"),
        (f"MIG-{A.uuid}/7", "must name NVIDIA cards of this machine"),
        ("MIG-GPU-dddd/7/0", "must name NVIDIA cards of this machine"),
        ("GPU-aaaa", "must name one instance of a card in MIG mode, but names the whole card by 'GPU-aaaa'."),
        (A.uuid, f"Its instances are {ONE.uuid} and {TWO.uuid}."),
        (f"{ONE.uuid},{ONE.uuid}", "must name each card once"),
        (f"{ONE.uuid},MIG-{A.uuid}/7/0", "names cuda:0 twice"),
        ("MIG-", "names 'MIG-'"),
        ("0", "beside a card in MIG mode CUDA counts otherwise"),
    ],
)
def test_instances_that_are_not_named_clearly(mask: str, words: str) -> None:
    cards, problems = hidden([SPLIT, B], mask)
    assert places(cards, mask) == []
    assert len(problems) == 1
    assert words in problems[0]


def test_the_only_instance_of_the_only_card() -> None:
    for mask in ("0", A.uuid, "GPU-aaaa"):
        cards, problems = hidden([SINGLE], mask)
        assert places(cards, mask) == [0]
        assert problems == []


def test_a_number_names_no_instance_of_several() -> None:
    cards, problems = hidden([SPLIT], "0")
    assert places(cards, "0") == []
    assert "one instance of a card in MIG mode, but names the whole card by '0'." in problems[0]


def test_numbers_beside_a_card_in_mig_mode_are_asked_for() -> None:
    seen = [Seen(0, "b", uuid=B.uuid[4:])]
    cards, problems = hidden([SINGLE, B], "0", sees=seen)
    assert (places(cards, "0"), problems) == ([1], [])
    by_address = [Seen(0, "instance", pci="0000:01:00.0")]
    cards, problems = hidden([SINGLE, B], "0", sees=by_address)
    assert (places(cards, "0"), problems) == ([0], [])
    cards, problems = hidden([SPLIT, B], "0", sees=by_address)
    assert places(cards, "0") == []
    assert "names the whole card" in problems[0]


def test_a_card_in_mig_mode_without_instances_makes_numbers_unclear() -> None:
    cards, problems = hidden([replace(SPLIT, instances=()), B], "0")
    assert places(cards, "0") == []
    assert "CUDA may not count the card that cannot be used" in problems[0]


# Whatever people write.

ENTRIES = st.one_of(
    st.sampled_from(["", " ", "-1", "NoDevFiles", "0", "1", "2", "3", " 1 ", "00", "GPU-", "MIG-", "GPU-a"]),
    st.sampled_from([A.uuid, B.uuid[:9], C.uuid, ONE.uuid, TWO.uuid, f"MIG-{A.uuid}/7/0", "MIG-GPU-aa/7/0"]),
    st.text(max_size=12),
    st.integers(-3, 10**30).map(str),
    st.text("GPUMIG-abc019/", max_size=12),
)
MASKS = st.one_of(st.lists(ENTRIES, max_size=5).map(",".join), st.text(max_size=30))
MACHINES: Mapping[str, Sequence[FakeCard]] = {
    "equal": [A, B, C],
    "unequal": UNEQUAL,
    "one": [A],
    "mig": [SPLIT, B],
    "only mig": [SPLIT],
    "lost": [A, replace(B, fails={"handle": error(GPU_IS_LOST)}), C],
    "no uuid": [replace(A, fails={"nvmlDeviceGetUUID": error(NOT_SUPPORTED)}), B],
    "none": [],
}


def names(entry: str, card: DetectedCard, place: int, clear: bool) -> bool:
    """Whether an entry may name a card: by its UUID, its card's, or its number (any, where unclear)."""
    if entry.isascii() and entry.isdigit():
        return not clear or int(entry) == place
    uuid = card.spec.uuid or ""
    whole = A.uuid if uuid.startswith("MIG-") else uuid  # only the first card has instances
    old = entry.removeprefix("MIG-").partition("/")[0]
    return len(entry) > len("GPU-") and (uuid.startswith(entry) or whole.startswith((entry, old)))


@given(st.sampled_from(sorted(MACHINES)), MASKS, st.booleans(), st.sampled_from([(), BY_UUID, BY_ADDRESS]))
@example("equal", "0,²", False, ())
@example("mig", "MIG-GPU-aaaa/٣/0", False, ())
@example("equal", "9" * 4000, False, ())
def test_no_mask_is_a_crash_or_a_guess(
    machine: str, mask: str, along_bus: bool, sees: Sequence[Seen]
) -> None:
    cards, problems = hidden(MACHINES[machine], mask, PCI_ORDER if along_bus else None, sees)
    entries = [entry.strip() for entry in mask.split(",")]
    clear = machine in ("equal", "one") or (machine == "unequal" and along_bus)
    visible = places(cards, mask)
    for place in visible:
        assert any(names(entry, cards[place], place, clear) for entry in entries), (place, entries)
    assert len(visible) <= sum(1 for entry in entries if entry)
    if not problems and cards and not any(entry == "NoDevFiles" or entry[:1] == "-" for entry in entries):
        # Nothing was left out without a word: each entry names a card that is visible.
        assert len(visible) == sum(1 for entry in entries if entry)
    for problem in problems:
        assert problem.startswith("`CUDA_VISIBLE_DEVICES` must ")
    assert len(set(problems)) == len(problems)
