"""Joins the ranks of a plan to a group with an exchange of gradients, and leaves it again."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from hetexp.comm.communicator import ProcessGroupCommunicator, SoloCommunicator
from hetexp.comm.connections.disposal import release_later
from hetexp.comm.connections.revocation import Revocation
from hetexp.comm.connections.watched_store import WatchedStore
from hetexp.comm.forms import of_other_forms
from hetexp.comm.hook import Averaging, CommHook, GradientHook
from hetexp.comm.paced_exchange import PacedExchange
from hetexp.comm.rendezvous import form_group
from hetexp.comm.shared_memory.exchange import SharedMemoryExchange
from hetexp.comm.transports import Job, form_transports
from hetexp.core.plan import Plan
from hetexp.core.topology import Topology
from hetexp.hardware.links import links_of
from hetexp.plan.routes import routes_to_try
from hetexp.torch_private import formed_groups
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
"""Longest wait until a thread that exchanges gradients notices that its peers are gone."""


def connect(
    state: TrainState, plan: Plan, store: dist.Store, separate: bool = False, again: bool = False
) -> None:
    """Form the group of a plan's ranks: the communicator for small tensors, the exchange for large ones.

    The state's plan is then this one, with another route if the planned route failed its self-test.

    Args:
        separate: whether gradients need connections beside those of torch's own exchange.
        again: whether the run has trained before, with other members.

    Raises:
        SetupError: the group did not form, or no route works.
        PeerLostError: another rank is gone.
    """
    comm, rank, device = state.config.comm, state.rank, state.device
    state.plan, state.exchange = plan, None
    outlives = state.config.fault.survive and plan.reforms and state.strategy.reforms
    if plan.world_size == 1:
        backend, limit = plan.collective_backend, comm.timeout_seconds
        state.communicator = form_group(store, rank, 1, backend, device, limit, outlives=outlives)
        return
    limits = comm.timeout_seconds, comm.self_test_seconds
    revocation = store.revocation if isinstance(store, WatchedStore) else Revocation()
    job = Job(store, rank, plan.world_size, device, *limits, separate, again, outlives, revocation)
    formed = form_transports(routes_to_try(plan), job)
    if formed.fallback is not None:
        route = formed.route if plan.route is not None else None
        native = formed.route.library not in (None, "gloo", "shm")
        backend = str(formed.route.library) if native else "gloo"
        state.plan = replace(plan, route=route, collective_backend=backend, route_fallback=formed.fallback)
    state.communicator, state.exchange = formed.communicator, formed.exchange
    if isinstance(formed.communicator, ProcessGroupCommunicator) and _shares_memory(plan, formed.route):
        formed.communicator.form_rows = partial(_row_exchange, job)


def _shares_memory(plan: Plan, route: Topology) -> bool:
    """Return whether all ranks are on one host, and its shared memory has passed the self-test."""
    libraries = {group.library for level in route.levels for group in level}
    return "shm" in libraries and len({device.host for device in plan.devices}) == 1


def _row_exchange(job: Job, name: str) -> SharedMemoryExchange:
    """Return an exchange of small host tensors of all ranks, which all call this."""
    store = dist.PrefixStore(name, job.store)
    limit = job.timeout_seconds
    return SharedMemoryExchange.form(store, job.rank, job.world_size, limit, job.device, small=True)


def leave(state: TrainState) -> None:
    """Leave the other ranks, also in the midst of a collective; safe to call twice.

    A group that a vendor's library joins must be aborted before (`RankRecovery`).

    Ranks that wait for this rank learn of it at once. Model, optimizer and device stay as they are.
    """
    held = formed_groups()
    if state.exchange is not None:
        state.exchange.abandon()
    state.communicator.abandon()
    ended = state.hook.close(LEAVE_SECONDS)
    if state.exchange is not None and ended:
        state.exchange.close()
    elif not ended:  # it still reads the exchange's memory
        log.warning("the thread that exchanges gradients did not end within %g s, and is left", LEAVE_SECONDS)
    if state.hook.exchange_seconds is not None:
        state.exchanged_before = state.hook.sent_bytes, state.hook.exchange_seconds
    state.module = state.strategy.unwrap(state.module, state.model)
    state.optimizer.zero_grad(set_to_none=True)
    state.exchange, state.hook, state.guard = None, CommHook(), None
    state.communicator = SoloCommunicator()
    release_later(held)


def attach_hook(state: TrainState, in_backward: bool) -> None:
    """Let gradients travel compressed, by the plan's route or at the pace of emulated links.

    Torch's own exchange keeps its place if it can do what the plan says.

    Args:
        in_backward: whether the strategy's wrapper exchanges gradients during backward.
    """
    plan, exchange, comm = state.plan, state.exchange, state.config.comm
    if exchange is None:
        return
    if plan.paced:
        backend = state.backend
        phase = backend.synchronize, backend.backward_done
        links, limit = links_of(plan), comm.timeout_seconds
        hook: Averaging = PacedExchange(exchange, links, state.rank, *phase, limit, comm.wire)
        if state.time_scale is not None:  # found in an earlier group
            hook.start(state.time_scale)
    elif in_backward and (
        plan.way.library in (None, "shm") or plan.wire != "float32" or of_other_forms(state.model)
    ):
        hook = GradientHook(exchange, comm.wire, plan.world_size)
        hook.sent_bytes, hook.exchange_seconds = state.exchanged_before
    else:
        return
    state.hook = hook
    if in_backward:
        state.strategy.exchange_through(state.module, hook.hook)


def versions() -> dict[str, str]:
    """Return the versions that this rank runs on."""
    return {"python": platform.python_version(), "torch": torch.__version__}
