"""Plain lines and numbers in the terminal, beside rich's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNKNOWN = "–"


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a text as it is: without markup or highlights, and without breaks of a long line."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def format_number(value: float | None, form: str, unit: str = "") -> str:
    """Return a number in a format with its unit; a dash for `None`."""
    return UNKNOWN if value is None else f"{value:{form}}{unit}"
