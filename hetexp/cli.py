"""The command `hetexp`: a table of subcommands, each one function of the words that follow its name.

Neither typer nor click nor argparse's subparsers share the words out. Hydra must get those of `train` as they
were typed (`--help`, `-m`, `key=value`, `-sc`), which each of the three has to be kept from reading, and
click alone takes longer to import than `hetexp --help` takes. A subcommand with options of its own makes its
own `argparse.ArgumentParser(prog="hetexp <name>")`. To add one, write a function with `@command` here, import
what it needs inside, and let its docstring's first line say what it does: the help shows that line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import hetexp
from hetexp.core.errors import did_you_mean, must_be

Command = Callable[[list[str]], int]
COMMANDS: dict[str, Command] = {}
"""Subcommands by name, in the order of the help."""
COMPLETION_FLAGS = ("-sc", "--shell-completion")


def command(function: Command) -> Command:
    """Add a subcommand of the function's name. It gets the words after the name and returns the exit code."""
    COMMANDS[function.__name__.replace("_", "-")] = function
    return function


@command
def train(arguments: list[str]) -> int:
    """Train a model: group=option, key=value and Hydra's flags (hetexp train --help)."""
    from hetexp.app import main as train_main

    sys.argv = [sys.argv[0], *arguments]  # Hydra reads them there
    train_main()
    return 0


@command
def plan(arguments: list[str]) -> int:
    """Predict steps, splits, memory and energy before anything runs (hetexp plan --help)."""
    from hetexp.commands.plan import main as plan_main

    return plan_main(arguments)


@command
def diagram(arguments: list[str]) -> int:
    """Draw a plan: machines, devices, links, shares, layers, memory (hetexp diagram --help)."""
    from hetexp.commands.diagram import main as diagram_main

    return diagram_main(arguments)


@command
def verify(arguments: list[str]) -> int:
    """Certify that a plan's steps are those of one device, for your model and data (hetexp verify --help)."""
    from hetexp.commands.verify import main as verify_main

    return verify_main(arguments)


@command
def launch(arguments: list[str]) -> int:
    """Run your own training script on several devices, one process each (hetexp launch --help)."""
    from hetexp.commands.launch import main as launch_main

    return launch_main(arguments)


@command
def init(arguments: list[str]) -> int:
    """Name the machines of a cluster, and make the secret that they share (hetexp init --help)."""
    from hetexp.commands.init import main as init_main

    return init_main(arguments)


@command
def add(arguments: list[str]) -> int:
    """Let one more device take part in a training under way (hetexp add --help)."""
    from hetexp.commands.control import main_add

    return main_add(arguments)


@command
def drop(arguments: list[str]) -> int:
    """Take a device out of a training under way (hetexp drop --help)."""
    from hetexp.commands.control import main_drop

    return main_drop(arguments)


@command
def control(arguments: list[str]) -> int:
    """Ask a training under way for a checkpoint, its end, or what you registered (hetexp control --help)."""
    from hetexp.commands.control import main_control

    return main_control(arguments)


@command
def gpus(arguments: list[str]) -> int:
    """List every card of this machine, usable or not, and why not (hetexp gpus --help)."""
    from hetexp.commands.gpus import main as gpus_main

    return gpus_main(arguments)


@command
def monitor(arguments: list[str]) -> int:
    """Sample what all devices do, into a small database (hetexp monitor --help)."""
    from hetexp.commands.monitor import main as monitor_main

    return monitor_main(arguments)


@command
def top(arguments: list[str]) -> int:
    """Show what devices and runs do, live in the terminal (hetexp top --help)."""
    from hetexp.commands.top import main as top_main

    return top_main(arguments)


@command
def dashboard(arguments: list[str]) -> int:
    """Show devices and trainings in a browser, and start and stop them there (hetexp dashboard --help)."""
    from hetexp.web.main import main as dashboard_main

    return dashboard_main(arguments)


@command
def env(arguments: list[str]) -> int:
    """List, create and check the interpreters that drive other vendors' cards (hetexp env --help)."""
    from hetexp.commands.env import main as env_main

    return env_main(arguments)


@command
def doctor(arguments: list[str]) -> int:
    """Check this machine and say what to fix (hetexp doctor --help)."""
    from hetexp.commands.doctor import main as doctor_main

    return doctor_main(arguments)


@command
def merge(arguments: list[str]) -> int:
    """Merge checkpoints of one model to one, and judge it beside its parents (hetexp merge --help)."""
    from hetexp.commands.merge import main as merge_main

    return merge_main(arguments)


@command
def export(arguments: list[str]) -> int:
    """Write a checkpoint's weights for any other program (hetexp export --help)."""
    from hetexp.commands.export import main as export_main

    return export_main(arguments)


@command
def harvest(arguments: list[str]) -> int:
    """Write a trained model's activations for data=activations (hetexp harvest --help)."""
    from hetexp.commands.harvest import main as harvest_main

    return harvest_main(arguments)


@command
def report(arguments: list[str]) -> int:
    """Compare runs and sweeps: one page, text and tables (hetexp report --help)."""
    from hetexp.commands.report import main as report_main

    return report_main(arguments)


@command
def sync(arguments: list[str]) -> int:
    """Upload the offline W&B runs of a sweep or of any folders, each once (hetexp sync --help)."""
    from hetexp.commands.sync import main as sync_main

    return sync_main(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a subcommand may also leave by `SystemExit`.

    Args:
        arguments: the words after `hetexp`; those of this process by default.
    """
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
    return COMMANDS[words[0]](words[1:])


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name:{width}}  {(one.__doc__ or '').partition(chr(10))[0]}" for name, one in COMMANDS.items()
    ]
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
    """Answer the shell, which knows `hetexp` but not which subcommand's words it completes.

    The script that `hetexp train -sc install=bash` prints asks `hetexp -sc query=bash`, with the line in
    COMP_LINE.
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
