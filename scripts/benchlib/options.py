"""Command lines of benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def numbers(text: str) -> list[int]:
    """Read whole numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a reader of known names with commas between them."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if wrong := [name for name in names if name not in known]:
            accepted = ", ".join(known)
            raise argparse.ArgumentTypeError(f"must be of {accepted}, but is {', '.join(wrong)} instead")
        return names

    return read


def add_tables(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark on emulated cards that keeps results and writes tables into a page."""
    parser.add_argument("--quick", action="store_true", help="little work: whether it works, no figures")
    parser.add_argument("--time-scale", type=float, help="instead of a scale that this machine can keep")
    parser.add_argument("--json", type=Path, help="where results are kept and added to")
    parser.add_argument("--write", type=Path, help="the page whose tables are replaced")


def fill(arguments: argparse.Namespace, usual: Mapping[str, tuple[Any, Any]]) -> None:
    """Fill in options that were left out: the first value of each, the second with `--tiny`."""
    for name, (value, tiny) in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, tiny if arguments.tiny else value)
