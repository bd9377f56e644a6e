"""The checks of host names, origins, tokens and sizes, before the application sees a request.

A browser sends a page's requests to any address that the page names. So the server answers only to its own
names (another name that resolves to this machine is refused: DNS rebinding), lets only its own pages change
anything or open a WebSocket (`Origin`), and takes only JSON, which no HTML form sends.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hetexp.core.errors import ConfigError, must_be
from hetexp.web.refused import detail

MOST_BYTES = 64 * 1024
"""Largest body of a request."""
LEAST_TOKEN = 16
"""Fewest characters of a token."""
PREFIX = "/api/"
OPEN_PATHS = ("/api/v1/session",)
"""Paths of the API that can be read without a token; this one says whether the server needs a token."""
COOKIE = "hetexp_reports"
"""Cookie for reports, which are links and carry no header."""
REPORT = re.compile(r"/api/v1/trainings/[^/]+/report")
PAGE_POLICY = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'"
)
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'; sandbox allow-scripts allow-downloads"
)
"""A report has its styles and scripts inside; the sandbox keeps them from this server's API."""
_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Access:
    """Who may use the server.

    Raises:
        ConfigError: another machine could reach the server without a token, or the token is too short.
    """

    host: str = "127.0.0.1"
    token: str | None = None
    names: tuple[str, ...] = ()
    """Further names of this machine, such as a proxy's."""
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    """Secret key of the cookie, new at each start."""

    def __post_init__(self) -> None:
        problems = []
        if self.token is None and not self.loopback:
            problems.append(
                f"`--token` must be given with --host {self.host}, which other machines reach, but is "
                "missing. Set HETEXP_DASHBOARD_TOKEN to what "
                "`python -c 'import secrets; print(secrets.token_urlsafe())'` prints, or keep the server on "
                "127.0.0.1, and reach it with ssh -L 8765:127.0.0.1:8765."
            )
        if self.token is not None and (len(self.token) < LEAST_TOKEN or not self.token.isascii()):
            problems.append(
                f"`--token` must be at least {LEAST_TOKEN} ASCII characters, "
                f"but has {len(self.token)} instead."
            )
        if problems:
            raise ConfigError(problems)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in _LOOPBACK

    @property
    def cookie(self) -> str:
        """The value that opens reports."""
        return hmac.new(self.session.encode(), (self.token or "").encode(), hashlib.sha256).hexdigest()

    def knows(self, token: object) -> bool:
        """Return whether this is the token, by a comparison in constant time."""
        if self.token is None:
            return True
        given = token if isinstance(token, str) else ""
        return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self.token.encode())

    def host_problem(self, host: str | None) -> str | None:
        """Return the problem of a request's `Host`, `None` if it names this server."""
        name = _name_of(host)
        if name is not None and (name in self._own_names() or (not self.loopback and _is_address(name))):
            return None
        accepted = f"a name of this server ({', '.join(self._own_names())})"
        return must_be("Host", accepted, host, "hetexp dashboard --name adds a name.")

    def origin_problem(self, headers: Mapping[str, str]) -> str | None:
        """Return the problem of a request's origin, `None` if it is allowed; only browsers send an origin."""
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site", "none")
        if origin is None and site in ("none", "same-origin"):
            return None
        parts = urlsplit(origin or "")
        if parts.scheme in ("http", "https") and parts.netloc.lower() == headers.get("host", "").lower():
            return None
        return must_be("Origin", f"this server's own page ({headers.get('host')})", origin or site)

    def _own_names(self) -> list[str]:
        names = [] if self.host in ("0.0.0.0", "::") else [self.host.lower()]
        if not self.loopback:
            names.append(socket.gethostname().lower())
        return list(dict.fromkeys([*_LOOPBACK, *names, *(name.lower() for name in self.names)]))


class Guard:
    """Checks each request by `Access` before the application, and adds security headers to each answer."""

    def __init__(self, app: Any, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request or WebSocket."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def answered(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _with_headers(message.get("headers", []))}
            await send(message)

        refused = self._refused(scope, _headers(scope))
        if refused is None:
            receive, whole = await _bounded(receive) if _has_body(scope) else (receive, True)
            refused = None if whole else (413, "body", f"`body` must have at most {MOST_BYTES} bytes.")
        if refused is None:
            await self._app(scope, receive, answered)
            return
        status, key, message = refused
        body = json.dumps(detail([(key, message)])).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await answered({"type": "http.response.start", "status": status, "headers": headers})
        await answered({"type": "http.response.body", "body": body})

    async def _websocket(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = _headers(scope)
        if self._access.host_problem(headers.get("host")) or self._access.origin_problem(headers):
            await receive()
            await send({"type": "websocket.close", "code": 4403})
            return
        await self._app(scope, receive, send)

    def _refused(self, scope: dict[str, Any], headers: dict[str, str]) -> tuple[int, str | None, str] | None:
        access, method, path = self._access, scope["method"], scope["path"]
        problem = access.host_problem(headers.get("host"))
        if problem is not None:
            return 421, "Host", problem
        if method in _CHANGING:
            problem = access.origin_problem(headers)
            if problem is not None:
                return 403, "Origin", problem
        if path.startswith(PREFIX) and not self._authorized(method, path, headers):
            fix = "hetexp dashboard was started with it."
            return 401, "Authorization", f"`Authorization` must be Bearer and the server's token. {fix}"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return 413, "Content-Length", must_be("Content-Length", f"at most {MOST_BYTES}", length)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method in ("POST", "PUT", "PATCH") and kind != "application/json":
            return 415, "Content-Type", must_be("Content-Type", "application/json", kind or None)
        return None

    def _authorized(self, method: str, path: str, headers: dict[str, str]) -> bool:
        access = self._access
        if access.token is None or (method in ("GET", "HEAD") and path in OPEN_PATHS):
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and access.knows(token.strip()):
            return True
        if method not in ("GET", "HEAD") or not REPORT.fullmatch(path):
            return False
        pairs = [pair.strip().partition("=") for pair in headers.get("cookie", "").split(";")]
        given = next((value for name, _, value in pairs if name == COOKIE), "")
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), access.cookie.encode())


def _has_body(scope: dict[str, Any]) -> bool:
    names = {name for name, _ in scope["headers"]}
    return b"content-length" in names or b"transfer-encoding" in names


async def _bounded(receive: Any) -> tuple[Any, bool]:
    """Read a whole body, up to the limit.

    Returns:
        A function that gives the body to the application, and whether the body is whole, neither too
        long nor broken off.
    """
    parts: list[bytes] = []
    size, message = 0, {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        if message["type"] != "http.request":
            return receive, False
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BYTES:
            return receive, False
    delivered = False

    async def whole() -> Any:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return {"type": "http.request", "body": b"".join(parts), "more_body": False}

    return whole, True


def _headers(scope: dict[str, Any]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _with_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers with the security headers that it lacks."""
    own = list(headers)
    present = {name.lower() for name, _ in own}
    security = {**_HEADERS, "content-security-policy": PAGE_POLICY}
    return own + [(k.encode(), v.encode()) for k, v in security.items() if k.encode() not in present]


def _name_of(host: str | None) -> str | None:
    """Return the name in a `Host` header, without the port."""
    if not host or any(sign in host for sign in "/@?#\\ "):
        return None
    with contextlib.suppress(ValueError):
        parts = urlsplit(f"//{host}")
        _ = parts.port  # a wrong port raises
        return parts.hostname.lower() if parts.hostname else None
    return None


def _is_address(name: str) -> bool:
    """Return whether this is an IP address, which no foreign name can be."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
