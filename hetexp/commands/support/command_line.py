"""Parsers, common options, tables and exit codes of all commands."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import OverflowMethod, RenderableType
    from rich.table import Table

    from hetexp.checkpoint.choose import Chosen

_PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def command_parser(
    name: str, description: str, epilog: str | None = None, usage: str | None = None
) -> argparse.ArgumentParser:
    """Return the parser of `hetexp NAME`; an epilog keeps its line breaks."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=f"hetexp {name}",
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.HelpFormatter if epilog is None else raw,
    )


def parse_overrides(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command whose words are overrides and flags in any order; `--key=value` is `key=value`."""
    from hetexp.core.compose.words import without_hyphens

    return parser.parse_intermixed_args(without_hyphens(arguments, parser._option_string_actions))


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add arguments that mean the same in several commands, such as `run` or `--json`."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def _package(text: str) -> str:
    if not _PACKAGE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be the name of a package, but is {text!r} instead")
    return text


_SHARED: dict[str, dict[str, Any]] = {
    "run": {"metavar": "RUN", "help": "a run or checkpoint folder, RUN/best or RUN/step:100"},
    "overrides": {"nargs": "*", "help": "group=option and key=value, as for hetexp train"},
    "--config-dir": {"metavar": "FOLDER", "help": "a folder of options of your own"},
    "--json": {"action": "store_true", "help": "print JSON; unknown values are null"},
    "--trust": {
        "action": "append",
        "default": [],
        "type": _package,
        "metavar": "PACKAGE",
        "help": "run this package's code if the folder's configuration names it; else only classes of hetexp "
        "are built. May be given several times",
    },
}


def above_zero(text: str) -> float:
    """Return an option's value as a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, but is {text} instead")
    return value


def at_least_one(text: str) -> int:
    """Return an option's value as a whole number of at least 1."""
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but is {text} instead")
    return int(text)


def exit_code(
    run: Callable[[], int],
    *,
    drives_torch: bool = True,
    failure: int = 2,
    trust: Sequence[str] | None = None,
) -> int:
    """Run a command and return its exit code; print the message of an error.

    The code is 2 for a wrong configuration, a failed run's own code, and 130 after Ctrl-C.

    Args:
        run: the command, with its parsed arguments.
        drives_torch: whether the command needs a torch that works in this interpreter.
        failure: code of all other errors.
        trust: packages of `--trust`, for a command that builds classes of a folder's configuration.
    """
    from hetexp.core.errors import ConfigError, HetexpError, RunFailedError
    from hetexp.launch.environments.interpreter import check_own_interpreter

    try:
        if drives_torch:
            check_own_interpreter()
        if trust is None:
            return run()
        from hetexp.core.instantiate import only_trusted

        sys.path.append(str(Path.cwd()))  # the user's own classes, as for `hetexp train`
        with only_trusted(trust):
            return run()
    except HetexpError as error:
        print(error, file=sys.stderr)
        if isinstance(error, RunFailedError):
            return error.exit_code
        return 2 if isinstance(error, ConfigError) else failure
    except KeyboardInterrupt:
        return 130


def stored_checkpoint(run: str, contents: bool = True) -> Chosen:
    """Return the checkpoint that RUN names.

    Args:
        contents: whether to read its files and compare their checksums.

    Raises:
        ConfigError: RUN names no folder with checkpoints.
        CheckpointError: no checkpoint is complete and undamaged.
    """
    from hetexp.checkpoint.choose import ResumeRequest, choose
    from hetexp.core.errors import ConfigError, must_be

    request = ResumeRequest.read(run, Path.cwd())
    if request.path is None:
        raise ConfigError(must_be("RUN", "the folder of a run or of a checkpoint", run))
    return choose(Path(request.path), request.which, contents=contents)


def print_parts(parts: Iterable[RenderableType]) -> None:
    """Print tables and lines."""
    from rich.console import Console

    console = Console(highlight=False)
    for part in parts:
        console.print(part)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[tuple[str, str]]],
    right: Collection[str] = (),
    overflow: OverflowMethod = "fold",
) -> Table:
    """Return a table for the terminal.

    Args:
        rows: text and style of each cell.
        right: columns that are aligned to the right.
    """
    from rich.table import Table
    from rich.text import Text

    result = Table()
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow=overflow)
    for row in rows:
        result.add_row(*(Text(text, style=style) for text, style in row))
    return result
