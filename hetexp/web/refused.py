"""The answer to a refused request: JSON of one form, with the messages of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_KEY = re.compile(r"`([^`]+)`")


class RefusedError(Exception):
    """A request is refused.

    Args:
        status: HTTP status of the answer.
        problems: key and message of each; the key is `None` if no part of the request is wrong.
    """

    def __init__(self, status: int, problems: Iterable[tuple[str | None, str]]) -> None:
        self.status, self.problems = status, list(problems)
        super().__init__("; ".join(message for _, message in self.problems))


def detail(problems: Iterable[tuple[str | None, str]]) -> dict[str, Any]:
    """Return the body of a refusal, in which half a character of a request is escaped."""
    return {
        "detail": [
            {"key": key, "message": message.encode(errors="backslashreplace").decode()}
            for key, message in problems
        ]
    }


def keyed(message: str) -> tuple[str | None, str]:
    """Return the first key that a message names, and the message."""
    key = _KEY.search(message)
    return (key[1] if key else None, message)
