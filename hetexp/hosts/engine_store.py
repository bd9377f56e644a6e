"""The store in which ranks of another engine meet: their reports to rank 0, and its commands, as JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hetexp.core.epoch import SignedStore
from hetexp.core.errors import SetupError
from hetexp.core.rank_env import ENGINE, OTHERWISE, RankEnv
from hetexp.hosts.channel import retried
from hetexp.hosts.this_host import local_addresses
from hetexp.launch.processes.process import CLUSTER_TOKEN
from hetexp.torch_private import default_store

POLL_SECONDS = 0.05
NOTICE_SECONDS = 5.0
"""How long a rank waits for others before it says so."""
LEAVE_SECONDS = 10.0
"""Longest that rank 0, which hosts the store, waits at the end for the ranks that still use it."""


class EngineStore:
    """This rank's connection to the store of the job.

    Args:
        rank_env: of this process.
        timeout_seconds: until all ranks are there (`launch.timeout_seconds`).

    Raises:
        SetupError: rank 0 was not found; names host, port and limit.
    """

    def __init__(self, rank_env: RankEnv, timeout_seconds: float) -> None:
        self.rank_env, self._limit = rank_env, timeout_seconds
        self._commands = 0
        self._explained = False
        self._absent = set[int]()
        has_group = dist.is_available() and dist.is_initialized()
        # Ray Train has formed a group already. Its store is where the ranks meet, and the group ends.
        root = default_store() if has_group else _connect(rank_env, timeout_seconds)
        self._root = root  # if rank 0 hosts it, it ends with this object
        if has_group:
            dist.destroy_process_group()
        self._store = dist.PrefixStore(f"hetexp/{rank_env.attempt}", root)
        # A command names classes to build. No engine gives its ranks a secret, but the user may.
        self._signed = SignedStore(self._store, os.environ.get(CLUSTER_TOKEN, ""))
        self.address = _address_towards(rank_env)
        """Of this host, as the others reach it."""
        interface = local_addresses().get(self.address)
        if interface is not None:
            # By itself gloo takes the address of the host's own name, which others may not reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def report(self, topic: str, value: Mapping[str, Any]) -> None:
        """Report something about this rank."""
        self._store.set(f"{topic}/{self.rank_env.rank}", json.dumps(value))

    def reported(self, topic: str, ranks: Iterable[int] | None = None) -> dict[int, dict[str, Any]]:
        """Return the reports so far, by rank.

        Args:
            ranks: whose reports are read; by default all.
        """
        ranks = range(self.rank_env.world_size) if ranks is None else ranks
        present = [rank for rank in ranks if self._store.check([f"{topic}/{rank}"])]
        return {rank: json.loads(self._store.get(f"{topic}/{rank}")) for rank in present}

    def gather(self, topic: str) -> list[dict[str, Any]]:
        """Return the reports of all ranks, in rank order; the first call explains a long wait.

        Raises:
            SetupError: ranks did not report in time; names them.
        """
        started, reports = time.monotonic(), dict[int, dict[str, Any]]()
        env = self.rank_env
        while missing := [rank for rank in range(env.world_size) if rank not in reports]:
            reports |= self.reported(topic, missing)
            waited = time.monotonic() - started
            names = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            if missing and not self._explained and waited > NOTICE_SECONDS:
                self._explained = True
                _explain_wait(env, f"rank {names}", self._limit)
            if waited > self._limit:
                self._absent = set(missing)
                raise SetupError(
                    f"{len(reports)} of {env.world_size} ranks came to {env.address}:{env.port} within "
                    f"{self._limit:g} s (launch.timeout_seconds), but not {names}. This process waits "
                    f"for them because of {env.variables}. Under SLURM `srun` must start the processes, "
                    f"with torchrun one instance of it on each node. {OTHERWISE}"
                )
            if len(reports) < env.world_size:
                time.sleep(POLL_SECONDS)
        self._explained = True  # later, ranks are busy and not absent
        return [reports[rank] for rank in range(env.world_size)]

    def send_command(self, command: Mapping[str, Any]) -> None:
        """Send a command to all other ranks; only rank 0 does."""
        write = self._signed.write if self._signed.secret else self._store.set
        write(f"command/{self._commands}", json.dumps(command))
        self._commands += 1

    def next_command(self) -> dict[str, Any]:
        """Return the next command of rank 0, however long that takes.

        Raises:
            SetupError: rank 0 is gone.
        """
        key = f"command/{self._commands}"
        try:
            while (text := self._read(key)) is None:
                time.sleep(POLL_SECONDS)
            command: dict[str, Any] = json.loads(text)
        except RuntimeError as error:
            raise SetupError("rank 0 is gone, and with it the plan of this run.") from error
        self._commands += 1
        return command

    def _read(self, key: str) -> str | bytes | None:
        if self._signed.secret:
            return self._signed.read(key)
        return self._store.get(key) if self._store.check([key]) else None

    def leave(self) -> None:
        """Leave the store; rank 0, which may host it, waits for the others, but not for long."""
        try:
            self._store.set(f"left/{self.rank_env.rank}", "1")
            deadline = time.monotonic() + LEAVE_SECONDS
            came = set(range(self.rank_env.world_size)) - self._absent
            all_left = [f"left/{rank}" for rank in came]
            while self.rank_env.leads and not self._store.check(all_left) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # the store is gone already
            return


def _explain_wait(env: RankEnv, missing: str, limit_seconds: float) -> None:
    """Say for whom this rank waits, and which variables make it wait: they may be left from another job."""
    print(
        f"Waiting up to {limit_seconds:g} s for {missing} at {env.address}:{env.port}: {env.variables} say "
        f"that another engine starts {env.world_size} ranks. If none does, set {ENGINE}=none: hetexp's own "
        "launcher starts the ranks then.",
        file=sys.stderr,
        flush=True,
    )


def _connect(rank_env: RankEnv, timeout_seconds: float) -> dist.TCPStore:
    """Return the store at the engine's address, which rank 0 hosts if the engine does not."""
    address, timeout = (rank_env.address, rank_env.port), timedelta(seconds=timeout_seconds)
    if rank_env.leads and not rank_env.store_is_there:
        try:
            # By the loopback: an address that leads elsewhere would let torch's client print C++ stacks.
            return dist.TCPStore(
                "127.0.0.1", rank_env.port, is_master=True, wait_for_workers=False, timeout=timeout
            )
        except (RuntimeError, ValueError) as error:  # torch's own text is a C++ stack
            raise SetupError(
                f"Rank 0 must open port {rank_env.port} (MASTER_PORT) for the others, but cannot: another "
                f"process may have it. This process is rank 0 because of {rank_env.variables}. {OTHERWISE}"
            ) from error
    try:
        # A plain connection first: torch's own client prints a C++ stack for each failed attempt.
        _reach(rank_env, timeout_seconds)
        return dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
    except (OSError, dist.DistError) as error:
        raise SetupError(
            f"rank 0 did not answer at {rank_env.address}:{rank_env.port} within {timeout_seconds:g} s "
            f"(launch.timeout_seconds): {error}. Is MASTER_ADDR its host, and does a firewall block "
            f"MASTER_PORT? This process waits for it because of {rank_env.variables}. {OTHERWISE}"
        ) from error


def _reach(rank_env: RankEnv, timeout_seconds: float) -> None:
    """Return when something listens at the engine's address; say so if that takes long."""

    def attempt(seconds: float) -> None:
        socket.create_connection((rank_env.address, rank_env.port), seconds).close()

    first = min(NOTICE_SECONDS, timeout_seconds)
    try:
        retried(attempt, first)
    except OSError:
        if first == timeout_seconds:
            raise
        _explain_wait(rank_env, "rank 0", timeout_seconds)
        retried(attempt, timeout_seconds - first)


def _address_towards(rank_env: RankEnv) -> str:
    """Return this host's address in the network that leads to the host of rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((rank_env.address, rank_env.port or 1))  # sends nothing: it only finds the route
            address: str = probe.getsockname()[0]
        except OSError as error:
            raise SetupError(
                f"`MASTER_ADDR` must be a host that this one reaches, but is '{rank_env.address}' "
                f"instead: {error}. It is needed because of {rank_env.variables}. {OTHERWISE}"
            ) from None
    return address
