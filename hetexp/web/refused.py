"""The answer to a refused request: always the same JSON, in the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_KEY = re.compile(r"`([^`]+)`")


class RefusedError(Exception):
    """A request is refused.

    Args:
        status: of HTTP.
        problems: key and sentence of each; the key is `None` if no part of the request is wrong.
    """

    def __init__(self, status: int, problems: Iterable[tuple[str | None, str]]) -> None:
        self.status, self.problems = status, list(problems)
        super().__init__("; ".join(message for _, message in self.problems))


def detail(problems: Iterable[tuple[str | None, str]]) -> dict[str, Any]:
    """Return the body of an answer that refuses."""
    return {"detail": [{"key": key, "message": message} for key, message in problems]}


def keyed(message: str) -> tuple[str | None, str]:
    """Return a sentence of the configuration's checks with the key that it names first."""
    key = _KEY.search(message)
    return (key[1] if key else None, message)
