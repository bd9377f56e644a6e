"""How a command ends where something that was typed cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Callable


def exit_code(run: Callable[[], int], drives_torch: bool = True) -> int:
    """Return what the command returns, or 2 with the message of what it refuses on the screen.

    Args:
        run: the command, its words parsed.
        drives_torch: whether it needs an interpreter in which hetexp's own torch works.
    """
    from hetexp.core.errors import HetexpError
    from hetexp.launch.interpreter import check_own_interpreter

    try:
        if drives_torch:
            check_own_interpreter()
        return run()
    except HetexpError as error:
        print(error, file=sys.stderr)
        return 2
