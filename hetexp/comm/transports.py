"""Forms the exchange of a route and tests it before training: the start-up self-test.

Cards of different generations have returned zeros from a peer's memory, or hung there, although NCCL and the
driver reported that it works. So each route sums known values once. If that fails on any rank, all ranks try
the next route together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hetexp.comm.communicator import Communicator
from hetexp.comm.connections.revocation import Revocation
from hetexp.comm.connections.sockets import shut_all
from hetexp.comm.connections.watched_store import WatchedStore, another_connection
from hetexp.comm.exchange import Exchange, GroupExchange
from hetexp.comm.hierarchy import HierarchicalExchange
from hetexp.comm.library_exchange import LibraryExchange
from hetexp.comm.rendezvous import all_gather_json, form_group
from hetexp.core.errors import HandshakeError, PeerLostError, SetupError, logged
from hetexp.core.topology import Group, Topology
from hetexp.torch_private import abort_groups, forget_default_group

log = logging.getLogger(__name__)

SIZES = (5, 2**21 + 3)
"""Lengths of the test messages: less than a block, and more than one chunk of any exchange."""
SIZES_AGAIN = (5, 2**19 + 3)
"""Lengths if the run has trained by such a route before: the second message has a few chunks."""
FORMING_SECONDS = 5.0
"""Longest wait for a connection when ranks form again: if one of them dies just then, only this limit ends
the others' wait in gloo."""
_PERIOD = 251
"""Period of the test values: a prime, so that no two chunks begin with the same value."""
_REPORT_SECONDS = 20.0
"""Longest wait for another rank's report after the time limit of its self-test."""
_LOOK_SECONDS = 0.05
"""Pause between looks at whether another rank has failed."""
_GRACE_SECONDS = 1.0
"""How long a rank's own test may go on after another rank has failed."""
_FAILED = "failed"
"""Key that a rank sets if a route fails."""
_END_SECONDS = 10.0
"""Longest wait until a hanging route is aborted."""
_HURRIED_END_SECONDS = 1.0
"""The same wait after a loss, as the others wait for this rank to form the next group."""
_ADVICE = {
    "nccl": "comm.env={NCCL_P2P_DISABLE: 1} keeps NCCL from reading another card's memory directly, "
    "comm.env={NCCL_DEBUG: INFO} makes it log more",
    "xccl": "comm.env={CCL_LOG_LEVEL: info} makes the library log more",
    "shm": "`df -h /dev/shm` shows whether there is room",
    "gloo": "comm.env={GLOO_SOCKET_IFNAME: …} names the network interface",
}

Build = Callable[[Group, dist.Store, int], Exchange]
"""Builds the exchange of a group, from the group, its own store and this rank's place in it."""


@dataclass(frozen=True)
class Job:
    """A rank's facts for forming transports."""

    store: dist.Store
    rank: int
    world_size: int
    device: torch.device
    timeout_seconds: float
    """Longest wait in a collective."""
    self_test_seconds: float
    """Longest time for a route to form and to sum known values."""
    separate: bool = False
    """Whether another thread than the training's sums, so that the two may not share the default group."""
    again: bool = False
    """Whether the run has trained before, with other members."""
    outlives: bool = False
    """Whether hetexp, and not a vendor's library, handles the loss of a rank."""
    revocation: Revocation = field(default_factory=Revocation)
    """Whether this rank has given up the group that forms."""


@dataclass
class Transports:
    """A rank's communicator and exchange with the others, and their route."""

    communicator: Communicator
    exchange: Exchange
    route: Topology
    fallback: dict[str, str] | None = None
    """The routes `from` and `to`, and the `reason`; `None` if the first route works."""


def form_transports(routes: Sequence[Topology], job: Job, build: Build | None = None) -> Transports:
    """Form the default process group and the exchange by the first route that works on all ranks.

    Every rank calls it with the same routes.

    Args:
        build: builds the exchange of a group; by default with the library that the group names.

    Raises:
        SetupError: no route works; contains the problem of each.
        HandshakeError: a rank did not come.
        PeerLostError: a rank did not report its result: it is gone.
    """
    all_gather_json(
        job.store, "paths", job.rank, job.world_size, {}, job.timeout_seconds
    )  # all begin together
    attempts: list[_Attempt] = []
    try:
        return _first_that_works(routes, job, build or _builder(job), attempts)
    except Exception:  # a member may be lost meanwhile: the others form another group
        shut_all()
        for attempt in attempts:
            attempt.give_up()
        if dist.is_initialized():
            dist.destroy_process_group()
        raise


