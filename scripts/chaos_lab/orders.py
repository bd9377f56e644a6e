"""What is done to a run: drawn from a seed, so that every kill can be done again."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

KINDS = (
    "kill a rank",
    "kill rank 0",
    "kill the launcher",
    "kill everything",
    "freeze a rank",
    "freeze and wake a rank",
    "SIGTERM",
    "kill everything, corrupt a byte",
    "fill the disk",
    "kill a rank that joins",
    "fault within a rank",
)
"""By turns: as many seeds in a row have one of each."""
ENDS = (
    "kill the launcher",
    "kill everything",
    "SIGTERM",
    "kill everything, corrupt a byte",
    "fill the disk",
)
"""Those that no run is to survive; it goes on by `resume`."""
PLACES = ("forward", "backward", "exchange", "update", "updated", "save", "evaluate")
FAULTS = ("segfault", "freeze", "hang", "comms", "device_error")
RANKS = 3
STEPS = 40
SAVED_EVERY = 5


@dataclass(frozen=True)
class Order:
    """One thing that is done to one run."""

    seed: int
    kind: str
    rank: int
    """Which of them, where it is done to one."""
    place: str | None
    """Where a rank is at that moment; `None`: at `moment` of the run's usual time, wherever it is."""
    number: int
    """How often the rank comes to that place first."""
    hold: bool
    """Whether it waits there."""
    delay_seconds: float
    """From its coming there; where it does not wait it goes on meanwhile."""
    moment: float
    wake_seconds: float
    """How long a frozen rank sleeps."""
    byte: float
    """Which one is changed, as a fraction of all of the newest checkpoint's."""
    fault: str
    kept: int
    """Newest checkpoints that stay beside the best; 0: all."""
    layout: int
    """Ranks of the run that goes on."""


def drawn(seed: int) -> Order:
    """Return what is done to the run with this seed."""
    draw = random.Random(f"hetexp chaos {seed}")
    kind = KINDS[seed % len(KINDS)]
    place = draw.choice(PLACES) if draw.random() < 0.6 else None
    first, last = {"save": (1, STEPS // SAVED_EVERY - 1), "evaluate": (1, 2)}.get(place or "", (1, STEPS - 4))
    moment = draw.random()
    if kind == "kill everything, corrupt a byte":  # there must be something to corrupt
        first, last, moment = min(last, max(first, 2 * SAVED_EVERY + 2)), last, 0.7 + 0.25 * moment
    order = Order(
        seed=seed,
        kind=kind,
        rank=0 if kind == "kill rank 0" or place == "save" else draw.randrange(RANKS),
        place=place,
        number=draw.randint(first, last),
        hold=draw.random() < 0.5,
        delay_seconds=draw.random() ** 2 * 0.02,
        moment=moment,
        wake_seconds=draw.choice((0.05, 0.3, 0.6, 2.5)),
        byte=draw.random(),
        fault=draw.choice(FAULTS),
        kept=draw.choice((0, 2)),
        layout=draw.choice((RANKS, RANKS, 2, 1)),
    )
    # A rank that waits at a place to be killed hangs there, whatever fault was ordered.
    return replace(order, place=None, hold=False) if kind == "fault within a rank" else order
