"""Membership: which processes train together, from when on, and by which plan.

The launcher alone decides it. Each decision is an epoch, written into the launcher's store; ranks form their
group again for it. Epoch 0 is the plan that the run began with, and needs no word.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

LATEST = "epoch/latest"
"""Store key of the newest epoch's number."""
LATEST_REQUEST = "request/latest"
"""Store key of the newest request's number (`Request`)."""


@dataclass(frozen=True)
class Departure:
    """A member that trains no more."""

    member: int
    device: str
    """Its id in the plan, such as `cuda:1`."""
    kind: str
    """What became of it: `SIGKILL`, `Frozen`, `CudaError`, `dropped` …"""
    time: float
    """Seconds since the epoch when the launcher noticed."""


@dataclass(frozen=True)
class Epoch:
    """Who trains from now on.

    A member is a process; its number is never given again. Those that a run begins with are numbered as the
    ranks of its plan, what comes back or is added later gets the next free number. A member's rank is its
    place in `members`.
    """

    number: int
    members: tuple[int, ...]
    plan: str
    """Absolute path, in the launcher's machine, of the plan that holds from this epoch on, for people; ranks
    read the same text from the store (`plan_key`). Its devices are in the order of `members`."""
    joined: tuple[int, ...] = ()
    """Those of them that were not in the epoch before and need the training's state."""
    left: tuple[Departure, ...] = ()
    """Who has gone since the epoch before."""
    urgent: bool = True
    """Whether the group before is broken. Else its members finish the step that they are in, and change
    together."""

    @staticmethod
    def key(number: int) -> str:
        """Return the store key of an epoch."""
        return f"epoch/{number}"

    @property
    def topic(self) -> str:
        """Prefix of all store keys by which the members of this epoch form their group."""
        return f"epoch/{self.number}/"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Epoch:
        raw = json.loads(text)
        left = tuple(Departure(**one) for one in raw.pop("left"))
        return cls(**{**raw, "members": tuple(raw["members"]), "joined": tuple(raw["joined"])}, left=left)


@dataclass(frozen=True)
class Request:
    """What a person, a signal or a program asks of a running training; all ranks act at one step's end."""

    number: int
    name: str
    """`checkpoint`, `stop`, or what a handler was registered for."""
    argument: str = ""

    @staticmethod
    def key(number: int) -> str:
        """Return the store key of a request; its answer is under `answer/<number>`."""
        return f"request/{number}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Request:
        return cls(**json.loads(text))


def plan_key(number: int) -> str:
    """Return the store key of an epoch's plan (JSON), for ranks of every machine."""
    return f"plan/{number}"


def beat_key(member: int) -> str:
    """Return the store key under which a member counts its signs of life."""
    return f"beat/{member}"


def prepared_key(member: int) -> str:
    """Return the store key by which a process that is to join says that it can be taken in."""
    return f"prepared/{member}"


def reformed_key(number: int) -> str:
    """Return the store key under which the first rank of an epoch tells how its group formed (JSON)."""
    return f"reformed/{number}"


def answer_key(number: int) -> str:
    """Return the store key under which the first rank answers a request (JSON; `error`: it was not done)."""
    return f"answer/{number}"
