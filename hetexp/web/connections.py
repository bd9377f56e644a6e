"""HTTP connections that bring no whole request for long, or too many at a time, are closed.

uvicorn has no limit of its own for either. Others get in all the same: of too many the oldest goes.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hetexp.hosts.newcomers import Newcomers

REQUEST_SECONDS = 10.0
"""Longest time until a request has come, headers and body."""
MOST_WAITING, MOST_OF_ADDRESS = 600, 512
"""Connections whose request has not come, together with `hetexp.web.live.MOST_CLIENTS` below the limit of
uvicorn; people share an address, as behind a proxy, and browsers open a few connections in advance."""


class Connection(H11Protocol):
    """uvicorn's connection, with these limits."""

    waiting: Newcomers[Connection] = Newcomers(
        MOST_WAITING, MOST_OF_ADDRESS, lambda oldest: oldest.refuse(HTTPStatus.SERVICE_UNAVAILABLE)
    )
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._note()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def refuse(self, status: HTTPStatus) -> None:
        """Close the connection, with this status unless an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [("content-length", "0"), ("connection", "close")]
            reason = status.phrase.encode()
            for event in (
                h11.Response(status_code=status, headers=headers, reason=reason),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _note(self) -> None:
        """Begin to wait for a request, or end the wait as soon as it has come, or has opened a WebSocket."""
        opened = self.transport.get_protocol() is not self
        if opened or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._end_wait()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_SECONDS, self.refuse, HTTPStatus.REQUEST_TIMEOUT)
            self.waiting.add(self, self.client[0] if self.client is not None else "")

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.waiting.remove(self)
