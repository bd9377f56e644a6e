from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import postgres
import pytest

if TYPE_CHECKING:
    from hetexp.monitor.store import Store


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """A server's database, `None` for SQLite; it is there before the test, and so none of its processes."""
    if request.param == "sqlite":
        yield None
        return
    with postgres.server() as url:
        yield url


@pytest.fixture
def url(server: str | None, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind."""
    if server is None:
        yield f"sqlite:///{tmp_path / 'monitor.sqlite'}"
        return
    with postgres.schema(server, "hetexp_test") as url:
        yield url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    from hetexp.monitor.store import Store

    opened = Store(url)
    yield opened
    opened.close()
