"""Write docs/reference/commands.md: every command of `hetexp` with its arguments, from their parsers.

python scripts/describe_commands.py
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from hetexp.cli import COMMANDS, function_of

PAGE = Path(__file__).parents[1] / "docs/reference/commands.md"
HEAD = """\
# Commands

Made by `scripts/describe_commands.py` from the commands' parsers; change the texts there. `hetexp COMMAND
--help` prints the same.

"""
TRAIN = """\
`hetexp train` is `python train.py` from any folder. It takes groups (`strategy=ddp`), keys
(`trainer.max_steps=100`) and Hydra's flags; [every key](keys.md) lists them.

```
hetexp train hardware=nvidia_arc strategy=ddp      # one run
hetexp train -m trainer.seed=0,1,2                 # a sweep
hetexp train --help                                # groups and their options
hetexp train --cfg job                             # every key with its value
```
"""


class _HelpWanted(Exception):
    """Carries the parser of a command out of it."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser that a command makes for its arguments."""

    def stop(parser: argparse.ArgumentParser, file: object = None) -> None:
        raise _HelpWanted(parser)

    with patch.object(argparse.ArgumentParser, "print_help", stop):
        try:
            function_of(command)(["--help"])
        except _HelpWanted as wanted:
            parser = wanted.args[0]
            assert isinstance(parser, argparse.ArgumentParser)
            return parser
    raise ValueError(f"hetexp {command} --help prints no help of argparse")


def page() -> str:
    """Return the page's text."""
    parts = []
    for name, about in COMMANDS.items():
        text = TRAIN if name == "train" else "\n".join(_lines(parser_of(name)))
        parts.append(f"## hetexp {name}\n\n{about}.\n\n{text.strip()}\n")
    return HEAD + "\n".join(parts)


def _lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield description, table of arguments, examples, and the same of each subcommand."""
    text = " ".join((parser.description or "").split())
    if text:
        yield from (text, "")
    rows = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    children = [action for action in rows if isinstance(action, argparse._SubParsersAction)]
    if rows := [action for action in rows if action not in children and action.help != argparse.SUPPRESS]:
        yield from ("| argument | meaning |", "| --- | --- |", *map(_row, rows), "")
    if parser.epilog:
        yield from ("```", parser.epilog.strip(), "```", "")
    for action in children:
        for name, child in action.choices.items():
            yield from (f"### {child.prog}", "")
            helps = (choice.help for choice in action._choices_actions if choice.dest == name)
            if child.description is None and (about := next(helps, None)):
                yield from (f"{about[0].upper()}{about[1:]}.", "")
            yield from _lines(child)


def _row(action: argparse.Action) -> str:
    """Return a row of the table: the argument as it is typed, and its help."""
    values = action.metavar or action.dest.upper()
    if action.choices is not None and action.metavar is None:
        values = ", ".join(map(str, action.choices))
    takes_value = action.nargs != 0
    typed = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{values}`"
    if action.option_strings and takes_value:
        typed += f" `{values}`"
    text = " ".join((action.help or "").split())
    with contextlib.suppress(TypeError, ValueError):
        text %= {**vars(action), "prog": "hetexp"}
    return f"| {_cell(typed)} | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
