"""From a route to what carries it, tried out before training: the start-up self-test.

Cards of different generations have been seen to return zeros from a peer's memory, and to hang there (NCCL's
and the driver's word on what works is not always right). So each path sums known values once. Where that goes
wrong on any rank, all ranks take the next path together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hetexp.comm.communicator import Communicator
from hetexp.comm.connections.sockets import shut_all
from hetexp.comm.connections.watched_store import WatchedStore, another_connection
from hetexp.comm.exchange import Exchange, GroupExchange
from hetexp.comm.hierarchy import HierarchicalExchange
from hetexp.comm.library_exchange import LibraryExchange
from hetexp.comm.rendezvous import exchange, form_group
from hetexp.core.errors import HandshakeError, PeerLostError, SetupError
from hetexp.core.topology import Group, Topology

log = logging.getLogger(__name__)

SIZES = (5, 2**21 + 3)
"""Numbers of a test message: fewer than there are in a block, and more than one chunk of any path."""
SIZES_AGAIN = (5, 2**19 + 3)
"""The same where such a path has carried before and the ranks wait for it: the second is a few chunks."""
FORMING_SECONDS = 5.0
"""Longest wait for a connection when ranks form again: if one of them dies just then, only this limit ends
the others' wait in gloo."""
_PERIOD = 251
"""Test values repeat after so many numbers: a prime, so that no chunk begins where another one did."""
_REPORT_SECONDS = 20.0
"""Longest wait, after its self-test must be over, for what another rank says of it."""
_LOOK_SECONDS = 0.05
"""Pause between looks at whether another rank has failed."""
_GRACE_SECONDS = 1.0
"""How long a rank goes on by itself once another has failed."""
_FAILED = "failed"
"""Key that says that a rank has found a path to fail."""
_END_SECONDS = 10.0
"""Longest wait for a path that hangs to be given up."""
_ADVICE = {
    "nccl": "comm.env={NCCL_P2P_DISABLE: 1} keeps NCCL from reading another card's memory directly, "
    "comm.env={NCCL_DEBUG: INFO} makes it tell more",
    "xccl": "comm.env={CCL_LOG_LEVEL: info} makes the library tell more",
    "shm": "`df -h /dev/shm` shows whether there is room",
    "gloo": "comm.env={GLOO_SOCKET_IFNAME: …} names the network interface",
}

Build = Callable[[Group, dist.Store, int], Exchange]
"""Makes what carries one group: of the group, a store of its own and this rank's place in it."""


@dataclass(frozen=True)
class Job:
    """What a rank brings along to form paths."""

    store: dist.Store
    rank: int
    world_size: int
    device: torch.device
    timeout_seconds: float
    """Longest wait in a collective."""
    self_test_seconds: float
    """Longest that a path may take to form and to sum known values."""
    apart: bool = False
    """Whether another thread than the training's sums, which may not share the default group with it."""
    again: bool = False
    """Whether the run has trained before, with other members."""


@dataclass
class Paths:
    """What a rank talks to the others through."""

    communicator: Communicator
    exchange: Exchange
    route: Topology
    fallback: dict[str, str] | None = None
    """`from` and `to` which route, and the `reason`; `None` where the first one carries."""


def form_paths(routes: Sequence[Topology], job: Job, build: Build | None = None) -> Paths:
    """Form the default process group and what carries large sums, by the first route that works on all ranks.

    Every rank calls it with the same routes.

    Args:
        build: makes what carries a group; by default the library that the group names.

    Raises:
        SetupError: no route works; says what was found of each.
        HandshakeError: a rank did not come.
        PeerLostError: a rank did not say what it found: it is gone.
    """
    exchange(job.store, "paths", job.rank, job.world_size, {}, job.timeout_seconds)  # all begin together
    attempts: list[_Attempt] = []
    try:
        return _first_that_carries(routes, job, build or _builder(job), attempts)
    except Exception:  # a member may be gone meanwhile: the others form another group
        shut_all()
        for attempt in attempts:
            attempt.give_up()
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


