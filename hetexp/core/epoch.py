"""Membership: which processes train together, and by which plan.

Only the launcher decides it. Each decision is an epoch in the launcher's store, for which the ranks form
their group again. Epoch 0 is the plan of the run's start, and is not in the store.
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
    """A member that has left the training."""

    member: int
    device: str
    """Its id in the plan, such as `cuda:1`."""
    kind: str
    """Why it left: `SIGKILL`, `Frozen`, `AcceleratorError`, `dropped` …"""
    time: float
    """Seconds since the epoch when the launcher noticed."""


@dataclass(frozen=True)
class Epoch:
    """The members of the training from now on.

    A member is a process, and its number is never used again. The first members have the numbers of their
    ranks in the plan. A process that joins later gets the next free number. The rank of a member is its index
    in `members`.
    """

    number: int
    members: tuple[int, ...]
    plan: str
    """Absolute path of this epoch's plan on the launcher's machine, for the user. Ranks read the same text
    from the store (`plan_key`). Its devices are in the order of `members`."""
    joined: tuple[int, ...] = ()
    """Members that were not in the previous epoch, and need the state of the training."""
    left: tuple[Departure, ...] = ()
    """Members that have left since the previous epoch."""
    urgent: bool = True
    """Whether the previous group is broken. Otherwise its members finish their step, and change together."""

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
        left = tuple(Departure(**departure) for departure in raw.pop("left"))
        return cls(**{**raw, "members": tuple(raw["members"]), "joined": tuple(raw["joined"])}, left=left)


@dataclass(frozen=True)
class Request:
    """A request of the user, a signal or a program to the training; all ranks act after the same step."""

    number: int
    name: str
    """`checkpoint`, `stop`, or the name of a registered handler."""
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
    """Return the store key under which a member counts its heartbeats."""
    return f"beat/{member}"


def prepared_key(member: int) -> str:
    """Return the store key that a joining process sets when it is ready."""
    return f"prepared/{member}"


def revoked_key(number: int, member: int) -> str:
    """Return the store key that a member sets once it has given up the group before an urgent epoch."""
    return f"revoked/{number}/{member}"


def left_key(number: int, member: int) -> str:
    """Return the store key that a member sets once it has ended its last step in an epoch's group."""
    return f"left/{number}/{member}"


def reformed_key(number: int) -> str:
    """Return the store key under which the first rank of an epoch reports how its group formed (JSON)."""
    return f"reformed/{number}"


def answer_key(number: int) -> str:
    """Return the store key under which the first rank answers a request (JSON; `error`: it failed)."""
    return f"answer/{number}"
