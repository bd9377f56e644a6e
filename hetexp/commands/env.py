"""`hetexp env`: one interpreter a vendor, since torch drives only the cards that it is built for."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.commands.support.interpreters import Interpreter, command_line, how_to_mend, interpreters
from hetexp.core.errors import HetexpError, SetupError
from hetexp.hardware.detection.builds import own_build
from hetexp.hardware.detection.inventory import detect
from hetexp.launch.environments.record import (
    Recipe,
    check_recipe,
    create,
    make_recipe,
    pip_has_own_sources,
    typed,
)
from hetexp.launch.environments.wheels import KINDS, Wheel, choose_wheel

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDE = 110
"""Columns from which on the table also has the interpreters' paths."""


def main(arguments: Sequence[str]) -> int:
    """Run `hetexp env …` and return its exit code."""
    options = _parser().parse_args(list(arguments))
    action: Callable[[argparse.Namespace], int] = options.action
    try:
        return action(options)
    except HetexpError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hetexp env",
        description="One interpreter a vendor: torch drives the cards of the vendor that it is built for.",
    )
    actions = parser.add_subparsers(required=True, metavar="list | create | check")
    listing = actions.add_parser("list", help="this interpreter and the recorded environments")
    listing.add_argument("--json", action="store_true", help="print JSON; what is not known is null")
    listing.set_defaults(action=_list)
    making = actions.add_parser("create", help="make an environment with a vendor's torch, and record it")
    making.add_argument("kind", choices=list(KINDS), help="whose torch it gets")
    making.add_argument("--name", help="in the record; the kind by default")
    making.add_argument("--path", type=Path, help="its folder; $HETEXP_HOME/envs/NAME by default")
    making.add_argument("--python", help="interpreter that it is made of; this one by default")
    making.add_argument("--torch", metavar="VERSION", help="this interpreter's version by default")
    making.add_argument(
        "--index", metavar="URL", help="index of torch's wheels, such as a mirror of PyTorch's"
    )
    making.add_argument(
        "--installer",
        choices=["pip", "uv"],
        help="by default uv where it is installed and pip has no sources of its own configured, else pip",
    )
    making.add_argument("--force", action="store_true", help="replace an environment that is there")
    making.add_argument("--dry-run", action="store_true", help="print the commands and change nothing")
    making.set_defaults(action=_create)
    checking = actions.add_parser("check", help="compute with each, and train with this one and each other")
    checking.add_argument("names", nargs="*", help="environments; all by default")
    checking.set_defaults(action=_check)
    return parser


def _list(options: argparse.Namespace) -> int:
    found = interpreters()
    if options.json:
        print(json.dumps([as_dict(one) for one in found], indent=2))
        return 0
    console = _console()
    for part in listed(found, console.width):
        console.print(part)
    return 0


def as_dict(one: Interpreter) -> dict[str, Any]:
    """Return an interpreter as plain types, for JSON; what is not known is null."""
    return {
        "name": one.name,
        "python": one.python,
        "python_version": one.python_version,
        "torch": one.build.version,
        "built_for": one.built_for if one.build.problem is None else None,
        "devices": one.devices,
        "problem": one.build.problem,
    }


