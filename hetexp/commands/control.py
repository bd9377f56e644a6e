"""`hetexp add`, `hetexp drop` and `hetexp control`: send a request to a run, and print its answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hetexp.commands.support.command_line import command_parser, exit_code

_RUN = "folder of a run, or its name below outputs"
_ADD = """\
examples
  hetexp add outputs/2026-01-31/12-00-00-0a1b2c cuda:1     a card that is free, as in `hetexp gpus`
  hetexp add 12-00-00-0a1b2c xpu:0                         a card that was dropped or lost"""
_DROP = """\
examples
  hetexp drop 12-00-00-0a1b2c xpu:0        the others take its samples from the next step on"""
_CONTROL = """\
names
  checkpoint    save a checkpoint at the end of the step
  stop          save a checkpoint, and end the run
  NAME          whatever the run's own code has registered a handler for (docs/how-to/faults.md)"""


def main_add(arguments: Sequence[str]) -> int:
    """Let a device take part in a run; return 1 if the run refuses it, 2 if it cannot be asked."""
    parser = _parser("add", "Let one more device take part in a training under way.", _ADD)
    parser.add_argument("argument", metavar="DEVICE", help="cuda:1, cpu, emulated:rtx_3090, …")
    return _ask("add", parser.parse_args(arguments))


def main_drop(arguments: Sequence[str]) -> int:
    """Take a device out of a run; return 1 if the run refuses it, 2 if it cannot be asked."""
    parser = _parser("drop", "Take a device out of a training under way, which goes on without it.", _DROP)
    parser.add_argument("argument", metavar="DEVICE", help="its id in the run: cuda:1, emulated:0, …")
    return _ask("drop", parser.parse_args(arguments))


def main_control(arguments: Sequence[str]) -> int:
    """Ask a run for something; return 1 if it was not done, 2 if the run cannot be asked."""
    parser = _parser("control", "Ask a training under way to do something at the end of its step.", _CONTROL)
    parser.add_argument("name", metavar="NAME", help="checkpoint, stop, or a name of your own")
    parser.add_argument("argument", nargs="?", default="", metavar="ARGUMENT", help="for your own handler")
    options = parser.parse_args(arguments)
    if options.name in ("add", "drop"):
        print(f"`hetexp {options.name} RUN DEVICE` does this, not hetexp control.", file=sys.stderr)
        return 2
    return _ask(options.name, options)


def _parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    parser = command_parser(name, description, epilog)
    parser.add_argument("run", metavar="RUN", help=_RUN)
    return parser


def _ask(command: str, options: argparse.Namespace) -> int:
    from hetexp.launch.control import ask, find_run

    def run() -> int:
        answer = ask(find_run(options.run, Path.cwd()), command, options.argument)
        print(answer.text, file=sys.stdout if answer.done else sys.stderr)
        return 0 if answer.done else 1

    return exit_code(run, drives_torch=False)
