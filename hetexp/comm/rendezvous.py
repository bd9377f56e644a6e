"""How ranks meet: the launcher's store, what they compare in it, and the process group they form."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetexp.comm.communicator import Communicator, ProcessGroupCommunicator
from hetexp.comm.connections.pulse import Pulse
from hetexp.comm.connections.sockets import remembered
from hetexp.core.errors import HandshakeError, SetupError
from hetexp.core.section import flatten

GLOO_TRIES = 5
"""Times its timeout that gloo waits for a connection, as measured (torch 2.13)."""


def connect_store(host: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """Connect to the store that the launcher hosts.

    Raises:
        SetupError: no answer came in time; names host, port and limit.
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


def exchange(
    store: dist.Store,
    topic: str,
    rank: int,
    world_size: int,
    value: Mapping[str, Any],
    timeout_seconds: float,
) -> list[dict[str, Any]]:
    """Give `value` to all ranks and return what each of them gave, in rank order. JSON, never pickle.

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
    """Check that all ranks brought the same facts.

    Args:
        facts: nested mappings, one a rank.
        names: what to call each rank.

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


def limit_of_forming(timeout_seconds: float, forming_seconds: float | None) -> timedelta:
    """Return the timeout with which gloo waits for a connection no longer than `forming_seconds`.

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
) -> Communicator:
    """Form the process group of all ranks.

    Args:
        timeout_seconds: longest wait in a collective.
        forming_seconds: longest wait for a connection, where all ranks are known to have begun: gloo itself
            waits for that of a rank that has died since as long as for a collective. `None`: as long, too.

    Raises:
        SetupError: the group did not form; carries torch's reason.
    """
    # torch numbers the groups of a process, meets under that number, and counts one that did not form, which
    # may be one on some ranks only: they would never meet again.
    dist.distributed_c10d._world.group_count = 0
    try:
        with remembered():
            dist.init_process_group(
                collective_backend,
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=world_size,
                timeout=limit_of_forming(timeout_seconds, forming_seconds),
            )
        if forming_seconds is not None and collective_backend == "gloo":
            limit = timedelta(seconds=timeout_seconds)
            dist.distributed_c10d._set_pg_timeout(limit, dist.distributed_c10d._get_default_group())
        pulse = Pulse(dist.PrefixStore("life", store), rank, world_size, timeout_seconds)
        communicator = ProcessGroupCommunicator(device, pulse)
        communicator.barrier()
    except RuntimeError as error:
        raise SetupError(
            f"the {collective_backend} group of {world_size} ranks did not form: {error}"
        ) from error
    return communicator
