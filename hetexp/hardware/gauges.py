"""Cards read again and again: a vendor's library is opened once, and a card that is lost hides no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from hetexp.hardware.backend import ACCELERATORS, backend_class
from hetexp.hardware.detection.detected import DetectedCard, Reading
from hetexp.hardware.detection.machine import Machine

Gauge = Callable[[], Reading]
"""Returns what the driver says of one card now, without the processes that hold it.

Raises:
    CardLostError: the driver can no longer reach the card.
"""


class CardLostError(Exception):
    """A card does not answer any more; the text says what its driver said."""


@contextmanager
def gauges(cards: Sequence[DetectedCard], machine: Machine) -> Iterator[list[Gauge | None]]:
    """Open what tells the state of cards, of any vendors.

    Yields:
        The gauge of each card in the order given; `None` if nothing is known of its state.
    """
    found: dict[str, Gauge | None] = {}
    with ExitStack() as stack:
        for name in ACCELERATORS:
            mine = [card for card in cards if card.spec.backend == name and card.lost is None]
            if mine:
                opened = stack.enter_context(backend_class(name).gauges(mine, machine))
                found |= {card.spec.id: gauge for card, gauge in zip(mine, opened, strict=True)}
        yield [found.get(card.spec.id) for card in cards]
