"""A machine that has joined, as the leader's launcher sees it: ranks start there, and report from there."""

from __future__ import annotations

import base64
import secrets
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetexp.hosts.channel import Channel, WireError
from hetexp.hosts.leader_server import JoinRequest
from hetexp.launch.processes.failure import RankFailure, failure_path, stack_path, write_failure
from hetexp.launch.processes.hosts import Host
from hetexp.launch.processes.process import RUN_SECRET, Elsewhere, Start

HOST_LOST = "HostLost"
"""Kind of the failure of every rank on a lost machine."""
MAX_FILE_BYTES = 256 * 2**20
"""Most bytes that another machine may add to the files of one rank."""
_KILLED = -int(signal.SIGKILL) if hasattr(signal, "SIGKILL") else -9


def rank_files(log_path: Path) -> dict[str, Path]:
    """Return the files that a rank of another machine sends, by their kind."""
    return {"log": log_path, "stack": stack_path(log_path), "failure": failure_path(log_path)}


class RemoteRank(Elsewhere):
    """A rank of another machine; its files are stored here as they arrive."""

    def __init__(self, host: JoinedHost, key: int, start: Start) -> None:
        self._host, self.key, self.start = host, key, start
        self._code: int | None = None
        self._bytes = 0
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout_seconds: float) -> None:
        self._ended.wait(timeout_seconds)

    def send(self, number: signal.Signals, group: bool) -> None:
        if not self._ended.is_set():
            self._host.send({"op": "signal", "key": self.key, "number": int(number), "group": group})

    def set_ended(self, code: int) -> None:
        """Note its exit code, and wake up all that wait for it."""
        if not self._ended.is_set():
            self._code = code
            self._ended.set()

    def append(self, kind: str, data: bytes) -> None:
        """Store what it has written."""
        path = rank_files(self.start.log_path).get(kind)
        if path is None:
            raise WireError(f"a file of the kind {kind!r}")
        self._bytes += len(data)
        if self._bytes <= MAX_FILE_BYTES:
            with path.open("ab") as file:
                file.write(data)


class JoinedHost(Host):
    """A machine that has joined.

    Args:
        request: with which it joined.
        silence_seconds: longest silence before it counts as lost.
        show: shows a line to the user.
        allow: called with each start, so that the rank there reaches what it needs of this machine.
        rejoin: waits for the machine to join again, until its argument says to stop; its new connection.
    """

    def __init__(
        self,
        request: JoinRequest,
        silence_seconds: float,
        show: Callable[[str], None],
        allow: Callable[[Start], None],
        rejoin: Callable[[Callable[[], bool]], Channel | None],
    ) -> None:
        self.name, self.address = request.facts.name, request.address
        self._silence, self._show, self._allow, self._rejoin = silence_seconds, show, allow, rejoin
        self._next = 0
        self._lock = threading.Lock()
        self._begin(request.channel)

    def _begin(self, channel: Channel) -> None:
        """Listen to the machine over a connection on which no rank has been started yet."""
        self._ranks: dict[int, RemoteRank] = {}
        self._ending = False
        self.lost_because: str | None = None
        """Why it is lost; `None` while it is there."""
        self._channel = channel
        channel.listen(self._silence, self._receive, self._lose)

    def comes_back(self, wakes: Callable[[], bool]) -> bool:
        if self.lost_because is None:
            return True
        channel = self._rejoin(wakes)
        if channel is None:
            return False
        self._channel.close()
        self._begin(channel)
        return True

    def start(self, start: Start, method: str) -> RemoteRank:
        plan = start.plan_path.read_text(encoding="utf-8")
        self._allow(start)
        with self._lock:
            if self.lost_because is not None:
                raise OSError(f"{self.name} {self.lost_because}")
            self._next += 1
            key = self._next
            rank = self._ranks[key] = RemoteRank(self, key, start)
        start.log_path.touch()
        start_rank = {"op": "start", "key": key, "rank": start.rank, "member": start.member}
        nonce = secrets.token_hex(32)  # messages are not encrypted
        hidden = self._channel.hidden(start.environment[RUN_SECRET], nonce)
        self.send(start_rank | {"plan": plan, "method": method, "nonce": nonce, "secret": hidden})
        return rank

    def send(self, message: dict[str, Any]) -> None:
        """Send a command; a machine that is gone counts as lost."""
        try:
            self._channel.send(message)
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            self._lose(f"takes no orders any more ({reason})")

    def end(self, code: int, text: str) -> None:
        """Let its launcher end for this reason."""
        if self.lost_because is None:
            self._ending = True
            self.send({"op": "end", "code": code, "text": text})
            self._channel.wait(5.0)  # it closes the connection as soon as it has read this
        self._channel.close()

    def _receive(self, message: dict[str, Any]) -> None:
        operation, rank = message["op"], self._ranks[int(message["key"])]
        if operation == "file":
            rank.append(str(message["kind"]), base64.b64decode(message["data"], validate=True))
        elif operation == "exit":
            rank.set_ended(int(message["code"]))
        else:
            raise WireError(f"an answer named {operation!r}")

    def _lose(self, why: str) -> None:
        with self._lock:
            if self.lost_because is not None:
                return
            self.lost_because = why
        reason = f"{self.name} ({self.address}) {why}."
        self._channel.close()
        running = [rank for rank in self._ranks.values() if rank.poll() is None]
        if not self._ending:
            self._show(reason)
        for rank in running:
            log = rank.start.log_path
            if not failure_path(log).exists():
                write_failure(log, RankFailure(rank.start.number, HOST_LOST, reason, time=time.time()))
        for rank in running:
            rank.set_ended(_KILLED)
