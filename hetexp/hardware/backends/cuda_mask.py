"""Reads `CUDA_VISIBLE_DEVICES`, as the user or a scheduler set it: its cards and its mistakes.

The rules are those of the CUDA C++ Programming Guide (CUDA Environment Variables) and of the MIG User Guide.
A message reports the cards that CUDA would silently leave out. If a number could mean several cards, a torch
built for CUDA is asked. Where the guides say nothing, driver 580 is the model: a list ends where numbers and
UUIDs mix, the digits of a UUID may be in either case, and a card that is named twice hides all cards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import did_you_mean
from hetexp.hardware.backends import nvml
from hetexp.hardware.backends.accelerator import bare_uuid
from hetexp.hardware.detection.detected import DetectedCard, Seen
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.probe import torch_sees

MASK = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_END = re.compile(r"-[1-9][0-9]*|NoDevFiles")
"""An entry that ends the list; alone it hides all cards (`NoDevFiles` is Slurm's word)."""
_NUMBER = re.compile(r"[0-9]+")
_LONGEST_NUMBER = 9
_UUID = re.compile(r"(GPU|MIG)-.+")
_OLD_INSTANCE = re.compile(r"MIG-(GPU-[^/]+)/([0-9]+)/([0-9]+)")
"""An instance as drivers before 470 wrote it and all accept it: card, GPU instance, compute instance."""


class _UnclearError(Exception):
    """An entry does not name exactly one card; the text is the message to the user."""


class Mask:
    """A value of the variable on a machine.

    Args:
        cards: the NVIDIA cards along the bus.
    """

    def __init__(self, value: str, cards: Sequence[DetectedCard], machine: Machine) -> None:
        self.value = value
        self.cards = cards
        self.machine = machine
        self.entries = [entry.strip() for entry in value.split(",")]
        while self.entries and not self.entries[-1]:
            self.entries.pop()

    def visible(self) -> tuple[set[int], list[str]]:
        """Return the places in `cards` of the named cards, and the value's problems.

        As with CUDA, the list ends at the first entry that names no card, and a card named twice hides all.
        """
        if not self._units:
            return set(), []  # no card could be used whatever the value
        if self._names_all_by_number():
            return {place for unit in self._units for place in unit}, []
        named: dict[int, str] = {}
        problems: list[str] = []
        ended = twice = False
        for entry in self.entries:
            if _END.fullmatch(entry):
                break
            try:
                place = self._place(entry)
            except _UnclearError as unclear:
                problems.append(f"`{MASK}` must {unclear}")
                ended = True
                continue
            if place in named:
                which = entry if named[place] == entry else self.cards[place].spec.id
                problems.append(
                    f"`{MASK}` must name each card once, but names {which} twice ({self.value!r})."
                )
                twice = True
            elif not ended:
                named[place] = entry
        return set() if twice else set(named), list(dict.fromkeys(problems))

    @cached_property
    def _units(self) -> list[list[int]]:
        """Places of the cards that CUDA could count, along the bus; the instances of one card together."""
        units: dict[object, list[int]] = {}
        for place, card in enumerate(self.cards):
            if card.undriven is None:
                together = card.spec.pci if self._is_instance(place) else None
                units.setdefault(together or place, []).append(place)
        return list(units.values())

    def _is_instance(self, place: int) -> bool:
        return (self.cards[place].spec.uuid or "").startswith("MIG-")

    def _names_all_by_number(self) -> bool:
        """Return whether each number occurs once: then the order does not matter."""
        numbers = [str(number) for number in range(len(self._units))]
        one_each = not self._uncounted() and all(len(unit) == 1 for unit in self._units)
        return one_each and sorted(self.entries) == sorted(numbers)

    def _uncounted(self) -> bool:
        """Return whether NVML counts a card that CUDA may skip: closed to this user, or in MIG mode."""
        return any(card.undriven is not None and card.spec.driver is not None for card in self.cards)

    @cached_property
    def _in_numbers(self) -> bool:
        """Whether the first card is named by number."""
        named = (entry for entry in self.entries if _NUMBER.fullmatch(entry) or _UUID.fullmatch(entry))
        return _NUMBER.fullmatch(next(named, "")) is not None

    def _place(self, entry: str) -> int:
        number, uuid = _NUMBER.fullmatch(entry), _UUID.fullmatch(entry)
        if number is None and uuid is None:
            raise self._names_nothing(entry)
        if (number is not None) != self._in_numbers:
            raise _UnclearError(
                f"hold only numbers or only UUIDs, but mixes them ({self.value!r}): CUDA stops reading at "
                f"{entry!r}. Name all cards by UUID (nvidia-smi -L)."
            )
        places = self._by_number(entry) if number is not None else self._by_uuid(entry)
        if len(places) != 1:
            raise self._names_several(entry, places)
        return places[0]

    def _by_number(self, entry: str) -> list[int]:
        if self._numbered is None:
            fix = "Name UUIDs (nvidia-smi -L)."
            if self._only_speed_is_unclear():
                fix = (
                    f"Export {ORDER}=PCI_BUS_ID if you count like nvidia-smi, or name UUIDs (nvidia-smi -L)."
                )
            raise _UnclearError(
                f"name cards by UUID on this machine, but names {entry!r}{self._whole(entry)}: "
                f"{self._why_unclear()}, and no torch built for CUDA could be asked for its order. {fix}"
            )
        number = int(entry) if len(entry) <= _LONGEST_NUMBER else -1
        if number not in self._numbered:
            last = max(self._numbered)
            accepted = f"numbers from 0 to {last}" if last else "0, the only card's number"
            raise _UnclearError(f"hold {accepted}, or UUIDs, but names {entry}{self._whole(entry)}.")
        if not self._numbered[number]:
            raise self._names_nothing(entry)
        return self._numbered[number]

    @cached_property
    def _numbered(self) -> dict[int, list[int]] | None:
        """CUDA's number → the places of that card, or of its instances; `None`: the order is not known."""
        if self._why_unclear() is None:
            return dict(enumerate(self._units))
        return {seen.index: self._seen_as(seen) for seen in torch_sees("cuda", self.machine)} or None

    def _why_unclear(self) -> str | None:
        """Return why CUDA's order does not follow from the bus, `None` if it does."""
        cards = [self.cards[unit[0]] for unit in self._units]
        if any(card.lost is not None for card in cards):
            return "beside a lost card CUDA may count otherwise"
        if self._uncounted():
            return "CUDA may not count the card that cannot be used"
        if len(cards) == 1:
            return None
        if any(self._is_instance(unit[0]) for unit in self._units):
            return "beside a card in MIG mode CUDA counts otherwise"
        if any(card.spec.pci is None for card in cards):
            return "not all cards have an address on the bus"
        return "CUDA counts unequal cards from the fastest" if self._only_speed_is_unclear() else None

    def _only_speed_is_unclear(self) -> bool:
        cards = [self.cards[unit[0]].spec for unit in self._units]
        located = all(card.pci is not None for card in cards)
        return located and not _alike(cards) and self.machine.environ.get(ORDER) != "PCI_BUS_ID"

    def _seen_as(self, seen: Seen) -> list[int]:
        for unit in self._units:
            for place in unit:
                uuid = self.cards[place].spec.uuid
                if seen.uuid is not None and uuid is not None and bare_uuid(seen.uuid) == bare_uuid(uuid):
                    return [place]
        for unit in self._units:
            if seen.pci is not None and self.cards[unit[0]].spec.pci == seen.pci:
                return unit
        return []

    def _by_uuid(self, entry: str) -> list[int]:
        uuids = [card.spec.uuid or "" for card in self.cards]
        # NVML writes hexadecimal digits in lower case; the words `GPU-` and `MIG-` have no such letters.
        written = re.sub("[A-F]", lambda digit: digit[0].lower(), entry)
        if written in uuids:
            return [uuids.index(written)]
        places = [place for place, uuid in enumerate(uuids) if uuid.startswith(written)]
        places = places or [uuids.index(uuid) for uuid in self._instances_named(written) if uuid in uuids]
        if not places:
            raise self._names_nothing(entry)
        return places

    def _instances_named(self, entry: str) -> list[str]:
        """Return the UUIDs of the instances that an entry names by their card, and by their numbers in it."""
        old = _OLD_INSTANCE.fullmatch(entry)
        card, ids = (old[1], (old[2], old[3])) if old is not None else (entry, None)
        return [
            part.uuid
            for part in self._instances
            if part.uuid is not None
            and part.parent is not None
            and (part.parent.uuid or "").startswith(card)
            and ids in (None, (str(part.ids[0]), str(part.ids[1])))
        ]

    @cached_property
    def _instances(self) -> list[nvml.Card]:
        if not any(self._is_instance(place) for place in range(len(self.cards))):
            return []
        try:
            with nvml.opened(self.machine) as library:
                return [part for card in nvml.cards(library) for part in card.instances]
        except nvml.NotAnsweringError:
            return []

    def _names_nothing(self, entry: str) -> _UnclearError:
        if not entry:
            return _UnclearError(f"name a card between two commas, but is {self.value!r} instead.")
        uuids = [card.spec.uuid for card in self.cards if card.spec.uuid is not None]
        return _UnclearError(
            f"name NVIDIA cards of this machine by number or UUID, but names {entry!r}{self._whole(entry)}."
            f"{did_you_mean(entry, uuids)}"
        )

    def _names_several(self, entry: str, places: Sequence[int]) -> _UnclearError:
        uuids = " and ".join(str(self.cards[place].spec.uuid) for place in places)
        if all(self._is_instance(place) for place in places) and not entry.startswith("MIG-"):
            return _UnclearError(
                f"name one instance of a card in MIG mode, but names the whole card by {entry!r}"
                f"{self._whole(entry)}. Its instances are {uuids}."
            )
        return _UnclearError(
            f"name one card an entry, but {entry!r}{self._whole(entry)} begins {uuids}. "
            "Write more of the UUID."
        )

    def _whole(self, entry: str) -> str:
        """Return the whole value in brackets, if the entry is not all of it."""
        return f" ({self.value!r})" if entry != self.value.strip() else ""


def _alike(cards: Sequence[DeviceSpec]) -> bool:
    """Return whether CUDA has no reason to reorder these cards, so that it counts along the bus."""
    # An RTX 3060 has 8 or 12 GB under one name; ECC takes 1/16 from one of two equal cards.
    sizes = [card.memory_bytes for card in cards if card.memory_bytes is not None]
    return len({card.name for card in cards}) == 1 and (not sizes or max(sizes) < 1.1 * min(sizes))