def listed(found: Sequence[Interpreter], width: int) -> list[RenderableType]:
    """Return the table of interpreters and the lines below it.

    Args:
        width: of the terminal; in a narrow one the paths are below the table.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in ("name", "Python", "torch", "built for", "cards it drives"):
        table.add_column(column, overflow="fold")
    if width >= WIDE:
        table.add_column("interpreter", overflow="fold")
    paths = []
    for one in found:
        good = one.build.problem is None
        devices = (", ".join(one.devices) or "none: CPU only") if good else "cannot be used"
        built = [str(one.build.version), one.built_for] if good else ["n/a", "n/a"]
        cells = [one.name, one.python_version or "n/a", *built, devices]
        table.add_row(
            *(Text(cell, style="" if good else "red") for cell in cells), *[one.python][: width >= WIDE]
        )
        paths.append(Text(f"{one.name}: {one.python}", overflow="fold"))
    notes: list[RenderableType] = []
    for one in found:
        if one.build.problem is not None:
            notes.append(Text(f"{one.name} cannot be used: {one.build.problem}. To make it again:"))
            notes.append(command_line(how_to_mend(one)))
    if len(found) == 1:
        notes.append(Text("No environment is recorded. To make one: hetexp env create cuda (rocm, xpu, cpu)"))
    return [table, *(paths if width < WIDE else []), *notes]


def _create(options: argparse.Namespace) -> int:
    version = options.torch or (own_build().version or "").partition("+")[0]
    if not version:
        raise SetupError(
            "--torch must be given where this interpreter has no torch whose version could be taken."
        )
    wheel = _wheel(options, version)
    uv, why = _installer(options.installer)
    python = None if options.python is None else shutil.which(options.python) or options.python
    recipe = make_recipe(options.kind, wheel, name=options.name, folder=options.path, python=python, uv=uv)
    _announce(recipe, why)
    if options.dry_run:
        for command in recipe.commands:
            print(typed(command))
        return 0
    check_recipe(recipe, options.force)
    started = time.monotonic()
    with _progress() as show:

        def tell(command: tuple[str, ...]) -> None:
            show("")
            print(typed(command), flush=True)

        build = create(recipe, tell, show)
    seconds = time.monotonic() - started
    print(
        f"# Made in {seconds:.0f} s and recorded as '{recipe.name}': torch {build.version}, {recipe.python}"
    )
    print("# What it drives is used from now on without being named. To try it:")
    print(f"hetexp env check {recipe.name}")
    return 0


def _wheel(options: argparse.Namespace, version: str) -> Wheel:
    """Choose the build; NVIDIA's depends on the driver and on the cards."""
    driver, architectures = None, []
    if options.kind == "cuda" and options.index is None and "+" not in version:
        cards = [card.spec for card in detect(builds=[]).cards if card.spec.backend == "cuda"]
        driver = next((spec.driver for spec in cards if spec.driver is not None), None)
        architectures = [spec.architecture for spec in cards if spec.architecture is not None]
    return choose_wheel(
        options.kind, version, index=options.index, driver=driver, architectures=architectures
    )


def _installer(wanted: str | None) -> tuple[str | None, str]:
    """Return uv's path, `None` for pip, and which of the two it is and why."""
    uv = shutil.which("uv")
    if wanted == "uv" and uv is None:
        raise SetupError("--installer must be pip where uv is not installed, but is 'uv' instead.")
    if wanted is not None:
        return (uv if wanted == "uv" else None), f"{wanted}, as --installer says"
    if uv is not None and pip_has_own_sources():
        return None, "pip, which is configured with sources that uv does not read"
    return uv, "pip" if uv is None else "uv"


def _announce(recipe: Recipe, why: str) -> None:
    """Say what is going to be done, so that the output as a whole is a shell script."""
    wheel = recipe.wheel
    where = f"from {wheel.index}" if wheel.index else "from the installer's own sources"
    print(f"# torch {wheel.version} {where} ({wheel.reason})")
    print(f"# environment '{recipe.name}' in {recipe.folder}, with {why}", flush=True)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the last line that a command printed, on a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda line: None
        return
    width = shutil.get_terminal_size().columns

    def show(line: str) -> None:
        """Put a line in the place of the one before; an empty one clears it."""
        print(f"\r\x1b[2K{line.strip()[: width - 1]}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")


def _check(options: argparse.Namespace) -> int:
    from hetexp.commands.support.env_check import check, checked, chosen

    results = check(chosen(interpreters(), options.names))
    console = _console()
    for part in checked(results):
        console.print(part)
    return 1 if any(result.problems for result in results) else 0


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
