"""The network between the hosts of a job: rank 0 asks one rank of each other host, which listens for it."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hetexp.hardware import link_probe
from hetexp.hardware.catalogue import Link

_TOKEN = 16


class ProbeServer:
    """Answers one client that measures the way to it; a thread does it.

    Args:
        address: of this host, to listen on.
    """

    def __init__(self, address: str) -> None:
        self.token = secrets.token_hex(_TOKEN // 2)
        """What the client must send first."""
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="probe", daemon=True).start()

    def close(self) -> None:
        """Stop to listen."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):  # the client has ended, or none came
            client, _ = self._listener.accept()
            with client:
                client.settimeout(link_probe.LIMIT_SECONDS)
                if link_probe.received(client, _TOKEN) == self.token.encode():
                    link_probe.answer(client)


def measured(address: str, port: int, token: str) -> Link:
    """Return latency and rate of the way to a `ProbeServer`.

    Raises:
        OSError: it does not answer.
    """
    with socket.create_connection((address, port), timeout=link_probe.LIMIT_SECONDS) as server:
        server.sendall(token.encode())
        return link_probe.measured(server)


def slowest(facts: Sequence[dict[str, Any]]) -> Link | None:
    """Return the slowest link from rank 0's host to the others'; `None` where all are on one.

    Args:
        facts: of every rank, with the `probe` of one rank of each host.

    Raises:
        OSError: a host does not answer.
    """
    others = {one["node"]: one for one in reversed(facts) if one["probe"] and one["node"] != facts[0]["node"]}
    return link_probe.slowest([measured(one["address"], *one["probe"]) for one in others.values()])
