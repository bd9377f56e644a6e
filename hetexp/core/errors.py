"""The errors of hetexp, and their grammar.

A `ConfigError` is fixed in the configuration, a `SetupError` on the machine, and a `UsageError` in the user's
script. An error of another class than those here is a bug.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence

_PASSWORD = re.compile(
    r"(?<=://)([^\s:/@]*:)[^\s@]*(?=@)|([?&][^\s=&]*(?:pass|%)[^\s=&]*=)[^\s&'\"]*", re.IGNORECASE
)
"""Password of a URL, and of its query, whose keys may have escapes."""


class HetexpError(Exception):
    """Base of every error whose message is for the user."""

    exit_code = 1
    shown = False
    """Whether the screen shows it already."""


class ConfigError(HetexpError):
    """One or more configuration values cannot be used; all of them are listed at once.

    Args:
        problems: one sentence for each, with key, value and accepted values; passwords of URLs are masked.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        problems = [problems] if isinstance(problems, str) else problems
        self.problems = [_PASSWORD.sub(r"\1\2***", problem) for problem in problems]
        super().__init__("\n".join(self.problems))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"Configuration error: {self.problems[0]}"
        lines = "\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, start=1))
        return f"{len(self.problems)} configuration errors:\n{lines}"


class SetupError(HetexpError):
    """The machine is not ready: an interpreter, a port, a driver or a folder cannot be used."""


class UsageError(HetexpError):
    """A user's script uses its run in a way that gives wrong results."""


class HandshakeError(HetexpError):
    """Ranks differ before training; the message names the differences."""


class PeerLostError(HetexpError):
    """A collective failed because another rank is gone or did not answer in time."""


class StartRefusedError(PeerLostError):
    """Another rank has ended the start, and reports why; this rank has no failure of its own."""


class CheckpointError(HetexpError):
    """A checkpoint cannot be written or read."""


class RunFailedError(HetexpError):
    """A run ended without finishing its training.

    Args:
        details: text of the first cause, with its traceback.
        shown: as the attribute.
    """

    def __init__(self, message: str, exit_code: int = 1, details: str = "", shown: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.details = details
        self.shown = shown


@contextlib.contextmanager
def logged(what: str, level: int = logging.DEBUG) -> Iterator[None]:
    """Go on after any error of the block, which runs a user's or a vendor's code, and log it.

    Args:
        what: what is missing after an error.
    """
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        logging.getLogger(__name__).log(level, "%s (%s: %s)", what, kind, plain_line(error))


def plain_line(text: object, longest: int = 120) -> str:
    """Return the first line of a stranger's text as a message may show it, without control characters."""
    line = next(iter(str(text).strip().splitlines()), "")
    plain = "".join(character if character.isprintable() else "?" for character in line)
    return plain if len(plain) <= longest else f"{plain[:longest]}…"


def must_be(key: str, accepted: str, value: object, fix: str = "") -> str:
    """Return "`key` must be …, but is … instead." with an optional fix after it."""
    shown = f"'{value}'" if isinstance(value, str) else "null" if value is None else repr(value)
    sentence = f"`{key}` must be {accepted}, but is {shown} instead."
    return f"{sentence} {fix}" if fix else sentence


def must_build(key: str, accepted: str, built: object) -> str:
    """Return "`key` must build …, but builds a … instead.", with the class of the object that was built."""
    kind = type(built)
    return f"`{key}` must build {accepted}, but builds a {kind.__module__}.{kind.__qualname__} instead."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean `…`?" for the closest known word in any case, or an empty string."""
    by_folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return f" Did you mean `{by_folded[close[0]]}`?" if close else ""


def how_to_write(kind: str, value: object) -> str:
    """Return how to write the value that the user seems to mean, or an empty string.

    Args:
        kind: pydantic's name of the error.
    """
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"Write {int(value)}."
    if kind in ("int_type", "float_type") and isinstance(value, str):
        with contextlib.suppress(ValueError):
            float(value)
            return f"Write {value} without quotes."
    if kind in ("int_type", "float_type", "bool_type") and value == "":
        return "Nothing follows `=`; `null` is written out."
    if kind == "bool_type" and str(value).casefold() in ("yes", "on", "true", "1"):
        return "Write true."
    if kind == "bool_type" and str(value).casefold() in ("no", "off", "false", "0"):
        return "Write false."
    if kind in ("list_type", "tuple_type") and isinstance(value, (int, float)):
        return f"Write [{value}]."
    return ""
