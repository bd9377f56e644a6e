"""Plain lines and numbers in the terminal, beside rich's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetexp.hardware.detection.builds import home

if TYPE_CHECKING:
    from rich.console import Console

UNKNOWN = "–"


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a text as it is: without markup or highlights, and without breaks of a long line."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def first_time(hint: str) -> bool:
    """Return whether this machine's user has not seen a hint yet, and note that it is shown now.

    Args:
        hint: its name, a file in `$HETEXP_HOME/hints`.
    """
    path = home() / "hints" / hint
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a folder that cannot be written: every run shows it
        return True
    return True


def format_number(value: float | None, form: str, unit: str = "") -> str:
    """Return a number in a format with its unit; a dash for `None`."""
    return UNKNOWN if value is None else f"{value:{form}}{unit}"
