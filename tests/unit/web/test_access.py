"""Who may ask: names, origins, tokens, sizes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hetexp.core.errors import ConfigError

pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")

from hetexp.web.access import MOST_BYTES, Access, Guard

TOKEN = "correct-horse-battery"
BODY = {"gpu_ids": ["cpu"]}


def test_other_machines_need_a_token() -> None:
    with pytest.raises(ConfigError, match="`--token` must be given with --host 0.0.0.0"):
        Access("0.0.0.0")
    with pytest.raises(ConfigError, match="at least 16"):
        Access("0.0.0.0", "short")
    assert Access("0.0.0.0", TOKEN).knows(TOKEN)


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost", "LOCALHOST:1", "[::1]:8765"])
def test_own_names_are_answered(ask: Any, host: str) -> None:
    assert ask("GET", "/api/v1/session", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", "localhost@evil", "a b", ""]
)
def test_other_names_are_refused(ask: Any, host: str) -> None:
    answer = ask("GET", "/api/v1/session", headers={"host": host})
    assert answer.status_code == 421
    assert answer.json()["detail"][0]["key"] == "Host"


def test_addresses_and_given_names_are_answered_where_others_may_ask(dashboard: Any, ask: Any) -> None:
    dashboard.access = Access("0.0.0.0", TOKEN, ("lab.example.org",))
    codes = {
        host: ask("GET", "/api/v1/session", headers={"host": host}).status_code
        for host in ("lab.example.org:8765", "192.168.1.7:8765", "rebound.example")
    }
    assert codes == {"lab.example.org:8765": 200, "192.168.1.7:8765": 200, "rebound.example": 421}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 201),
        ({"origin": "http://127.0.0.1:8765"}, 201),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://evil-127.0.0.1:8765"}, 403),
        ({"origin": "http://evil.127.0.0.1:8765"}, 403),
        ({"origin": "http://127.0.0.1:8765.evil.example"}, 403),
        ({"origin": "http://evil@127.0.0.1:8765"}, 403),
        ({"origin": "ftp://127.0.0.1:8765"}, 403),
        ({"origin": "127.0.0.1:8765"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_only_own_pages_start_trainings(ask: Any, headers: dict[str, str], code: int) -> None:
    assert ask("POST", "/api/v1/trainings", json=BODY, headers=headers).status_code == code


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_forms_are_refused(ask: Any, kind: str) -> None:
    answer = ask("POST", "/api/v1/trainings", content=b'{"gpu_ids":["cpu"]}', headers={"content-type": kind})
    assert answer.status_code == 415


def test_large_bodies_are_refused(ask: Any) -> None:
    large = b'{"gpu_ids":["' + b"x" * MOST_BYTES + b'"]}'
    headers = {"content-type": "application/json"}
    assert ask("POST", "/api/v1/trainings", content=large, headers=headers).status_code == 413

    async def pieces() -> Any:
        for _ in range(MOST_BYTES // 1024 + 1):
            yield b"x" * 1024

    assert ask("POST", "/api/v1/trainings", content=pieces(), headers=headers).status_code == 413


def test_a_body_that_breaks_off_reaches_no_handler() -> None:
    called = []
    parts = [{"type": "http.request", "body": b'{"gpu_ids":["cpu"]}', "more_body": True}]
    parts += [{"type": "http.disconnect"}]

    async def app(*_: Any) -> None:
        called.append(True)

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    async def send(_: dict[str, Any]) -> None: ...

    headers = {"host": "localhost", "content-type": "application/json", "content-length": "1000"}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/trainings", "headers": raw}
    asyncio.run(Guard(app, Access())(scope, receive, send))
    assert not called and not parts


def test_the_api_needs_the_token_where_there_is_one(dashboard: Any, ask: Any) -> None:
    dashboard.access = Access(token=TOKEN)
    right = {"authorization": f"Bearer {TOKEN}"}
    assert ask("GET", "/api/v1/session").json() == {"token_required": True}
    paths = ("/api/v1/trainings", "/api/v1/system/gpus", "/api/v1/openapi.json", "/api/v1/options")
    encoded = ("/%61pi/v1/trainings", "/api%2fv1/trainings", "/api/./v1/trainings")
    for path in (*paths, *encoded):
        refused = ask("GET", path)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in refused.text
    near = (TOKEN[:16], TOKEN[:-1], f"{TOKEN[:-1]}z", f"x{TOKEN[1:]}", f"{TOKEN}x", TOKEN.upper())
    wrong_ones = ("Bearer", "Bearer nearly-the-right-one", f"Basic {TOKEN}", TOKEN, "Bearer \xe9")
    for wrong in (*wrong_ones, *(f"Bearer {one}" for one in near)):
        headers = {"authorization": wrong.encode("latin-1")}
        assert ask("GET", "/api/v1/trainings", headers=headers).status_code == 401
    assert ask("GET", "/api/v1/trainings", headers=right).status_code == 200
    assert ask("GET", f"/api/v1/trainings?token={TOKEN}").status_code == 401


def test_the_cookie_opens_reports_only(dashboard: Any, ask: Any) -> None:
    dashboard.access = Access(token=TOKEN)
    opened = ask("POST", "/api/v1/session", json={}, headers={"authorization": f"Bearer {TOKEN}"})
    cookie = opened.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
    headers = {"cookie": cookie.partition(";")[0]}
    assert ask("GET", "/api/v1/trainings/unknown/report", headers=headers).status_code == 404
    assert ask("GET", "/api/v1/trainings/unknown/report").status_code == 401
    assert ask("GET", "/api/v1/trainings/unknown", headers=headers).status_code == 401
    assert ask("DELETE", "/api/v1/trainings/unknown", headers=headers).status_code == 401


def test_browsers_are_told_what_they_may_do(ask: Any) -> None:
    for path in ("/api/v1/session", "/api/v1/nothing", "/elsewhere"):
        headers = ask("GET", path).headers
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


@pytest.mark.parametrize(
    ("headers", "reached"),
    [
        ({"host": "localhost"}, True),
        ({"host": "localhost", "origin": "http://localhost"}, True),
        ({"host": "localhost", "origin": "http://evil.example"}, False),
        ({"host": "evil.example", "origin": "http://evil.example"}, False),
    ],
)
def test_websockets_are_for_own_pages(headers: dict[str, str], reached: bool) -> None:
    called, sent = [], []

    async def app(*_: Any) -> None:
        called.append(True)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Guard(app, Access())({"type": "websocket", "headers": raw}, receive, send))
    assert bool(called) == reached
    assert sent == ([] if reached else [{"type": "websocket.close", "code": 4403}])
