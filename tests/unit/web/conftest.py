"""A dashboard without its threads, asked by a client in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")
httpx = pytest.importorskip("httpx", reason="the extra `dashboard` is not installed")

Client = Callable[..., Any]


class Answers:
    """Stands for the process that checks configurations."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.answer: dict[str, Any] = {"strategy": "ddp", "balancing": "auto", "name": None, "emulated": True}
        self.answer |= {"effective_batch_size": 8, "per_device": [], "recommended": [], "notes": []}
        self.answer |= {"predicted_step_seconds": None, "problem": None}

    def warm(self) -> None: ...

    async def ask(self, kind: str, words: Sequence[str], gpu_ids: Sequence[str]) -> dict[str, Any]:
        self.asked.append((kind, list(words)))
        return self.answer

    async def close(self) -> None: ...


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'lab.sqlite'}"


@pytest.fixture
def dashboard(tmp_path: Path, url: str, answers: Answers) -> Iterator[Any]:
    """One for this machine alone; `access` may be replaced before `ask` is used."""
    from hetexp.core.config import MonitorConfig
    from hetexp.web.access import Access
    from hetexp.web.server import Dashboard

    made = Dashboard(MonitorConfig(url=url), Access(), tmp_path)
    made.checker = answers  # type: ignore[assignment]
    yield made
    made.store.close()


@pytest.fixture
def ask(dashboard: Any) -> Client:
    """Send one request and return its answer."""
    import asyncio

    from hetexp.web.server import make_app

    def send(method: str, path: str, **given: Any) -> Any:
        async def answer() -> Any:
            transport = httpx.ASGITransport(make_app(dashboard))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8765") as client:
                return await client.request(method, path, **given)

        return asyncio.run(answer())

    return send
