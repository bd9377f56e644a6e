"""Sends every sample and every change of a training to all open WebSockets.

Each client has its own queue. A client whose queue is full is dropped, so that no sender waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from hetexp.core.errors import logged
from hetexp.web.access import Access

MOST_CLIENTS = 500
MOST_BEHIND = 120
"""Longest queue of a client: two minutes of samples at one a second."""
TOKEN_SECONDS = 5.0
WRONG_TOKEN, TOO_SLOW = 4401, 1013
_LOG = logging.getLogger(__name__)


class Hub:
    """All open WebSockets."""

    def __init__(self) -> None:
        self._clients: set[_Client] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closing = False

    def bind(self) -> None:
        """Store the running loop, through which other threads send."""
        self._loop = asyncio.get_running_loop()

    def broadcast(self, message: dict[str, Any]) -> None:
        """Send a message to all clients, from any thread."""
        if self._loop is None or self.closing:
            return
        text = json.dumps(message, allow_nan=False)
        with contextlib.suppress(RuntimeError):  # the loop has just ended
            self._loop.call_soon_threadsafe(self._put, text)

    def close(self) -> None:
        """Close every WebSocket."""
        self.closing = True
        for client in self._clients:
            client.dropped.set()

    def _put(self, text: str) -> None:
        for client in self._clients:
            client.put(text)

    async def serve(
        self, socket: WebSocket, access: Access, first: Callable[[], list[dict[str, Any]]]
    ) -> None:
        """Serve a client until it leaves, or is too slow.

        Args:
            first: function that returns the first messages of a client.
        """
        await socket.accept()
        if not await _knows_token(socket, access):
            await socket.close(WRONG_TOKEN)
            return
        if self.closing or len(self._clients) >= MOST_CLIENTS:
            await socket.close(TOO_SLOW)
            return
        client = _Client()
        self._clients.add(client)
        tasks: list[asyncio.Task[Any]] = []
        try:
            for message in await asyncio.to_thread(first):
                client.put(json.dumps(message, allow_nan=False))
            endless = (_send(client, socket), _until_gone(socket), client.dropped.wait())
            tasks = [asyncio.create_task(coroutine) for coroutine in endless]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._clients.discard(client)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with logged("a client was gone before its connection was closed"):
                await asyncio.wait_for(socket.close(TOO_SLOW), 1.0)


class _Client:
    """The messages that a client has not received yet."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str] = asyncio.Queue(MOST_BEHIND)
        self.dropped = asyncio.Event()

    def put(self, text: str) -> None:
        """Queue a message; drop the client if it is too far behind."""
        try:
            self.queue.put_nowait(text)
        except asyncio.QueueFull:
            self.dropped.set()


async def _send(client: _Client, socket: WebSocket) -> None:
    while True:
        await socket.send_text(await client.queue.get())


async def _until_gone(socket: WebSocket) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        while True:
            await socket.receive_text()


async def _knows_token(socket: WebSocket, access: Access) -> bool:
    """Return whether a client's first message has the token; an address with it would appear in logs."""
    if access.token is None:
        return True
    try:
        message = json.loads(await asyncio.wait_for(socket.receive_text(), TOKEN_SECONDS))
    except (ValueError, KeyError, RecursionError):
        _LOG.warning("A WebSocket was closed: its first message must be JSON with the token, but is not.")
        return False
    except (WebSocketDisconnect, asyncio.TimeoutError):
        return False
    return isinstance(message, dict) and access.knows(message.get("token"))
