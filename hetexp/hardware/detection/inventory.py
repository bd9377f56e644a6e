"""All cards of the machine in one list: numbered alike for everybody, with what keeps each of them from use.

The order is that of the PCI bus, not that of a vendor's tool: NVML counts along the bus, CUDA from the
fastest card, HIP along the driver's own list, Level Zero discrete cards first. What no bus has comes last. A
visibility variable hides cards and changes no number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hetexp.hardware.backend import ACCELERATORS, backend_class
from hetexp.hardware.detection.builds import TorchBuild, known_builds
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import pci_cards


@dataclass
class Inventory:
    """The cards of a machine and what was noticed while listing them."""

    cards: list[DetectedCard] = field(default_factory=list)
    mask_problems: dict[str, list[str]] = field(default_factory=dict)
    """Backend → what is wrong with the visibility variables for its cards."""
    builds: list[TorchBuild] = field(default_factory=list)
    """The torch builds that were asked, this process's own first."""


def detect(
    machine: Machine | None = None,
    builds: Sequence[TorchBuild] | None = None,
    busy: Callable[[DetectedCard], str | None] | None = None,
) -> Inventory:
    """Return every card of the machine.

    Args:
        machine: this one by default.
        builds: torch builds that may drive the cards; this process's own and the recorded ones by default.
        busy: says who uses a card, `None` if it is free; by default the users are not looked up.
    """
    machine = machine or Machine()
    builds = known_builds() if builds is None else builds
    on_bus = pci_cards(machine)
    found: list[DetectedCard] = []
    for name in ACCELERATORS:
        backend = backend_class(name)
        found += backend.cards(machine, [card for card in on_bus if card.vendor == backend.vendor])
    inventory = Inventory(numbered(found), builds=list(builds))
    for name in ACCELERATORS:
        places = [i for i, card in enumerate(inventory.cards) if card.spec.backend == name]
        cards, problems = backend_class(name).hide([inventory.cards[i] for i in places], machine)
        for place, card in zip(places, cards, strict=True):
            inventory.cards[place] = card
        if problems and cards:
            inventory.mask_problems[name] = problems
    inventory.cards = [_usable(card, builds) for card in inventory.cards]
    if busy is not None:
        inventory.cards = [replace(card, busy=busy(card)) for card in inventory.cards]
    return inventory


def numbered(found: Sequence[DetectedCard]) -> list[DetectedCard]:
    """Return the cards in their lasting order, with their numbers and ids."""
    ordered = sorted(found, key=lambda card: (card.spec.pci is None, card.spec.pci or "", card.spec.index))
    counts: dict[str, int] = defaultdict(int)
    cards = []
    for number, card in enumerate(ordered):
        backend = card.spec.backend
        index = counts[backend]
        counts[backend] += 1
        spec = replace(card.spec, number=number, index=index, id=f"{backend}:{index}")
        cards.append(replace(card, spec=spec))
    return cards


def _usable(card: DetectedCard, builds: Sequence[TorchBuild]) -> DetectedCard:
    """Find the interpreter that drives the card, or say why none does."""
    if card.undriven is not None or card.lost is not None:
        return card
    backend = backend_class(card.spec.backend)
    problems = []
    for build in builds:
        problem = backend.build_problem(card.spec, build)
        if problem is None:
            return replace(card, python=build.python)
        problems.append(problem)
    why = problems[0] if problems else "no interpreter was asked"
    return replace(card, unusable=f"{why}; run: hetexp env create {backend.wheel}")
