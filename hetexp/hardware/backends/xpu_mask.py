"""Reads the variables that hide Intel's cards: Level Zero's affinity mask, then SYCL's selector on the rest.

Level Zero counts discrete cards first, each kind along the bus, or all along the bus with
ZE_ENABLE_PCI_ID_DEVICE_ORDER=1 (`comparePciIdBusNumber` in compute-runtime). Meaning of the mask:
https://oneapi-src.github.io/level-zero-spec/level-zero/latest/core/PROG.html#affinity-mask; of the selector:
https://github.com/intel/llvm/blob/sycl/sycl/doc/EnvironmentVariables.md#oneapi_device_selector. A mask that
is not understood hides all cards and is reported: hetexp uses no card by a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hetexp.core.device import DeviceSpec

MASK, SELECTOR = "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"
HIERARCHY, BUS_ORDER = "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
_ENTRY = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_BACKENDS = ("*", "level_zero", "opencl", "cuda", "hip", "native_cpu", "offload")
_OTHER_DEVICES = ("cpu", "fpga")
"""Kinds of devices that are no graphics cards."""


class _UnclearError(Exception):
    """A value cannot be understood; the text ends the sentence "`NAME` must …"."""


def in_level_zero_order(cards: Sequence[DeviceSpec], along_the_bus: bool = False) -> list[DeviceSpec]:
    """Return cards as Level Zero counts them.

    Args:
        cards: those that it can open.
        along_the_bus: whether ZE_ENABLE_PCI_ID_DEVICE_ORDER is 1.
    """
    return sorted(cards, key=lambda card: (card.integrated and not along_the_bus, card.pci or "~"))


def hidden(
    cards: Sequence[DeviceSpec], environ: Mapping[str, str], tiles: Mapping[str, int]
) -> tuple[dict[str, str], list[str]]:
    """Return the cards that the variables hide.

    Args:
        cards: those that Level Zero can open.
        environ: environment of the launcher.
        tiles: id of a card → parts that it shows as devices of their own unless ZE_FLAT_DEVICE_HIERARCHY is
            COMPOSITE; cards without an entry have one.

    Returns:
        Id of each hidden card → the variable that hides it, `ZE_AFFINITY_MASK=1`; and the mistakes in the
        variables.
    """
    by: dict[str, str] = {}
    problems: list[str] = []
    left = in_level_zero_order(cards, environ.get(BUS_ORDER) == "1")
    for variable, read in ((MASK, _masked), (SELECTOR, _selected)):
        value = environ.get(variable)
        if value is None:
            continue
        visible: list[DeviceSpec] = []
        try:
            visible = read(value, left, environ, tiles)
        except _UnclearError as unclear:
            problems.append(f"`{variable}` must {unclear}")
        by |= {card.id: f"{variable}={value}" for card in left if card not in visible}
        left = visible
    return by, problems


def _masked(
    value: str, cards: Sequence[DeviceSpec], environ: Mapping[str, str], tiles: Mapping[str, int]
) -> list[DeviceSpec]:
    composite = environ.get(HIERARCHY, "").strip() == "COMPOSITE"
    # One place a device that Level Zero shows: a card, or a tile of one.
    places = [card for card in cards for _ in range(1 if composite else tiles.get(card.id, 1))]
    numbers = f"0 to {len(places) - 1}" if len(places) > 1 else "0, the only one's number"
    if not value.strip():
        raise _UnclearError(
            f"name Intel cards by number ({numbers}), but is empty, which Level Zero takes for all. Unset it."
        )
    named: list[tuple[int, int | None]] = []
    for entry in (part.strip() for part in value.split(",")):
        match = _ENTRY.fullmatch(entry)
        if match is None or int(match[1]) >= len(places):
            raise _UnclearError(
                f"name Intel cards by number ({numbers}), but names {entry!r}{_whole(value, entry)}."
            )
        named.append((int(match[1]), int(match[2]) if match[2] is not None else None))
    if len(set(named)) != len(named):
        raise _UnclearError(f"name each card once, but is {value!r} instead.")
    seen = {place for place, part in named if part is None}
    for place, part in named:
        if part is None:
            continue
        if tiles.get(places[place].id, 1) > 1 or part > 0:
            raise _UnclearError(
                f"name whole cards, because hetexp drives no part of one, but is {value!r} instead."
            )
        seen.add(place)
    visible = []
    for card in cards:
        of_card = {place for place, other in enumerate(places) if other is card}
        if of_card & seen and not of_card <= seen:
            raise _UnclearError(
                f"name all tiles of {card.name} or none, because hetexp drives no part of a card, but is "
                f"{value!r} instead. With {HIERARCHY}=COMPOSITE a number means a card."
            )
        if of_card <= seen:
            visible.append(card)
    return visible


def _selected(
    value: str, cards: Sequence[DeviceSpec], environ: Mapping[str, str], tiles: Mapping[str, int]
) -> list[DeviceSpec]:
    accepted: set[int] = set()
    discarded: set[int] = set()
    accepts = discards = False
    for term in (part.strip().casefold() for part in value.split(";")):
        backend, colon, devices = term.removeprefix("!").partition(":")
        if not colon or backend.strip() not in _BACKENDS:
            raise _UnclearError(f"hold terms like level_zero:0, but holds {term!r}{_whole(value, term)}.")
        places = _places(devices, backend.strip(), len(cards), value)
        if term.startswith("!"):
            discards = True
            discarded |= places
        elif discards:
            raise _UnclearError(f"say what to discard (!…) last, but is {value!r} instead.")
        else:
            accepts = True
            accepted |= places
    if not accepts:  # only discarding terms: all others are accepted
        accepted = set(range(len(cards)))
    return [card for place, card in enumerate(cards) if place in accepted - discarded]


def _places(devices: str, backend: str, count: int, value: str) -> set[int]:
    """Return the places of Level Zero's cards that a term selects; the other backends have none of them."""
    places: set[int] = set()
    for device in (part.strip() for part in devices.split(",")):
        if device in ("*", "gpu"):
            places |= set(range(count))
        elif re.fullmatch(r"[0-9]{1,9}", device):
            if int(device) >= count and backend == "level_zero":
                raise _UnclearError(
                    f"name Intel cards that are there ({count}, counted from 0), but names {device}"
                    f"{_whole(value, device)}."
                )
            places |= {int(device)} & set(range(count))
        elif device not in _OTHER_DEVICES:
            parts = " (hetexp drives no part of a card)" if "." in device else ""
            raise _UnclearError(
                f"name devices by number, gpu or *{parts}, but names {device!r}{_whole(value, device)}."
            )
    return places if backend in ("*", "level_zero") else set()


def _whole(value: str, part: str) -> str:
    """Return the whole value in brackets, if the part is not all of it."""
    return f" ({value!r})" if part != value.strip().casefold() else ""
