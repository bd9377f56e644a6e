"""The leader's open port: every connection is unknown until it has proved that it knows the token."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hetexp.core.errors import SetupError, must_be
from hetexp.hosts.channel import Channel, Listener, RefusedError, WireError, close_socket, handshake_as_leader
from hetexp.hosts.checkpoint_transfer import send_folder
from hetexp.hosts.host_facts import HostFacts
from hetexp.hosts.newcomers import Newcomers
from hetexp.hosts.port_forward import relay
from hetexp.launch.processes.process import Start

MAX_UNPROVED, MAX_OF_ADDRESS = 16, 8
"""Connections at a time that have not proved themselves yet, and those of one address: of more, the oldest is
closed."""
IDLE_SECONDS = 3.0
"""Longest time without a greeting, which a machine sends at once."""
MAX_LOG_LINES = 1000
SILENCE_SECONDS = 60.0
"""Longest pause of a machine in reading a checkpoint."""
LOG = "cluster.log"


@dataclass
class JoinRequest:
    """A machine that has proved itself and reported its facts."""

    facts: HostFacts
    channel: Channel
    address: str
    clock: float
    """The leader's, in seconds since the epoch, when the facts arrived."""


class LeaderServer:
    """Listens at the leader's address only.

    Args:
        address: of this machine in the cluster.
        token: that both sides must know.
        answer_seconds: that the other side has to prove itself.
        folder: for the log of refusals.

    Raises:
        SetupError: the port cannot be opened there.
    """

    def __init__(self, address: str, port: int, token: bytes, answer_seconds: float, folder: Path) -> None:
        self._token, self._seconds, self._folder = token, answer_seconds, folder
        self._unproved = Newcomers(MAX_UNPROVED, MAX_OF_ADDRESS, self._drop)
        self._dropped: set[socket.socket] = set()
        self._requests: queue.SimpleQueue[JoinRequest] = queue.SimpleQueue()
        self._probes: queue.SimpleQueue[tuple[str, socket.socket]] = queue.SimpleQueue()
        self._stores: set[int] = set()
        self._folders: set[str] = set()
        self._lines = 0
        self.refusals: Counter[str] = Counter()
        """Address of each refused connection, with the reason."""
        try:
            self._listener = Listener((address, port), self._serve)
        except OSError as error:
            accepted = f"a port that this process may open at {address}"
            reason = error.strerror or str(error)
            raise SetupError(must_be("cluster.port", accepted, port, f"{reason}.")) from None
        self.close = self._listener.close
        """Close the port and its connections, except the control channels of machines."""

    def next_request(self, deadline: float, wakes: Callable[[], bool] = lambda: False) -> JoinRequest | None:
        """Return the next machine that wants to join; `None`: none came before the deadline.

        Args:
            wakes: asked now and then whether to stop waiting.
        """
        while True:
            left = deadline - time.monotonic()
            try:
                return self._requests.get(timeout=max(min(left, 0.2), 0.0))
            except queue.Empty:
                if left <= 0 or wakes():
                    return None

    def next_probe(self, name: str, seconds: float) -> socket.socket:
        """Return the connection to a machine over which the link to it is measured.

        Raises:
            OSError: none came in time.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                machine, connection = self._probes.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise TimeoutError("it did not answer in time") from None
            if machine == name:
                return connection
            close_socket(connection)

    def close_early(self) -> list[JoinRequest]:
        """Close the port; return the requests without an answer."""
        self.close()
        return [self._requests.get() for _ in range(self._requests.qsize())]

    def allow(self, start: Start) -> None:
        """Let machines reach what a rank needs: its store and its checkpoint."""
        self._stores.add(start.store_port)
        if start.checkpoint is not None:
            self._folders.add(start.checkpoint)

    def _serve(self, connection: socket.socket, peer: str) -> bool:
        """Do what a connection is for; return whether it stays open."""
        try:
            purpose, name, channel = self._prove(connection, peer)
            if purpose == "member":
                self._add_request(name, channel, peer)
            elif purpose == "probe":
                self._probes.put((name, connection))
            elif purpose == "files":
                self._send_files(channel)
            else:
                self._connect_to_store(channel)
            return purpose in ("member", "probe")
        except RefusedError as error:
            self._log_refusal(peer, str(error))
        except (WireError, OSError, UnicodeError) as error:
            self._log_refusal(peer, f"it does not speak as hetexp does ({error})")
        return False

    def _prove(self, connection: socket.socket, peer: str) -> tuple[str, str, Channel]:
        proved = partial(self._unproved.remove, connection)
        self._unproved.add(connection, peer)
        try:
            return handshake_as_leader(connection, self._token, self._seconds, IDLE_SECONDS, proved)
        except (WireError, OSError):
            if connection in self._dropped:
                raise RefusedError("it had not proved itself when newer connections came") from None
            raise
        finally:
            proved()
            self._dropped.discard(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._dropped.add(connection)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _add_request(self, name: str, channel: Channel, peer: str) -> None:
        facts = HostFacts.from_dict(channel.receive(time.monotonic() + self._seconds))
        if facts.name != name:
            raise WireError("two names")
        self._requests.put(JoinRequest(facts, channel, peer, time.time()))

    def _connect_to_store(self, channel: Channel) -> None:
        """Connect a rank of another machine to the store."""
        port = channel.receive(time.monotonic() + self._seconds).get("port")
        if not isinstance(port, int) or port not in self._stores:
            raise WireError(f"no store at port {port!r:.100}")
        store = socket.create_connection(("127.0.0.1", port), timeout=self._seconds)
        channel.send({"open": True})
        relay(channel.connection, store, self._listener.open)

    def _send_files(self, channel: Channel) -> None:
        """Send a checkpoint from which ranks of another machine resume."""
        folder = channel.receive(time.monotonic() + self._seconds).get("folder")
        if not isinstance(folder, str) or folder not in self._folders:
            raise WireError(f"no checkpoint {folder!r:.100}")
        channel.connection.settimeout(SILENCE_SECONDS)
        send_folder(channel, Path(folder))

    def _log_refusal(self, peer: str, why: str) -> None:
        self._lines += 1
        if self._lines <= MAX_LOG_LINES:
            self.refusals[f"{peer}: {why}"] += 1
            moment = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                with (self._folder / LOG).open("a", encoding="utf-8") as file:
                    file.write(f"{moment} refused {peer}: {why}\n")
