"""Requests of the launcher to the ranks of a running training, and their answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hetexp.core.epoch import LATEST_REQUEST, Request, SignedStore, answer_key
from hetexp.launch.control import Answer


class Requests:
    """Sends numbered requests to the ranks, and passes each answer on once.

    Args:
        store: the launcher's connection to the store.
    """

    def __init__(self, store: SignedStore) -> None:
        self._store = store
        self._number = 0
        self._open: dict[int, Callable[[Answer], None]] = {}

    def send(self, name: str, argument: str = "", reply: Callable[[Answer], None] = lambda _: None) -> None:
        """Send a request to all ranks, which act after the same step.

        Args:
            reply: gets the answer of the first rank.
        """
        self._number += 1
        self._open[self._number] = reply
        self._store.write(Request.key(self._number), Request(self._number, name, argument).to_json())
        self._store.write(LATEST_REQUEST, str(self._number))

    def poll(self) -> None:
        """Pass new answers on."""
        for number in list(self._open):
            if (text := self._store.read(answer_key(number))) is not None:
                self._open.pop(number)(_answer(json.loads(text)))

    def close(self) -> None:
        """Answer all open requests: the run has ended."""
        for reply in self._open.values():
            reply(Answer(False, "The run has ended."))
        self._open.clear()


def _answer(facts: dict[str, Any]) -> Answer:
    """Return the first rank's answer in words."""
    if facts.get("error"):
        return Answer(False, str(facts["error"]))
    if facts.get("answer") is not None:
        return Answer(True, str(facts["answer"]))
    parts = [f"{name} {value}" for name, value in facts.items() if name != "done" and value is not None]
    return Answer(True, ", ".join(parts) or "done")
