"""How often the process that checks configurations is asked; its answers are the integration test's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("fastapi", reason="the extra `dashboard` is not installed")

from hetexp.web import checker as module
from hetexp.web.checker import MOST_WAITING, Checker
from hetexp.web.refused import RefusedError


class Counted(Checker):
    """Answers by itself, and one question at a time, as the process does."""

    def __init__(self, problems: list[str] | None = None) -> None:
        super().__init__(Path.cwd(), {})
        self.asked: list[dict[str, Any]] = []
        self._problems = problems or []

    async def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(order)
        await asyncio.sleep(0)
        return {"problems": self._problems, "number": len(self.asked)}

    async def all(self, kind: Literal["check", "estimate"], *devices: str) -> list[Any]:
        asking = [self.ask(kind, ["a=1"], [device]) for device in devices]
        return list(await asyncio.gather(*asking, return_exceptions=True))


def test_one_question_is_answered_once() -> None:
    checker = Counted()

    async def scene() -> list[Any]:
        return [*await checker.all("estimate", *["cpu"] * 5, "cuda:0"), *await checker.all("estimate", "cpu")]

    numbers = [answer["number"] for answer in asyncio.run(scene())]
    assert numbers == [1] * 5 + [2, 1] and len(checker.asked) == 2


def test_what_a_training_starts_with_is_always_checked() -> None:
    checker = Counted()
    asyncio.run(checker.all("check", "cpu", "cpu"))
    assert len(checker.asked) == 2


def test_a_refusal_is_not_kept() -> None:
    checker = Counted(["`a` must be 2, but is 1 instead."])
    answers = asyncio.run(checker.all("estimate", "cpu", "cpu"))
    assert all(isinstance(answer, RefusedError) for answer in answers) and len(checker.asked) == 2


def test_an_estimate_grows_old(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = Counted()
    monkeypatch.setattr(module, "KEPT_SECONDS", 0.0)
    asyncio.run(checker.all("estimate", "cpu", "cpu"))
    assert len(checker.asked) == 2


def test_the_oldest_estimates_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = Counted()
    monkeypatch.setattr(module, "MOST_KEPT", 2)

    async def scene() -> None:
        for devices in ("abc", "c", "b", "a"):
            await checker.all("estimate", *devices)

    asyncio.run(scene())
    assert [order["gpu_ids"] for order in checker.asked] == [["a"], ["b"], ["c"], ["a"]]


def test_too_many_are_told_to_come_again() -> None:
    checker = Counted()
    devices = [f"cuda:{number}" for number in range(MOST_WAITING + 3)]
    answers = asyncio.run(checker.all("estimate", *devices))
    refused = [answer for answer in answers if isinstance(answer, RefusedError)]
    assert [one.status for one in refused] == [429] * 3
    assert len(checker.asked) == MOST_WAITING
