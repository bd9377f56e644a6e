"""The leader's open port: who comes is a stranger until it has proved that it knows the token."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetexp.cluster.facts import HostFacts
from hetexp.cluster.files import send_folder
from hetexp.cluster.forward import join_both
from hetexp.cluster.wire import Channel, RefusedError, WireError, accepted, answer_stranger, shut
from hetexp.core.errors import SetupError, must_be
from hetexp.launch.processes.process import Start

MOST_STRANGERS = 16
"""Connections at a time that have not proved themselves yet; more are closed at once."""
MOST_LINES = 1000
"""Lines of the file that refusals are written to."""
SILENCE_SECONDS = 60.0
"""Longest that a machine which is sent a checkpoint may take nothing of it."""
LOG = "cluster.log"


@dataclass
class Arrival:
    """A machine that has proved itself and said what it brings."""

    facts: HostFacts
    channel: Channel
    address: str
    clock: float
    """The leader's, in seconds since the epoch, when that arrived."""


class Gate:
    """Listens at the leader's address, and nowhere else.

    Args:
        address: of this machine in the cluster.
        token: that strangers must know.
        answer_seconds: that a stranger gets to prove itself.
        folder: where refusals are written down.

    Raises:
        SetupError: the port cannot be opened there.
    """

    def __init__(self, address: str, port: int, token: bytes, answer_seconds: float, folder: Path) -> None:
        self._token, self._seconds, self._folder = token, answer_seconds, folder
        self._listener = _listen(address, port)
        self.port = port
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._arrived = threading.Condition()
        self._arrivals: list[Arrival] = []
        self._stores: set[int] = set()
        self._folders: set[str] = set()
        self._probes: queue.SimpleQueue[tuple[str, socket.socket]] = queue.SimpleQueue()
        self._open: set[socket.socket] = set()
        self._lines = 0
        self.refusals: Counter[str] = Counter()
        """Address and reason of those that were refused."""
        self._thread = threading.Thread(target=self._accept, name="gate", daemon=True)
        self._thread.start()

    def next_arrival(self, deadline: float, wakes: Callable[[], bool] = lambda: False) -> Arrival | None:
        """Return the next machine that has come; `None`: none came until the deadline.

        Args:
            wakes: asked now and then whether to stop waiting.
        """
        with self._arrived:
            while not self._arrivals:
                left = deadline - time.monotonic()
                if left <= 0 or wakes():
                    return None
                self._arrived.wait(min(left, 0.2))
            return self._arrivals.pop(0)

    def next_probe(self, name: str, seconds: float) -> socket.socket:
        """Return the connection over which a machine lets the way to it be measured.

        Raises:
            OSError: none came in time.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                one, connection = self._probes.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise TimeoutError("it did not answer in time") from None
            if one == name:
                return connection
            shut(connection)

    def shut_out(self) -> list[Arrival]:
        """Let no more machines in; return those that came but were not taken, so that they learn why."""
        self.close()
        with self._arrived:
            left, self._arrivals = self._arrivals, []
        return left

    def serve(self, start: Start) -> None:
        """Let machines that have proved themselves reach what a rank needs: its store, and its checkpoint."""
        self._stores.add(start.store_port)
        if start.checkpoint is not None:
            self._folders.add(start.checkpoint)

    def close(self) -> None:
        """Close the port and all that came through it but the machines' own channels."""
        shut(self._listener)
        self._thread.join()
        for connection in list(self._open):
            shut(connection)

    def _accept(self) -> None:
        for connection, peer in accepted(self._listener):
            if not self._strangers.acquire(blocking=False):
                self._refused(peer, f"more than {MOST_STRANGERS} connections at a time are not answered")
                connection.close()
                continue
            self._open.add(connection)
            threading.Thread(target=self._meet, args=(connection, peer), name="stranger", daemon=True).start()

    def _meet(self, connection: socket.socket, peer: str) -> None:
        kept = False
        try:
            purpose, name, channel = self._prove(connection, peer)
            if purpose == "member":
                kept = self._take_member(name, channel, peer)
            elif purpose == "probe":
                kept = True
                self._probes.put((name, connection))
            elif purpose == "files":
                self._send_files(channel)
            else:
                self._take_store(channel)
        except RefusedError as error:
            self._refused(peer, str(error))
        except (WireError, OSError, UnicodeError) as error:
            self._refused(peer, f"it does not speak as hetexp does ({error})")
        finally:
            self._open.discard(connection)
            if not kept:
                shut(connection)

    def _prove(self, connection: socket.socket, peer: str) -> tuple[str, str, Channel]:
        try:
            return answer_stranger(connection, self._token, self._seconds)
        finally:
            self._strangers.release()

    def _take_member(self, name: str, channel: Channel, peer: str) -> bool:
        facts = HostFacts.from_dict(channel.receive(time.monotonic() + self._seconds))
        if facts.name != name:
            raise WireError("two names")
        with self._arrived:
            self._arrivals.append(Arrival(facts, channel, peer, time.time()))
            self._arrived.notify_all()
        return True

    def _take_store(self, channel: Channel) -> None:
        """Join a connection of another machine's rank with the store."""
        port = channel.receive(time.monotonic() + self._seconds).get("port")
        if port not in self._stores:
            raise WireError(f"no store at port {port}")
        store = socket.create_connection(("127.0.0.1", port), timeout=self._seconds)
        channel.send({"open": True})
        self._open.add(store)
        try:
            join_both(channel.connection, store)
        finally:
            self._open.discard(store)

    def _send_files(self, channel: Channel) -> None:
        """Send a checkpoint that another machine's ranks go on from."""
        folder = channel.receive(time.monotonic() + self._seconds).get("folder")
        if folder not in self._folders:
            raise WireError(f"no checkpoint {folder!r}")
        channel.connection.settimeout(SILENCE_SECONDS)
        send_folder(channel, Path(str(folder)))

    def _refused(self, peer: str, why: str) -> None:
        self.refusals[f"{peer}: {why}"] += 1
        self._lines += 1
        if self._lines <= MOST_LINES:
            moment = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                with (self._folder / LOG).open("a", encoding="utf-8") as file:
                    file.write(f"{moment} refused {peer}: {why}\n")


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(MOST_STRANGERS)
    except OSError as error:
        listener.close()
        accepted = f"a port that this process may open at {address}"
        reason = error.strerror or str(error)
        raise SetupError(must_be("cluster.port", accepted, port, f"{reason}.")) from None
    return listener
