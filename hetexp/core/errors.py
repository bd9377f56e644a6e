"""What hetexp raises.

Three kinds, because three different people fix them: a `ConfigError` is fixed by whoever wrote the
configuration, an `SetupError` by whoever set the machine up, and anything else is our bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class HetexpError(Exception):
    """Base of every error whose message is meant for the person at the keyboard."""


class ConfigError(HetexpError):
    """One or more configuration values cannot be used; all of them are listed at once.

    Args:
        problems: one sentence a problem, each naming key, value and what is accepted.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"Configuration error: {self.problems[0]}"
        lines = "\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, start=1))
        return f"{len(self.problems)} configuration errors:\n{lines}"


class SetupError(HetexpError):
    """The machine is not ready: an interpreter, a port, a driver or a folder cannot be used."""


class HandshakeError(HetexpError):
    """Ranks that should agree before training do not; the message names what differs."""


class PeerLostError(HetexpError):
    """A collective failed because another rank went away or did not answer in time."""


class CheckpointError(HetexpError):
    """A checkpoint cannot be written or read."""


class RunFailedError(HetexpError):
    """A run ended without finishing its training; the details are already on the screen."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def must_be(key: str, accepted: str, value: object, fix: str = "") -> str:
    """Return "`key` must be …, but is … instead." with an optional fix after it."""
    shown = f"'{value}'" if isinstance(value, str) else repr(value)
    sentence = f"`{key}` must be {accepted}, but is {shown} instead."
    return f"{sentence} {fix}" if fix else sentence


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean `…`?" for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean `{close[0]}`?" if close else ""
