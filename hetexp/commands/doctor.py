"""`hetexp doctor`: what this machine has, whether training can run on it, and what to fix."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hetexp.commands.support.command_line import add_shared, command_parser
from hetexp.commands.support.section import Section
from hetexp.core.errors import SetupError

if TYPE_CHECKING:
    from hetexp.commands.support.checks import Context


def main(arguments: Sequence[str]) -> int:
    """Run all checks and print their results; return 0 if training can run, else 1."""
    parser = command_parser(
        "doctor",
        "Check this machine and print what it has and what to fix. Nothing is changed, no "
        "network is used, and no secret is printed: the output may go into a bug report as it is.",
    )
    add_shared(parser, "--json")
    parser.add_argument(
        "--start-up",
        nargs="*",
        metavar="OVERRIDE",
        help="instead train one step, with these overrides, and print how long each stage of the start takes",
    )
    options = parser.parse_args(list(arguments))
    if options.start_up is not None:
        from hetexp.commands.support.start_time import show_start_up

        return show_start_up(options.start_up, options.json)
    sections = examine()
    ready = not any(problem.blocks for section in sections for problem in section.problems)
    if options.json:
        print(json.dumps({"ready": ready, "sections": [asdict(section) for section in sections]}, indent=2))
    elif not sections[0].rows:  # a package is missing, perhaps rich, which prints
        print("\n".join(problem.text for problem in sections[0].problems))
    else:
        _show(sections, ready)
    return 0 if ready else 1


def examine(context: Context | None = None) -> list[Section]:
    """Return a section for each check, also for a check that crashes.

    Args:
        context: the machine and folder to look at; by default this machine and the working folder.
    """
    from hetexp.launch.environments.interpreter import check_own_interpreter

    try:
        check_own_interpreter()
    except SetupError as error:  # the checks themselves cannot be imported then
        section = Section("hetexp")
        section.problem(str(error), blocks=True)
        return [section]
    from hetexp.commands.support.checks import CHECKS, Context

    context = context or Context()
    sections = []
    for title, check in CHECKS.items():
        section = Section(title)
        try:
            check(context, section)
        except Exception as error:  # the other checks go on
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            section.row("check", f"failed: {why}")
            section.problem(f"The check '{title}' failed ({why}). Please report this, with all of the above")
        sections.append(section)
    return sections


def _show(sections: Sequence[Section], ready: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)

    def say(text: str, label: str = "", style: str = "") -> None:
        """Print text beside its label, wrapped; a path or a command is never cut."""
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
        consequence = " No training can run until then." if problem.blocks else ""
        say(f"{problem.text}{consequence}", label=f"{number}. ", style="red" if problem.blocks else "")
        if problem.fix is not None:
            console.print(f"   {problem.fix}", markup=False, soft_wrap=True)
    if ready:
        say("Training can run as it is.")
