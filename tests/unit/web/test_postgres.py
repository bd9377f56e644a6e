"""The addresses with PostgreSQL behind them: what is shown, queued, stopped and forgotten is the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import postgres
import pytest

pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")

from hetexp.monitor.sample import Device, Sample, User, host_name

HERE = host_name()
CARDS = [Device(f"{HERE}/{n}", HERE, f"cuda:{n}", n, "T4", "nvidia", "cuda") for n in range(2)]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """It is there before the test, and so none of its processes."""
    with postgres.server() as url:
        yield url


@pytest.fixture
def url(server: str) -> Iterator[str]:
    with postgres.schema(server, "hetexp_web") as url:
        yield url


def test_everything_the_page_does(dashboard: Any, ask: Any) -> None:
    now = time.time()
    for second in range(60):
        both = [Sample(card, utilisation=0.5 * n, users=(User("r", n),)) for n, card in enumerate(CARDS)]
        dashboard.store.write(both, now - second)
    assert [one["id"] for one in ask("GET", "/api/v1/system/gpus").json()["devices"]] == ["cuda:0", "cuda:1"]
    (both,) = ask("GET", "/api/v1/system/metrics?since=3600").json()["series"]
    assert set(both["utilisation"]) == {0.25}
    each = ask("GET", "/api/v1/system/metrics?view=per_gpu&since=2592000").json()["series"]
    assert {one["device"]: set(one["utilisation"]) for one in each} == {"cuda:0": {0.0}, "cuda:1": {0.5}}

    body = {"gpu_ids": ["emulated:t4"], "overrides": {"trainer.max_steps": 3}}
    started = ask("POST", "/api/v1/trainings", json=body).json()
    assert (started["state"], started["gpu_ids"]) == ("pending", ["emulated:t4"])
    one = f"/api/v1/trainings/{started['id']}"
    assert ask("GET", one).json()["overrides"] == body["overrides"]
    assert ask("POST", f"{one}/stop", json={}).json()["state"] == "stopped"
    assert len(ask("GET", "/api/v1/trainings?state=stopped").json()["trainings"]) == 1
    assert ask("DELETE", one).status_code == 204
    assert ask("GET", "/api/v1/trainings").json() == {"trainings": []}
