"""`hetexp doctor`: what this machine has, whether training can run on it, and what to fix."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from hetexp.core.errors import SetupError

if TYPE_CHECKING:
    from hetexp.commands.support.checks import Context


@dataclass
class Problem:
    """Something that a person may want to fix."""

    text: str
    fix: str | None = None
    """The command that fixes it, where there is one."""
    blocks: bool = False
    """Whether no training runs before it is fixed."""


@dataclass
class Section:
    """What one check found."""

    title: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def row(self, label: str, value: object) -> None:
        """Add a line; it says n/a if the value is not known."""
        self.rows.append((label, "n/a" if value is None else str(value)))

    def problem(self, text: str, fix: str | None = None, blocks: bool = False) -> None:
        """Add something to fix."""
        self.problems.append(Problem(text if text.endswith((".", "?")) else f"{text}.", fix, blocks))


def main(arguments: Sequence[str]) -> int:
    """Run all checks, print what they found, and return 0 where training can run, else 1."""
    parser = argparse.ArgumentParser(
        prog="hetexp doctor",
        description="Check this machine and print what it has and what to fix. Nothing is changed, no "
        "network is used, and no secret is printed: the output may go into a bug report as it is.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; what is not known is null")
    options = parser.parse_args(list(arguments))
    sections = examine()
    ready = not any(problem.blocks for section in sections for problem in section.problems)
    if options.json:
        print(json.dumps({"ready": ready, "sections": [asdict(one) for one in sections]}, indent=2))
    elif not sections[0].rows:  # something is missing, perhaps what prints
        print("\n".join(problem.text for problem in sections[0].problems))
    else:
        _show(sections, ready)
    return 0 if ready else 1


def examine(context: Context | None = None) -> list[Section]:
    """Return what each check found; one that crashes is a section that says so.

    Args:
        context: what to look at; this machine by default.
    """
    from hetexp.launch.environments.interpreter import check_own_interpreter

    try:
        check_own_interpreter()
    except SetupError as error:  # the checks themselves cannot be imported then
        lacking = Section("hetexp")
        lacking.problem(str(error), blocks=True)
        return [lacking]
    from hetexp.commands.support.checks import CHECKS, Context

    context = context or Context()
    sections = []
    for title, check in CHECKS.items():
        section = Section(title)
        try:
            check(context, section)
        except Exception as error:  # whatever it is, the other checks go on
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            section.row("check", f"failed: {why}")
            section.problem(f"The check '{title}' failed ({why}). Please report this, with all of the above")
        sections.append(section)
    return sections


def _show(sections: Sequence[Section], ready: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)

    def say(text: str, label: str = "", style: str = "") -> None:
        """Print text beside its label, in as many lines as it needs; a path or a command is never cut."""
        lines = textwrap.wrap(
            text, console.width - len(label), break_on_hyphens=False, break_long_words=False
        )
        indented = f"\n{' ' * len(label)}".join(lines)
        console.print(f"{label}{indented}", style=style, markup=False, soft_wrap=True)

    for section in sections:
        say(section.title, style="bold")
        for label, value in section.rows:
            say(value, label=f"  {label:15} ")
    problems = [problem for section in sections for problem in section.problems]
    console.print()
    if not problems:
        say("Nothing to fix.", style="bold green")
        return
    say("What to fix", style="bold")
    for number, problem in enumerate(problems, start=1):
        needed = " No training runs before." if problem.blocks else ""
        say(f"{problem.text}{needed}", label=f"{number}. ", style="red" if problem.blocks else "")
        if problem.fix is not None:
            console.print(f"   {problem.fix}", markup=False, soft_wrap=True)
    if ready:
        say("Training can run as it is.")
