"""Lists all cards of the machine, numbered alike for all vendors, with the reasons that keep each from use.

The order is that of the PCI bus, not of a vendor's tool: NVML counts along the bus, CUDA from the
fastest card, HIP along the driver's own list, Level Zero discrete cards first. Cards without a bus come last.
A visibility variable hides cards and changes no number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from hetexp.hardware.backend import accelerators, backend_class, driver_is_loaded
from hetexp.hardware.base import Gauge
from hetexp.hardware.detection.builds import TorchBuild, known_builds
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import pci_cards


@dataclass
class Inventory:
    """The cards of a machine, and the problems of listing them."""

    cards: list[DetectedCard] = field(default_factory=list)
    mask_problems: dict[str, list[str]] = field(default_factory=dict)
    """Backend → mistakes in the visibility variables for its cards."""
    problems: list[str] = field(default_factory=list)
    """Problems of `hardware.backends`, whose cards may be missing."""
    without_driver: list[str] = field(default_factory=list)
    """Backends of whose cards no driver is loaded."""
    builds: list[TorchBuild] = field(default_factory=list)
    """The torch builds that were asked, this process's own first."""


def detect(
    machine: Machine | None = None,
    builds: Sequence[TorchBuild] | None = None,
    busy: Callable[[DetectedCard], str | None] | None = None,
) -> Inventory:
    """Return every card of the machine.

    Args:
        machine: this machine by default.
        builds: torch builds that may drive the cards; this process's own and the recorded ones by default.
        busy: names the users of a card, `None` if it is free; by default the users are not looked up.
    """
    machine = machine or Machine()
    builds = known_builds() if builds is None else builds
    on_bus = pci_cards(machine)
    cards: list[DetectedCard] = []
    for name in accelerators():
        backend = backend_class(name)
        cards += backend.cards(machine, [card for card in on_bus if card.vendor == backend.vendor])
    inventory = Inventory(numbered(cards), builds=list(builds))
    for name in accelerators():
        loaded = driver_is_loaded(name, lambda file: machine.path(file).exists())
        if machine.platform == "linux" and loaded is False:
            inventory.without_driver.append(name)
        places = [i for i, card in enumerate(inventory.cards) if card.spec.backend == name]
        marked, problems = backend_class(name).hide([inventory.cards[i] for i in places], machine)
        for place, card in zip(places, marked, strict=True):
            inventory.cards[place] = card
        if problems and marked:
            inventory.mask_problems[name] = problems
    inventory.cards = [_usable(card, builds) for card in inventory.cards]
    if busy is not None:
        inventory.cards = [replace(card, busy=busy(card)) for card in inventory.cards]
    return inventory


@contextmanager
def gauges(cards: Sequence[DetectedCard], machine: Machine) -> Iterator[list[Gauge | None]]:
    """Open the gauges of cards of any vendors; each vendor's library is opened once.

    Yields:
        The gauge of each card in the order given; `None` if the driver reports nothing of it.
    """
    opened: dict[str, Gauge | None] = {}
    with ExitStack() as stack:
        for name in dict.fromkeys(card.spec.backend for card in cards):
            present = [card for card in cards if card.spec.backend == name and card.lost is None]
            if present:
                readers = stack.enter_context(backend_class(name).gauges(present, machine))
                opened |= {card.spec.id: gauge for card, gauge in zip(present, readers, strict=True)}
        yield [opened.get(card.spec.id) for card in cards]


def numbered(cards: Sequence[DetectedCard]) -> list[DetectedCard]:
    """Return the cards in their lasting order, with their numbers and ids."""
    ordered = sorted(cards, key=lambda card: (card.spec.pci is None, card.spec.pci or "", card.spec.index))
    counts: dict[str, int] = defaultdict(int)
    result = []
    for number, card in enumerate(ordered):
        name = backend_class(card.spec.backend).name
        spec = replace(card.spec, number=number, index=counts[name], id=f"{name}:{counts[name]}")
        counts[name] += 1
        result.append(replace(card, spec=spec))
    return result


def _usable(card: DetectedCard, builds: Sequence[TorchBuild]) -> DetectedCard:
    """Return the card with the interpreter that drives it, or with the reason why none does."""
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
