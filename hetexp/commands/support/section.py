"""The result of one check: its facts, and the problems to fix."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Problem:
    """A problem that the user may want to fix."""

    text: str
    fix: str | None = None
    """The command that fixes it, if there is one."""
    blocks: bool = False
    """Whether no training can run before it is fixed."""


@dataclass
class Section:
    """The result of one check."""

    title: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def row(self, label: str, value: object) -> None:
        """Add a line; it says n/a if the value is not known."""
        self.rows.append((label, "n/a" if value is None else str(value)))

    def problem(self, text: str, fix: str | None = None, blocks: bool = False) -> None:
        """Add a problem; a missing full stop is added to its text."""
        self.problems.append(Problem(text if text.endswith((".", "?")) else f"{text}.", fix, blocks))
