"""Membership: which processes train together, and by which plan.

Only the launcher decides it. Each decision is an epoch in the launcher's store, for which the ranks form
their group again. Epoch 0 is the plan of the run's start, and is not in the store.

Any process that reaches the store's port may write there, but only the launcher and its ranks can sign.
"""

from __future__ import annotations

import hmac
import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger(__name__)

_MAC_DIGITS = 64
"""Hexadecimal digits of an HMAC-SHA256."""
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


class SignedStore:
    """A view of the store that contains only what the launcher and the ranks of its run have signed.

    The signature is an HMAC-SHA256 over key and value. The key of an epoch, a request or an answer has its
    number, and each store has a secret of its own, so that a value counts in one place alone.

    Args:
        store: a connection to it.
        secret: in hexadecimal digits; empty: no launcher runs these ranks, so that nothing counts as signed.
    """

    def __init__(self, store: Any, secret: str) -> None:
        self._store, self.secret = store, secret
        self._refused: set[str] = set()

    def write(self, key: str, text: str) -> None:
        """Write a value with its signature."""
        self._store.set(key, self._signature(key, text.encode()) + text)

    def read(self, key: str) -> str | None:
        """Return a value; `None` if there is none, or if another process wrote it, which is logged once."""
        if not self._store.check([key]):
            return None
        raw: bytes = self._store.get(key)
        signature, text = raw[:_MAC_DIGITS], raw[_MAC_DIGITS:]
        if self.secret and hmac.compare_digest(signature, self._signature(key, text).encode()):
            return text.decode()
        if key not in self._refused:
            self._refused.add(key)
            log.warning("`%s` in the run's store must be signed by the run, but is not: it is ignored.", key)
        return None

    def _signature(self, key: str, text: bytes) -> str:
        return hmac.new(self.secret.encode(), key.encode() + b"\0" + text, "sha256").hexdigest()


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
