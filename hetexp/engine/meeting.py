"""How ranks that another engine started meet: what they tell rank 0, and what it tells them, as JSON."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hetexp.core.errors import SetupError
from hetexp.core.rank_env import RankEnv
from hetexp.launch.processes.store import bind, host_store

POLL_SECONDS = 0.05
GOODBYE_SECONDS = 10.0
"""Longest that rank 0, which hosts the store, waits at the end for those that still use it."""


class Meeting:
    """This rank's end of what all ranks of the job share.

    Args:
        seat: of this process.
        timeout_seconds: until all are there (`launch.timeout_seconds`).

    Raises:
        SetupError: rank 0 was not found; names host, port and limit.
    """

    def __init__(self, seat: RankEnv, timeout_seconds: float) -> None:
        self.seat, self._limit = seat, timeout_seconds
        self._orders = 0
        own = dist.is_available() and dist.is_initialized()
        # Ray Train has formed a group already: its store is where the ranks meet, and the group goes.
        root = dist.distributed_c10d._get_default_store() if own else _connect(seat, timeout_seconds)
        self._engines = root  # a store of rank 0 ends with this object
        if own:
            dist.destroy_process_group()
        self._store = dist.PrefixStore(f"hetexp/{seat.attempt}", root)
        self.address = own_address(seat)
        """Of this host, as the others reach it."""
        use_interface(self.address)

    def tell(self, topic: str, value: Mapping[str, Any]) -> None:
        """Tell all ranks something about this one."""
        self._store.set(f"{topic}/{self.seat.rank}", json.dumps(value))

    def gather(self, topic: str) -> list[dict[str, Any]]:
        """Return what every rank tells, in rank order.

        Raises:
            SetupError: some did not come in time; names them.
        """
        deadline = time.monotonic() + self._limit
        missing = list(range(self.seat.world_size))
        while missing := [rank for rank in missing if not self._store.check([f"{topic}/{rank}"])]:
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
                raise SetupError(
                    f"{self.seat.world_size - len(missing)} of {self.seat.world_size} ranks came to "
                    f"{self.seat.address}:{self.seat.port} within {self._limit:g} s "
                    f"(launch.timeout_seconds), but not {names}. Under SLURM `srun` must start the "
                    "processes, with torchrun one instance of it on each node."
                )
            time.sleep(POLL_SECONDS)
        return [json.loads(self._store.get(f"{topic}/{rank}")) for rank in range(self.seat.world_size)]

    def reported(self, topic: str) -> dict[int, dict[str, Any]]:
        """Return what ranks have reported so far, by rank."""
        ranks = range(self.seat.world_size)
        there = [rank for rank in ranks if self._store.check([f"{topic}/{rank}"])]
        return {rank: json.loads(self._store.get(f"{topic}/{rank}")) for rank in there}

    def order(self, what: Mapping[str, Any]) -> None:
        """Tell all other ranks what comes next; only rank 0 does."""
        self._store.set(f"order/{self._orders}", json.dumps(what))
        self._orders += 1

    def next_order(self) -> dict[str, Any]:
        """Return what rank 0 says next, however long that takes.

        Raises:
            SetupError: rank 0 is gone.
        """
        key = f"order/{self._orders}"
        try:
            while not self._store.check([key]):
                time.sleep(POLL_SECONDS)
            found: dict[str, Any] = json.loads(self._store.get(key))
        except RuntimeError as error:
            raise SetupError("rank 0 is gone, and with it the plan of this run.") from error
        self._orders += 1
        return found

    def part(self) -> None:
        """Say goodbye; rank 0, which hosts the store, leaves when all others have, or no more do."""
        try:
            self._store.set(f"goodbye/{self.seat.rank}", "1")
            deadline = time.monotonic() + GOODBYE_SECONDS
            rest = [f"goodbye/{rank}" for rank in range(self.seat.world_size)]
            while self.seat.leads and not self._store.check(rest) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # the store is gone already
            return


def _connect(seat: RankEnv, timeout_seconds: float) -> dist.TCPStore:
    """Return the store at the engine's address: the engine's own, or one that rank 0 hosts."""
    where = f"{seat.address}:{seat.port}"
    if seat.leads and not seat.store_is_there:
        return dist.TCPStore(
            seat.address,
            seat.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
        )
    deadline = time.monotonic() + timeout_seconds
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            # A plain connection first: torch's own client prints a C++ stack for each failed try.
            socket.create_connection((seat.address, seat.port), timeout=left).close()
            return dist.TCPStore(
                seat.address, seat.port, is_master=False, timeout=timedelta(seconds=max(left, 1.0))
            )
        except (OSError, dist.DistError) as error:
            if time.monotonic() >= deadline:
                raise SetupError(
                    f"rank 0 did not answer at {where} within {timeout_seconds:g} s "
                    f"(launch.timeout_seconds): {error}. Is MASTER_ADDR its host, and does a "
                    "firewall block MASTER_PORT?"
                ) from error
            time.sleep(POLL_SECONDS)


def own_address(seat: RankEnv) -> str:
    """Return this host's address on the network that leads to rank 0's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((seat.address, seat.port or 1))  # sends nothing: it only asks for the way
            found: str = probe.getsockname()[0]
        except OSError as error:
            raise SetupError(
                f"`MASTER_ADDR` must be a host that this one reaches, but is '{seat.address}' "
                f"instead: {error}."
            ) from None
    return found


def use_interface(address: str) -> None:
    """Let gloo listen on the interface with this address, unless another is chosen already.

    By itself it takes the address that the host's own name leads to, which others may not reach.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def hosted(address: str, port: int) -> tuple[dist.TCPStore, int]:
    """Host a run's store where the other ranks reach it; return it and its port.

    Raises:
        ConfigError, SetupError: as `hetexp.launch.processes.store.bind`.
    """
    listener = bind(address, port)
    own: int = listener.getsockname()[1]
    return host_store(listener), own
