"""Faults that follow each other in one long run, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from chaos_lab.orders import RANKS

SIGNALS = {"kill": "SIGKILL", "segfault": "SIGSEGV", "hang": "SIGSTOP"}
"""Kinds that come from outside, by their signal."""
KINDS = (*SIGNALS, "comms", "slow", "oom")
SLOW_FACTOR, SLOW_SECONDS = 3.0, 5.0
LEAST_GAP = 4.0
"""Seconds between two faults."""


@dataclass(frozen=True)
class Fault:
    """One of them."""

    seconds: float
    """Since the run's first step."""
    kind: str
    device: int


def schedule(seed: int, count: int, gap_seconds: float) -> tuple[Fault, ...]:
    """Return faults of all kinds in a random order, with random gaps of this mean between them."""
    draw = random.Random(f"hetexp soak {seed}")
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    draw.shuffle(kinds)
    gaps = [LEAST_GAP + draw.expovariate(1.0) * max(0.0, gap_seconds - LEAST_GAP) for _ in kinds]
    stretch = gap_seconds * count / sum(gaps)
    moment, faults = 0.0, []
    for kind, gap in zip(kinds, gaps, strict=True):
        moment += gap * stretch
        faults.append(Fault(moment, kind, draw.randrange(RANKS)))
    return tuple(faults)


def events(faults: Sequence[Fault], step_seconds: float) -> str:
    """Return `fault.events` for the kinds that a device suffers by itself."""
    written = []
    for fault in faults:
        if fault.kind in SIGNALS:
            continue
        step = round(fault.seconds / step_seconds)
        text = f"kind: {fault.kind}, device: 'emulated:{fault.device}', at_step: {step}"
        if fault.kind == "slow":
            text += f", until_step: {step + round(SLOW_SECONDS / step_seconds)}, factor: {SLOW_FACTOR}"
        written.append(f"{{{text}}}")
    return f"fault.events=[{','.join(written)}]"