def _first_that_works(
    routes: Sequence[Topology], job: Job, build: Build, attempts: list[_Attempt]
) -> Transports:
    communicator: Communicator | None = None
    failed: list[tuple[Topology, str]] = []
    for number, route in enumerate(routes):
        store = dist.PrefixStore(f"path{number}", job.store)
        attempt = _Attempt(route, store, f"path{number}", job, build)
        attempts.append(attempt)
        if communicator is None and not attempt.native:
            limits = (job.timeout_seconds, FORMING_SECONDS if job.again else None)
            communicator = form_group(
                store, job.rank, job.world_size, "gloo", job.device, *limits, job.revocation
            )
        reason = _agreed(attempt, job)
        if reason is None:
            assert attempt.exchange is not None
            fallback = _fallback(failed, route, job.rank) if failed else None
            used = attempt.communicator or communicator
            assert used is not None
            job.revocation.native = not route.libraries <= {"gloo", "shm"}
            return Transports(used, attempt.exchange, route, fallback)
        attempt.give_up()
        failed.append((route, reason))
    failures = " ".join(f"{route.name} failed the self-test: {reason}." for route, reason in failed)
    raise SetupError(f"{failures} {_advice(failed[-1][0])}")


class _Attempt:
    """One route, formed and tested in a thread that is abandoned if it hangs."""

    def __init__(self, route: Topology, store: dist.Store, prefix: str, job: Job, build: Build) -> None:
        self.route = route
        self.communicator: Communicator | None = None
        self.exchange: Exchange | None = None
        self.native = route.library not in (None, "gloo", "shm")
        """Whether the default process group itself is the vendor library's."""
        self._formed: list[Exchange] = []
        self._store, self._prefix, self._job, self._build = store, prefix, job, build
        self._thread_store: dist.Store | None = None
        """The thread's own: while it waits for a key that never comes, it blocks its connection."""
        self._problem: str | None = None
        self._abandoned = False
        """Whether the thread hangs and is abandoned."""
        self._obsolete = False
        """Whether a member is lost, so that the route is not needed any more."""

    def run(self) -> str | None:
        """Form the route and sum known values; return the problem in a few words, if any.

        A rank with a problem reports it at once, so that the others stop waiting for it in a collective.

        Raises:
            PeerLostError: the launcher has reported meanwhile that a member is gone.
        """
        thread = threading.Thread(target=self._try, name="self-test", daemon=True)
        thread.start()
        deadline = time.monotonic() + self._job.self_test_seconds
        while thread.is_alive() and time.monotonic() < deadline and not self._store.check([_FAILED]):
            if isinstance(self._job.store, WatchedStore) and self._job.store.obsolete():
                self._abandoned = self._obsolete = True
                raise PeerLostError("the members of this training have changed during a self-test")
            thread.join(_LOOK_SECONDS)
        # Another rank's failure makes this rank's test fail, too, only a little later.
        thread.join(_GRACE_SECONDS)
        self._abandoned = thread.is_alive()
        if not self._abandoned:
            problem = self._problem
        elif self._store.check([_FAILED]):
            problem = None  # it is the other rank's
        else:
            problem = f"no answer within {self._job.self_test_seconds:g} s (comm.self_test_seconds)"
        if problem is not None:
            self._store.set(_FAILED, "")
        return problem

    def give_up(self) -> None:
        """Close the exchanges, so that the device is free for the next route."""
        ending = threading.Thread(target=self._end, name="end-path", daemon=True)
        ending.start()
        ending.join(_HURRIED_END_SECONDS if self._obsolete else _END_SECONDS)
        if self.native and dist.is_initialized():  # it could not be aborted, and another one must form
            forget_default_group()

    def _end(self) -> None:
        for exchange in self._formed:
            with logged("an exchange was not closed"):  # it has failed already
                exchange.close()
        if self.native and dist.is_initialized():
            with logged("a group was not aborted"):
                abort_groups()

    def _try(self) -> None:
        formed: Exchange | None = None
        try:
            with _beside(self._job.device):
                formed = self._form()
                sizes = SIZES_AGAIN if self._job.again else SIZES
                problem = self_test(formed, self._job.device, sizes)
        except Exception as error:  # of any class: the other ranks must learn of it
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
        if not self._abandoned:
            self.exchange, self._problem = formed, problem

    def _form(self) -> Exchange:
        job, route = self._job, self.route
        connection = another_connection(job.store)
        store = self._thread_store = dist.PrefixStore("formed", dist.PrefixStore(self._prefix, connection))
        if self.native:
            assert route.library is not None
            self.communicator = form_group(
                store,
                job.rank,
                job.world_size,
                route.library,
                job.device,
                job.timeout_seconds,
                revocation=job.revocation,
                outlives=job.outlives,
            )
            if not job.separate:
                return GroupExchange(revocation=job.revocation)
        levels = []
        for height, groups in enumerate(route.levels):
            for number, group in enumerate(groups):
                if job.rank in group.ranks:
                    group_store = dist.PrefixStore(f"level{height}/group{number}", store)
                    levels.append(self._build(group, group_store, group.ranks.index(job.rank)))
                    self._formed.append(levels[-1])
        return levels[0] if route.library is not None else HierarchicalExchange(levels, route, job.rank)