def _first_that_carries(
    routes: Sequence[Topology], job: Job, build: Build, attempts: list[_Attempt]
) -> Paths:
    communicator: Communicator | None = None
    failed: list[tuple[Topology, str]] = []
    for number, route in enumerate(routes):
        store = dist.PrefixStore(f"path{number}", job.store)
        attempt = _Attempt(route, store, f"path{number}", job, build)
        attempts.append(attempt)
        if communicator is None and not attempt.native:
            limits = (job.timeout_seconds, FORMING_SECONDS if job.again else None)
            communicator = form_group(store, job.rank, job.world_size, "gloo", job.device, *limits)
        reason = _agreed(attempt, job)
        if reason is None:
            assert attempt.exchange is not None
            fallback = _fallback(failed, route, job.rank) if failed else None
            used = attempt.communicator or communicator
            assert used is not None
            return Paths(used, attempt.exchange, route, fallback)
        attempt.give_up()
        failed.append((route, reason))
    failures = " ".join(f"{route.name} failed the self-test: {reason}." for route, reason in failed)
    raise SetupError(f"{failures} {_advice(failed[-1][0])}")


class _Attempt:
    """One route, formed and tried out in a thread that may be left behind where it hangs."""

    def __init__(self, route: Topology, store: dist.Store, prefix: str, job: Job, build: Build) -> None:
        self.route = route
        self.communicator: Communicator | None = None
        self.exchange: Exchange | None = None
        self.native = route.library not in (None, "gloo", "shm")
        """Whether the default process group itself is the vendor library's."""
        self._formed: list[Exchange] = []
        self._store, self._prefix, self._job, self._build = store, prefix, job, build
        self._own_store: dist.Store | None = None
        """The thread's: while it waits for a key that never comes, no other thread can use its connection."""
        self._problem: str | None = None
        self._left = False
        """Whether the thread is left behind."""

    def run(self) -> str | None:
        """Form the route and sum known values; return what went wrong in a few words.

        A rank that has found something wrong says so at once: no rank waits longer for it in a collective.

        Raises:
            PeerLostError: the launcher has said meanwhile that a member is gone.
        """
        thread = threading.Thread(target=self._try, name="self-test", daemon=True)
        thread.start()
        deadline = time.monotonic() + self._job.self_test_seconds
        while thread.is_alive() and time.monotonic() < deadline and not self._store.check([_FAILED]):
            if isinstance(self._job.store, WatchedStore) and self._job.store.obsolete():
                self._left = True
                raise PeerLostError("the members of this training have changed during a self-test")
            thread.join(_LOOK_SECONDS)
        # Another rank's failure is reported sooner than this rank's own, which comes with it.
        thread.join(_GRACE_SECONDS)
        self._left = thread.is_alive()
        if not self._left:
            problem = self._problem
        elif self._store.check([_FAILED]):
            problem = None  # that is the other one's
        else:
            problem = f"no answer within {self._job.self_test_seconds:g} s (comm.self_test_seconds)"
        if problem is not None:
            self._store.set(_FAILED, "")
        return problem

    def give_up(self) -> None:
        """End what was formed, so that the device is free for the next route."""
        ending = threading.Thread(target=self._end, name="end-path", daemon=True)
        ending.start()
        ending.join(_END_SECONDS)
        if self.native and dist.is_initialized():  # it could not be ended, and another one is to be formed
            dist.distributed_c10d._update_default_pg(None)

    def _end(self) -> None:
        for one in self._formed:
            with suppress(Exception):  # it failed already
                one.close()
        if self.native and dist.is_initialized():
            with suppress(Exception):
                dist.distributed_c10d._abort_process_group()

    def _try(self) -> None:
        formed: Exchange | None = None
        try:
            with _beside(self._job.device):
                formed = self._form()
                sizes = SIZES_AGAIN if self._job.again else SIZES
                problem = self_test(formed, self._job.device, sizes)
        except Exception as error:  # whatever it is, the other ranks must learn of it
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
        if not self._left:
            self.exchange, self._problem = formed, problem

    def _form(self) -> Exchange:
        job, route = self._job, self.route
        another = another_connection(job.store)
        self._own_store = dist.PrefixStore("formed", dist.PrefixStore(self._prefix, another))
        if self.native:
            assert route.library is not None
            self.communicator = form_group(
                self._own_store, job.rank, job.world_size, route.library, job.device, job.timeout_seconds
            )
            if not job.apart:
                return GroupExchange()
        levels = []
        for height, groups in enumerate(route.levels):
            for number, group in enumerate(groups):
                if job.rank in group.ranks:
                    own = dist.PrefixStore(f"level{height}/group{number}", self._own_store)
                    levels.append(self._build(group, own, group.ranks.index(job.rank)))
                    self._formed.append(levels[-1])
        return levels[0] if route.library is not None else HierarchicalExchange(levels, route, job.rank)


