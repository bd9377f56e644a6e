"""Rendezvous of the ranks: they connect to the launcher's store, compare facts and form a process group."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetexp.comm.communicator import Communicator, ProcessGroupCommunicator
from hetexp.comm.connections.pulse import Pulse
from hetexp.comm.connections.revocation import Revocation, quiet_watchdog
from hetexp.comm.connections.sockets import remembered
from hetexp.core.errors import HandshakeError, SetupError
from hetexp.core.section import flatten
from hetexp.torch_private import restart_group_count, set_default_timeout

GLOO_TRIES = 5
"""Times its timeout that gloo waits for a connection, as measured (torch 2.13)."""


def connect_store(host: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """Connect to the store that the launcher hosts.

    Raises:
        SetupError: the store did not answer in time; names host, port and limit.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            # A plain connection first: torch's own client prints a C++ stack for each failed try.
            socket.create_connection((host, port), timeout=left).close()
            return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=left))
        except (OSError, dist.DistError) as error:
            if time.monotonic() >= deadline:
                raise SetupError(
                    f"no launcher answered at {host}:{port} within {timeout_seconds:g} s ({error}). Is it "
                    "still running, and does a firewall block the port?"
                ) from error
            time.sleep(0.05)


def all_gather_json(
    store: dist.Store,
    topic: str,
    rank: int,
    world_size: int,
    value: Mapping[str, Any],
    timeout_seconds: float,
) -> list[dict[str, Any]]:
    """Return every rank's `value` in rank order, exchanged as JSON through the store; all ranks call it.

    Raises:
        HandshakeError: a rank did not come in time; names it, the address and the limit.
    """
    store.set(f"{topic}/{rank}", json.dumps(value))
    gathered = []
    deadline = time.monotonic() + timeout_seconds
    for other in range(world_size):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"{topic}/{other}"], timedelta(seconds=left))
        except RuntimeError as error:
            address = f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else "the store"
            raise HandshakeError(
                f"rank {rank} waited {timeout_seconds:g} s at {address} for rank {other}, which did not "
                f"come ({topic})."
            ) from error
        gathered.append(json.loads(store.get(f"{topic}/{other}")))
    return gathered


def compare_facts(facts: list[dict[str, Any]], names: list[str]) -> None:
    """Check that all ranks have the same facts.

    Args:
        facts: nested mappings, one a rank.
        names: of the ranks, for the message.

    Raises:
        HandshakeError: names every fact that differs, with its value on each rank.
    """
    flat = [flatten(fact) for fact in facts]
    keys = list(dict.fromkeys(key for fact in flat for key in fact))
    differing = []
    for key in keys:
        values = [fact.get(key, "absent") for fact in flat]
        if any(value != values[0] for value in values):
            per_rank = ", ".join(f"{value} on {name}" for value, name in zip(values, names, strict=True))
            differing.append(f"{key} is {per_rank}")
    if differing:
        shown = differing[:8] + ([f"and {len(differing) - 8} more"] if len(differing) > 8 else [])
        raise HandshakeError("the ranks do not agree: " + "; ".join(shown) + ".")


def forming_timeout(timeout_seconds: float, forming_seconds: float | None) -> timedelta:
    """Return gloo's timeout for waiting for a connection at most `forming_seconds`.

    Args:
        timeout_seconds: longest wait in a collective.
        forming_seconds: `None`: the same timeout.
    """
    limit = timeout_seconds if forming_seconds is None else min(timeout_seconds, forming_seconds / GLOO_TRIES)
    return timedelta(seconds=limit)


def form_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    collective_backend: str,
    device: torch.device,
    timeout_seconds: float,
    forming_seconds: float | None = None,
    revocation: Revocation | None = None,
    outlives: bool = False,
) -> Communicator:
    """Form the process group of all ranks.

    Args:
        timeout_seconds: longest wait in a collective.
        forming_seconds: longest wait for a connection if all ranks are known to have begun, so that a rank
            that has died since does not delay the others. `None`: gloo waits as long as in a collective.
        revocation: of the group; `None`: its ranks never give it up.
        outlives: whether hetexp, and not the library, handles the loss of a rank.

    Raises:
        SetupError: the group did not form; contains torch's reason.
    """
    restart_group_count()  # a group that did not form on some ranks only would be counted there for ever
    try:
        with remembered(), quiet_watchdog() if outlives else nullcontext():
            dist.init_process_group(
                collective_backend,
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=world_size,
                timeout=forming_timeout(timeout_seconds, forming_seconds),
            )
        if forming_seconds is not None and collective_backend == "gloo":
            set_default_timeout(timedelta(seconds=timeout_seconds))
        pulse = Pulse(dist.PrefixStore("life", store), rank, world_size, timeout_seconds)
        communicator = ProcessGroupCommunicator(device, pulse, revocation=revocation)
        communicator.barrier()
    except RuntimeError as error:
        raise SetupError(
            f"the {collective_backend} group of {world_size} ranks did not form: {error}"
        ) from error
    return communicator
