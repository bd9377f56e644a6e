"""What several commands share: the option `--trust`, and how they end if they cannot use what was typed."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

_PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add `--trust`, for commands that read a folder which a stranger may have written."""
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        type=_package,
        metavar="PACKAGE",
        help="run this package's code if the folder's configuration names it; else only classes of hetexp "
        "are built. May be given several times",
    )


def _package(text: str) -> str:
    if not _PACKAGE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be the name of a package, but is {text!r} instead")
    return text


def exit_code(run: Callable[[], int], drives_torch: bool = True) -> int:
    """Return what the command returns, or 2 with the message of what it refuses on the screen.

    Args:
        run: the command, its words parsed.
        drives_torch: whether it needs an interpreter in which hetexp's own torch works.
    """
    from hetexp.core.errors import HetexpError
    from hetexp.launch.environments.interpreter import check_own_interpreter

    try:
        if drives_torch:
            check_own_interpreter()
        return run()
    except HetexpError as error:
        print(error, file=sys.stderr)
        return 2