def _beside(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context with a stream of its own: what hangs there keeps no later work waiting."""
    if device.type != "cuda":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.Stream(device))
    return context


def self_test(exchange: Exchange, device: torch.device, sizes: Sequence[int] = SIZES) -> str | None:
    """Sum and gather known values over a group, and return what came back wrong.

    Every rank gives other values, small whole numbers whose sum is exact, so that each way between two ranks
    has to carry what the other one does not know.

    Args:
        sizes: numbers of each test message.

    Raises:
        PeerLostError: another rank is gone, or did not come in time.
    """
    size, problems = exchange.size, []
    for length in sizes:  # all of them, whatever comes back: the other ranks take part, too
        places = torch.arange(length, device=device)
        pattern = (places % _PERIOD + 1).float()
        tensor = pattern * (exchange.rank + 1)
        exchange.sum_(tensor)
        problems.append(_wrong("sum", tensor, pattern * (size * (size + 1) // 2)))
    codes = exchange.gather(((places + 7 * exchange.rank) % _PERIOD).to(torch.uint8))
    for rank, code in enumerate(codes):
        known = ((places + 7 * rank) % _PERIOD).to(torch.uint8)
        problems.append(_wrong(f"message of rank {rank}", code, known))
    return next((problem for problem in problems if problem is not None), None)


def _wrong(what: str, found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """Say how many of the numbers are others than they should be; `None`: none is."""
    if torch.equal(found, wanted):
        return None
    bad = found != wanted
    count = int(bad.sum())
    zeros = int((bad & (found == 0)).sum())
    first = int(bad.nonzero()[0])
    kind = "zeros" if zeros == count else "wrong"
    example = f"number {first} is {found[first].item():g} instead of {wanted[first].item():g}"
    return f"{count} of {len(found)} numbers of a {what} came back {kind} ({example})"


def _agreed(attempt: _Attempt, job: Job) -> str | None:
    """Run an attempt and return what is wrong with it on any rank, the same on all of them.

    Raises:
        PeerLostError: a rank did not say.
    """
    topic = f"tested/{attempt.route.name}"
    mine = {"problem": attempt.run()}
    limit = job.self_test_seconds + _REPORT_SECONDS
    try:
        answers = exchange(job.store, topic, job.rank, job.world_size, mine, limit)
    except HandshakeError as error:
        since = f"the self-test of {attempt.route.name}"
        raise PeerLostError(f"another rank is gone since {since} ({error})") from error
    found: dict[str, list[str]] = {}
    for rank, one in enumerate(answers):
        if one["problem"] is not None:
            found.setdefault(str(one["problem"]), []).append(str(rank))
    return "; ".join(f"{problem} on rank {', '.join(ranks)}" for problem, ranks in found.items()) or None


def _fallback(failed: Sequence[tuple[Topology, str]], used: Topology, rank: int) -> dict[str, str]:
    """Return what became of the routes before, and let rank 0 tell it."""
    first = failed[0][0]
    reason = "; ".join(f"{route.name}: {why}" if len(failed) > 1 else why for route, why in failed)
    if rank == 0:
        log.warning(
            "The exchange by %s failed its self-test (%s); %s is used instead. %s",
            first.name,
            reason,
            used.name,
            _advice(first),
        )
    return {"from": first.name, "to": used.name, "reason": reason}


def _advice(route: Topology) -> str:
    """Say what a person may try."""
    libraries = dict.fromkeys(group.library for level in route.levels for group in level)
    return "Try: " + "; ".join(_ADVICE[library] for library in libraries) + "."


def _builder(job: Job) -> Build:
    """Return what makes an exchange of the library that a group names."""

    def build(group: Group, store: dist.Store, rank: int) -> Exchange:
        size = len(group.ranks)
        if group.library == "shm":
            from hetexp.comm.shared_memory.exchange import SharedMemoryExchange

            return SharedMemoryExchange.form(store, rank, size, job.timeout_seconds, job.device)
        limits = (job.timeout_seconds, FORMING_SECONDS if job.again else None)
        return LibraryExchange(group.library, store, rank, size, *limits)

    return build
