"""A machine that has joined, as the leader's launcher sees it: it starts ranks there and hears of them."""

from __future__ import annotations

import base64
import binascii
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetexp.cluster.wire import Channel, WireError
from hetexp.launch.processes.failure import RankFailure, failure_path, stack_path, write_failure
from hetexp.launch.processes.hosts import Host
from hetexp.launch.processes.process import Elsewhere, Start

BEATS = 5
"""Signs of life within `cluster.silence_seconds`."""
HOST_LOST = "HostLost"
"""Kind of the failure of every rank of a machine that is gone."""
MOST_FILE_BYTES = 256 * 2**20
"""Most that one rank's log may grow by what another machine sends."""
_KILLED = -int(signal.SIGKILL) if hasattr(signal, "SIGKILL") else -9


class RemoteRank(Elsewhere):
    """A rank of another machine; its files are kept here as they arrive."""

    def __init__(self, host: JoinedHost, key: int, start: Start) -> None:
        self._host, self.key, self.start = host, key, start
        self._code: int | None = None
        self._bytes = 0
        self._ended = threading.Event()
        self._sentinel, self._open = os.pipe()

    @property
    def sentinel(self) -> int | None:
        return self._sentinel if self._sentinel >= 0 else None

    def poll(self) -> int | None:
        if self._ended.is_set() and self._sentinel >= 0:
            os.close(self._sentinel)
            self._sentinel = -1
        return self._code

    def wait(self, timeout_seconds: float) -> None:
        self._ended.wait(timeout_seconds)
        self.poll()

    def send(self, number: signal.Signals, group: bool) -> None:
        if not self._ended.is_set():
            self._host.send({"op": "signal", "key": self.key, "number": int(number), "group": group})

    def ended(self, code: int) -> None:
        """Note how it has ended; whoever waits for it wakes up."""
        if not self._ended.is_set():
            self._code = code
            self._ended.set()
            os.close(self._open)

    def take(self, kind: str, data: bytes) -> None:
        """Keep what it has written."""
        log = self.start.log_path
        paths = {"log": log, "stack": stack_path(log), "failure": failure_path(log)}
        if kind not in paths:
            raise WireError(f"a file of the kind {kind!r}")
        self._bytes += len(data)
        if self._bytes <= MOST_FILE_BYTES:
            with paths[kind].open("ab") as file:
                file.write(data)


class JoinedHost(Host):
    """A machine that has joined.

    Args:
        name: of the machine.
        address: by which it came, for people.
        channel: to its launcher.
        silence_seconds: longest silence before it counts as lost.
        tell: shows a line to the person.
        serves: called with each start, so that the rank there reaches what it needs of this machine.
        returns: waits for the machine to join again, until it is asked to stop; its new connection.
    """

    def __init__(
        self,
        name: str,
        address: str,
        channel: Channel,
        silence_seconds: float,
        tell: Callable[[str], None],
        serves: Callable[[Start], None],
        returns: Callable[[Callable[[], bool]], Channel | None],
    ) -> None:
        self.name, self.address = name, address
        self._silence, self._tell, self._serves, self._returns = silence_seconds, tell, serves, returns
        self._next = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.lost_because: str | None = None
        """Why it is gone; `None` while it is there, and after a run's end."""
        self._begin(channel)

    def _begin(self, channel: Channel) -> None:
        """Hear the machine over a connection on which nothing has been started yet."""
        for thread in self._threads:
            thread.join(5.0)
        self._channel = channel
        self._ranks: dict[int, RemoteRank] = {}
        self._closed = threading.Event()
        self.lost_because = None
        channel.connection.settimeout(self._silence)
        self._threads = [
            threading.Thread(target=one, name=f"host {self.name}", daemon=True)
            for one in (self._hear, self._beat)
        ]
        for thread in self._threads:
            thread.start()

    def comes_back(self, wakes: Callable[[], bool]) -> bool:
        if self.lost_because is None:
            return True
        channel = self._returns(wakes)
        if channel is None:
            return False
        self._begin(channel)
        return True

    def start(self, start: Start, method: str) -> RemoteRank:
        """Start a rank there.

        Raises:
            OSError: the machine is gone.
        """
        plan = start.plan_path.read_text(encoding="utf-8")
        self._serves(start)
        with self._lock:
            if self.lost_because is not None:
                raise OSError(f"{self.name} {self.lost_because}")
            self._next += 1
            rank = self._ranks[self._next] = RemoteRank(self, self._next, start)
        start.log_path.touch()
        self.send(
            {
                "op": "start",
                "key": rank.key,
                "rank": start.rank,
                "member": start.member,
                "plan": plan,
                "method": method,
            }
        )
        return rank

    def send(self, message: dict[str, Any]) -> None:
        """Send an order; where the machine is gone nothing comes of it."""
        try:
            self._channel.send(message)
        except OSError as error:
            self._lose(f"takes no orders any more ({_reason(error)})")

    def end(self, code: int, text: str) -> None:
        """Let its launcher end, and tell it why."""
        if self.lost_because is None:
            self._closed.set()
            self.send({"op": "end", "code": code, "text": text})
            self._threads[0].join(5.0)  # it hangs up once it has heard
        self._closed.set()
        self._channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)

    def _beat(self) -> None:
        while not self._closed.wait(self._silence / BEATS):
            self.send({"op": "beat"})

    def _hear(self) -> None:
        try:
            while True:
                self._take(self._channel.receive(time.monotonic() + self._silence))
        except TimeoutError:
            self._lose(f"gave no sign of life for {self._silence:g} s (cluster.silence_seconds)")
        except OSError as error:
            self._lose(f"closed its connection ({_reason(error)})")
        except (WireError, KeyError, TypeError, ValueError, binascii.Error) as error:
            self._lose(f"sent what it should not ({error})")

    def _take(self, message: dict[str, Any]) -> None:
        operation = message["op"]
        if operation == "beat":
            return
        rank = self._ranks[int(message["key"])]
        if operation == "file":
            rank.take(str(message["kind"]), base64.b64decode(message["data"], validate=True))
        elif operation == "exit":
            rank.ended(int(message["code"]))
        else:
            raise WireError(f"an answer named {operation!r}")

    def _lose(self, why: str) -> None:
        with self._lock:
            if self.lost_because is not None:
                return
            self.lost_because = why
        reason = f"{self.name} ({self.address}) {why}"
        expected = self._closed.is_set()
        self._closed.set()
        self._channel.close()
        running = [rank for rank in self._ranks.values() if rank.poll() is None]
        if not expected:
            self._tell(f"{reason}.")
        for rank in running:
            _leave_word(rank.start.log_path, rank.start.number, reason)
        for rank in running:
            rank.ended(_KILLED)


def _leave_word(log_path: Path, number: int, reason: str) -> None:
    if not failure_path(log_path).exists():
        write_failure(log_path, RankFailure(number, HOST_LOST, f"{reason}.", time=time.time()))


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
