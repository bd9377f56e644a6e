"""Parses `hardware.gpu_ids` and finds its cards: all of them, or an error.

0, [0, 2]            numbers, as `hetexp gpus` shows them
[cuda:0, xpu:0]      by backend and position within it; cpu and cpu:1 are accepted, too
[GPU-8932f937]       UUIDs of any vendor, or the start of one as long as it is the start of no other
[0000:03:00.0]       addresses on the PCI bus; [03:00.0] means domain 0
all                  every usable card that is not integrated, busy ones too
available            those of them that are free
recommend:2          the two fastest of those with enough free memory
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hetexp.core.errors import must_be
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.pci import normalised

WORDS = ("all", "available", "recommend")
_RECOMMEND = re.compile(r"recommend(?::(?P<count>\d+))?")
_BACKEND = re.compile(r"(?P<backend>[a-z]+):(?P<index>\d+)")
_PCI = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_CPU = re.compile(r"cpu(?::(?P<index>\d+))?")
_SHORTEST_UUID = 4
"""Least number of characters of a shortened UUID after its prefix; fewer are taken for a typing error."""


@dataclass(frozen=True)
class CardRequest:
    """A parsed `gpu_ids`: either a word or a list."""

    word: str | None = None
    """`all`, `available` or `recommend`."""
    count: int | None = None
    """Number of cards that `recommend` asks for."""
    names: tuple[str, ...] = ()
    """Entries of a list, in its order."""


def parse_card_request(value: int | str | Sequence[int | str], key: str) -> tuple[CardRequest, list[str]]:
    """Return the parsed value of `gpu_ids` and its problems.

    Args:
        key: the key as the user wrote it, for messages.
    """
    entries = [value] if isinstance(value, (int, str)) else list(value)
    if isinstance(value, str) and "," in value:
        entries = [part.strip() for part in value.strip("[]").split(",")]
    if not entries:
        return CardRequest(), [f"`{key}` must name at least one device, but is empty."]
    if len(entries) == 1 and isinstance(entries[0], str):
        match = _RECOMMEND.fullmatch(entries[0])
        if match is not None:
            count = int(match["count"] or 1)
            problem = [must_be(key, "recommend:1 or more", entries[0])] if count < 1 else []
            return CardRequest("recommend", count), problem
        if entries[0] in WORDS:
            return CardRequest(entries[0]), []
    names = tuple(str(entry).strip() for entry in entries)
    alone = [name for name in names if name.partition(":")[0] in WORDS]
    problems = [must_be(key, f"a list without `{name}`, which stands alone", list(names)) for name in alone]
    return CardRequest(names=names), problems


def find_card(name: str, cards: Sequence[DetectedCard]) -> DetectedCard | str:
    """Return the card that an entry of a list names, or what the entry must be instead.

    Args:
        name: a number, `cuda:0`, a UUID or its start, a PCI address.
        cards: all cards of the machine.
    """
    if name.isascii() and name.isdigit():
        matches = [card for card in cards if card.spec.number == int(name)]
    elif _BACKEND.fullmatch(name):
        matches = [card for card in cards if card.spec.id == name]
    elif _PCI.fullmatch(name):
        matches = [card for card in cards if card.spec.pci == normalised(name)]
    else:
        matches = _by_uuid(name, cards)
        if len(matches) > 1:
            owners = " and ".join(f"{card.spec} ({card.spec.uuid})" for card in matches)
            return f"the start of one UUID, but is that of {owners}"
    if not matches:
        return "a device of this machine"
    if len(matches) > 1:  # MIG instances share the card's address
        return f"one device, but is the address of {' and '.join(card.spec.id for card in matches)}"
    return matches[0]


def cpu_index(name: str) -> int | None:
    """Return the number in `cpu:1`, 0 for `cpu`, `None` if the name is not the CPU's."""
    match = _CPU.fullmatch(name)
    return int(match["index"] or 0) if match is not None else None


def rank_cards(
    cards: Sequence[DetectedCard], speed: dict[str, float], need_bytes: int | None
) -> list[DetectedCard]:
    """Return cards from the most to the least recommended.

    Cards with enough free memory come first, then the faster ones, then those with more free memory. A card
    of unknown speed comes after those of known speed; ties keep the order of the list.

    Args:
        speed: device id → TFLOP/s of the catalogue, if the card is in it.
        need_bytes: memory that the run needs on a card, `None` if it is not known.
    """

    def key(card: DetectedCard) -> tuple[bool, float, int]:
        free = card.reading.memory_free_bytes or 0
        return (need_bytes is None or free >= need_bytes, speed.get(card.spec.id, 0.0), free)

    return sorted(cards, key=key, reverse=True)


def described(cards: Sequence[DetectedCard]) -> str:
    """Return the cards as messages list them: `0 = cuda:0 (RTX 3090), …`."""
    return ", ".join(f"{card.spec.number} = {card.spec}" for card in cards) or "no accelerator"


def _by_uuid(name: str, cards: Sequence[DetectedCard]) -> list[DetectedCard]:
    """Return the cards whose UUID begins with `name`; a card whose whole UUID is `name` comes alone."""
    start = name.lower()
    exact = [card for card in cards if card.spec.uuid is not None and card.spec.uuid.lower() == start]
    significant = start.removeprefix("gpu-").removeprefix("mig-").removeprefix("gpu-")
    if exact or len(significant) < _SHORTEST_UUID:
        return exact
    return [card for card in cards if (card.spec.uuid or "").lower().startswith(start)]