def _beside(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context with a separate stream, so that work that hangs there does not block later work."""
    if device.type != "cuda":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.Stream(device))
    return context


def self_test(exchange: Exchange, device: torch.device, sizes: Sequence[int] = SIZES) -> str | None:
    """Sum and gather known values over a group; return the first problem, `None` without one.

    The ranks send different values, small whole numbers whose sum is exact: so each link between two ranks
    must carry values that the receiver does not have.

    Args:
        sizes: numbers of each test message.

    Raises:
        PeerLostError: another rank is gone, or did not come in time.
    """
    size, problems = exchange.size, []
    for length in sizes:  # all sizes, even after a problem, since the other ranks go on
        places = torch.arange(length, device=device)
        pattern = (places % _PERIOD + 1).float()
        tensor = pattern * (exchange.rank + 1)
        exchange.sum_(tensor)
        problems.append(_wrong("sum", tensor, pattern * (size * (size + 1) // 2)))
    codes = exchange.gather(((places + 7 * exchange.rank) % _PERIOD).to(torch.uint8))
    for rank, code in enumerate(codes):
        expected = ((places + 7 * rank) % _PERIOD).to(torch.uint8)
        problems.append(_wrong(f"message of rank {rank}", code, expected))
    return next((problem for problem in problems if problem is not None), None)


def _wrong(what: str, received: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return a description of wrong numbers, `None` if all are right."""
    if torch.equal(received, expected):
        return None
    bad = received != expected
    count = int(bad.sum())
    zeros = int((bad & (received == 0)).sum())
    first = int(bad.nonzero()[0])
    kind = "zeros" if zeros == count else "wrong"
    example = f"number {first} is {received[first].item():g} instead of {expected[first].item():g}"
    return f"{count} of {len(received)} numbers of a {what} came back {kind} ({example})"


def _agreed(attempt: _Attempt, job: Job) -> str | None:
    """Run an attempt and return the problems of all ranks, the same on each of them; `None` without any.

    Raises:
        PeerLostError: a rank did not report.
    """
    topic = f"tested/{attempt.route.name}"
    report = {"problem": attempt.run()}
    limit = job.self_test_seconds + _REPORT_SECONDS
    try:
        reports = all_gather_json(job.store, topic, job.rank, job.world_size, report, limit)
    except HandshakeError as error:
        since = f"the self-test of {attempt.route.name}"
        raise PeerLostError(f"another rank is gone since {since} ({error})") from error
    problems: dict[str, list[str]] = {}
    for rank, report in enumerate(reports):
        if report["problem"] is not None:
            problems.setdefault(str(report["problem"]), []).append(str(rank))
    return "; ".join(f"{problem} on rank {', '.join(ranks)}" for problem, ranks in problems.items()) or None


def _fallback(failed: Sequence[tuple[Topology, str]], used: Topology, rank: int) -> dict[str, str]:
    """Return the record of the failed routes, and warn of them on rank 0."""
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
    """Return advice on a failed route."""
    libraries = dict.fromkeys(group.library for level in route.levels for group in level)
    return "Try: " + "; ".join(_ADVICE[library] for library in libraries) + "."


def _builder(job: Job) -> Build:
    """Return the function that builds an exchange with the library that a group names."""

    def build(group: Group, store: dist.Store, rank: int) -> Exchange:
        size = len(group.ranks)
        if group.library == "shm":
            from hetexp.comm.shared_memory.exchange import SharedMemoryExchange

            return SharedMemoryExchange.form(store, rank, size, job.timeout_seconds, job.device)
        limits = (job.timeout_seconds, FORMING_SECONDS if job.again else None)
        outliving = (job.revocation, job.outlives)
        return LibraryExchange(group.library, store, rank, size, *limits, *outliving)

    return build
