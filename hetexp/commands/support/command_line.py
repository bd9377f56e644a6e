"""Parsers, common options, tables and exit codes of all commands."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import OverflowMethod, RenderableType
    from rich.table import Table

    from hetexp.checkpoint.choose import Chosen

log = logging.getLogger(__name__)
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


def _packages(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if not _PACKAGE.fullmatch(name):
            raise argparse.ArgumentTypeError(f"must be the name of a package, but is {name!r} instead")
    return names


_SHARED: dict[str, dict[str, Any]] = {
    "run": {"metavar": "RUN", "help": "a run or checkpoint folder, RUN/best or RUN/step:100"},
    "overrides": {"nargs": "*", "help": "group=option and key=value, as for hetexp train"},
    "--config-dir": {"metavar": "FOLDER", "help": "a folder of options of your own"},
    "--json": {"action": "store_true", "help": "print JSON; unknown values are null"},
    "--trust-owner": {
        "metavar": "USER",
        "help": "write into a folder that this other user owns",
    },
    "--trust": {
        "action": "extend",
        "default": [],
        "type": _packages,
        "metavar": "PACKAGE[,PACKAGE]",
        "help": "run these packages' code if the folder's configuration names it; else only classes of "
        "hetexp are built. May be given several times",
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
        with nullcontext() if trust is None else reading(trust):
            return run()
    except HetexpError as error:
        print(error, file=sys.stderr)
        if isinstance(error, RunFailedError):
            return error.exit_code
        return 2 if isinstance(error, ConfigError) else failure
    except KeyboardInterrupt:
        return 130


@contextmanager
def reading(trust: Sequence[str]) -> Iterator[None]:
    """Read a folder in the block that a stranger may have written.

    Args:
        trust: packages whose classes may be built, beside hetexp's own. Without any, no module of the current
            folder is imported, either: it may be the stranger's.

    Raises:
        ConfigError: any error of another class than hetexp's, in one sentence with its place.
    """
    from hetexp.core.errors import ConfigError, HetexpError, plain_line
    from hetexp.core.instantiate import only_trusted

    if trust:
        sys.path.append(str(Path.cwd()))  # the user's own classes, as for `hetexp train`
    try:
        with only_trusted(trust):
            yield
    except HetexpError:
        raise
    except Exception as error:
        log.debug("a folder was not read", exc_info=True)
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {plain_line(error)}; {Path(place.filename).name}, line {place.lineno}"
        raise ConfigError(
            f"The folder must hold the files of a run as hetexp writes them, but cannot be read ({why})."
        ) from error


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
