"""The command `hetexp`: a table of subcommands, each a function of the words that follow its name.

Hydra must get the words of `train` as the user typed them (`--help`, `-m`, `key=value`, `-sc`). Typer, click
and argparse's subparsers would read these first, and importing click takes longer than `hetexp --help` runs.
So each subcommand makes its own parser (`hetexp.commands.support.command_line`). To add a subcommand, write
`hetexp/commands/NAME.py` with a function `main`, and add its name to `COMMANDS`.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Sequence

import hetexp
from hetexp.core.errors import did_you_mean, must_be
from hetexp.core.streams import show_any_text

COMMANDS = {
    "train": "Train a model: group=option, key=value and Hydra's flags",
    "plan": "Predict steps, splits, memory and energy before anything runs",
    "diagram": "Draw a plan: machines, devices, links, shares, layers, memory",
    "verify": "Certify that a plan's steps are those of one device, for your model and data",
    "launch": "Run your own training script on several devices, one process each",
    "init": "Name the machines of a cluster, and make the secret that they share",
    "add": "Let one more device take part in a training under way",
    "drop": "Take a device out of a training under way",
    "control": "Ask a training under way for a checkpoint, its end, or what you registered",
    "gpus": "List every card of this machine, usable or not, and why not",
    "monitor": "Sample what all devices do, into a small database",
    "top": "Show what devices and runs do, live in the terminal",
    "dashboard": "Show devices and trainings in a browser, and start and stop them there",
    "env": "List, create and check the interpreters that drive other vendors' cards",
    "doctor": "Check this machine and say what to fix",
    "merge": "Merge checkpoints of one model into one, and evaluate it beside its parents",
    "export": "Write a checkpoint's weights for any other program",
    "harvest": "Write a trained model's activations for data=activations",
    "report": "Compare runs and sweeps: one page, text and tables",
    "sync": "Upload the offline W&B runs of a sweep or of any folders, each once",
}
"""Name → what the help says."""
ELSEWHERE = {
    "train": "hetexp.cli:train",
    "add": "hetexp.commands.control:main_add",
    "drop": "hetexp.commands.control:main_drop",
    "control": "hetexp.commands.control:main_control",
    "dashboard": "hetexp.web.main:main",
}
"""Commands whose function is not `main` of `hetexp.commands.NAME`."""
COMPLETION_FLAGS = ("-sc", "--shell-completion")


def train(arguments: list[str]) -> int:
    """Train as `train.py` does."""
    from hetexp.app import main as train_main

    sys.argv = [sys.argv[0], *arguments]  # Hydra reads them there
    train_main()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a subcommand may also leave by `SystemExit`.

    Args:
        arguments: the words after `hetexp`; those of this process by default.
    """
    show_any_text()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"hetexp {hetexp.__version__}")
        return 0
    if words[0] in COMPLETION_FLAGS:
        return _complete(words)
    if words[0] not in COMMANDS:
        print(_unknown(words), file=sys.stderr)
        return 2
    return function_of(words[0])(words[1:])


def function_of(command: str) -> Callable[[list[str]], int]:
    """Return a command's function, which gets the words after the name and returns the exit code."""
    function: Callable[[list[str]], int] = pkgutil.resolve_name(
        ELSEWHERE.get(command, f"hetexp.commands.{command}:main")
    )
    return function


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {about} (hetexp {name} --help)." for name, about in COMMANDS.items()]
    return "\n".join(
        [
            "hetexp trains one PyTorch model on unequal devices.",
            "",
            "Usage: hetexp COMMAND …   or   hetexp --version",
            "",
            "Commands",
            *lines,
        ]
    )


def _unknown(words: list[str]) -> str:
    if "=" in words[0] or words[0].startswith("-"):
        fix = f"Did you mean `hetexp train {' '.join(words)}`?"
    else:
        fix = did_you_mean(words[0], COMMANDS).strip()
    return must_be("command", "one of " + ", ".join(COMMANDS), words[0], fix)


def _complete(words: list[str]) -> int:
    """Print completions for a shell, which knows `hetexp` but none of its subcommands.

    The script of `hetexp train -sc install=bash` calls `hetexp -sc query=bash`, with the line in COMP_LINE.
    """
    line = os.environ.get("COMP_LINE", "")
    typed = line.split(maxsplit=2)
    if not words[1:] or not words[1].startswith("query="):
        return train(words)
    if len(typed) < 2 or (len(typed) == 2 and not line[-1].isspace()):
        start = typed[1] if len(typed) == 2 else ""
        print("\n".join(name for name in COMMANDS if name.startswith(start)))
    elif typed[1] in ("train", "plan", "diagram", "launch"):
        os.environ["COMP_LINE"] = " ".join(["hetexp", *typed[2:]]) + ("" if typed[2:] else " ")
        return train(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
