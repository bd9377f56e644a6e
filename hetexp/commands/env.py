"""`hetexp env`: one interpreter a vendor, since a build of torch drives the cards of one vendor."""

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

from hetexp.commands.support.command_line import add_shared, command_parser, exit_code, print_parts, table
from hetexp.commands.support.interpreters import (
    NO_ENVIRONMENT,
    Interpreter,
    interpreters,
    repair_command,
    unbroken_line,
)
from hetexp.core.errors import SetupError
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
    from rich.console import RenderableType

WIDE = 110
"""Columns from which on the table also has the interpreters' paths."""


def main(arguments: Sequence[str]) -> int:
    """Run `hetexp env …` and return its exit code."""
    options = _parser().parse_args(list(arguments))
    return exit_code(lambda: int(options.action(options)), drives_torch=False, failure=1)


def _parser() -> argparse.ArgumentParser:
    about = "One interpreter a vendor: torch drives the cards of the vendor that it is built for."
    parser = command_parser("env", about)
    actions = parser.add_subparsers(required=True, metavar="list | create | check")
    list_parser = actions.add_parser("list", help="this interpreter and the recorded environments")
    add_shared(list_parser, "--json")
    list_parser.set_defaults(action=_list)
    create_parser = actions.add_parser(
        "create", help="make an environment with a vendor's torch, and record it"
    )
    create_parser.add_argument("kind", choices=list(KINDS), help="whose torch it gets")
    create_parser.add_argument("--name", help="in the record; the kind by default")
    create_parser.add_argument("--path", type=Path, help="its folder; $HETEXP_HOME/envs/NAME by default")
    create_parser.add_argument("--python", help="base interpreter; this one by default")
    create_parser.add_argument("--torch", metavar="VERSION", help="this interpreter's version by default")
    create_parser.add_argument(
        "--index", metavar="URL", help="index of torch's wheels, such as a mirror of PyTorch's"
    )
    create_parser.add_argument(
        "--installer",
        choices=["pip", "uv"],
        help="by default uv if it is installed and pip has no sources of its own configured, else pip",
    )
    create_parser.add_argument("--force", action="store_true", help="replace an existing environment")
    create_parser.add_argument("--dry-run", action="store_true", help="print the commands and change nothing")
    create_parser.set_defaults(action=_create)
    check_parser = actions.add_parser(
        "check", help="compute with each, and train with this one and each other"
    )
    check_parser.add_argument("names", nargs="*", help="environments; all by default")
    check_parser.set_defaults(action=_check)
    return parser


def _list(options: argparse.Namespace) -> int:
    from rich.console import Console

    if options.json:
        print(json.dumps([as_dict(interpreter) for interpreter in interpreters()], indent=2))
    else:
        print_parts(listed(interpreters(), Console().width))
    return 0


def as_dict(interpreter: Interpreter) -> dict[str, Any]:
    """Return an interpreter as plain types, for JSON; an unknown value is null."""
    return {
        "name": interpreter.name,
        "python": interpreter.python,
        "python_version": interpreter.python_version,
        "torch": interpreter.build.version,
        "built_for": interpreter.built_for if interpreter.build.problem is None else None,
        "devices": interpreter.devices,
        "problem": interpreter.build.problem,
    }


def listed(all_interpreters: Sequence[Interpreter], width: int) -> list[RenderableType]:
    """Return the table of interpreters and the lines below it.

    Args:
        width: columns of the terminal; on a narrow one the paths stand below the table.
    """
    from rich.text import Text

    columns = ["name", "Python", "torch", "built for", "cards it drives"]
    rows = []
    paths: list[RenderableType] = []
    notes: list[RenderableType] = []
    for interpreter in all_interpreters:
        name, problem = interpreter.name, interpreter.build.problem
        cells = [name, interpreter.python_version or "n/a"]
        if problem is None:
            devices = ", ".join(interpreter.devices) or "none: CPU only"
            cells += [str(interpreter.build.version), interpreter.built_for, devices]
        else:
            cells += ["n/a", "n/a", "cannot be used"]
            notes.append(Text(f"{name} cannot be used: {problem}. To make it again:"))
            notes.append(unbroken_line(repair_command(interpreter)))
        rows.append([(cell, "" if problem is None else "red") for cell in cells])
        paths.append(Text(f"{name}: {interpreter.python}", overflow="fold"))
    if width >= WIDE:
        columns.append("interpreter")
        for row, interpreter in zip(rows, all_interpreters, strict=True):
            row.append((interpreter.python, ""))
        paths = []
    if len(all_interpreters) == 1:
        notes.append(Text(NO_ENVIRONMENT))
    return [table(columns, rows), *paths, *notes]


def _create(options: argparse.Namespace) -> int:
    version = options.torch or (own_build().version or "").partition("+")[0]
    if not version:
        raise SetupError(
            "`--torch` must be given if this interpreter has no torch, whose version is the default."
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

        def announce(command: tuple[str, ...]) -> None:
            show("")
            print(typed(command), flush=True)

        build = create(recipe, announce, show)
    seconds = time.monotonic() - started
    print(
        f"# Made in {seconds:.0f} s and recorded as '{recipe.name}': torch {build.version}, {recipe.python}"
    )
    print("# From now on, runs find it for the cards that it drives. To try it:")
    print(f"hetexp env check {recipe.name}")
    return 0


def _wheel(options: argparse.Namespace, version: str) -> Wheel:
    """Return the build to install; NVIDIA's depends on the driver and on the cards."""
    driver, architectures = None, []
    if options.kind == "cuda" and options.index is None and "+" not in version:
        cards = [card.spec for card in detect(builds=[]).cards if card.spec.backend == "cuda"]
        driver = next((spec.driver for spec in cards if spec.driver is not None), None)
        architectures = [spec.architecture for spec in cards if spec.architecture is not None]
    return choose_wheel(
        options.kind, version, index=options.index, driver=driver, architectures=architectures
    )


def _installer(requested: str | None) -> tuple[str | None, str]:
    """Return uv's path (`None` for pip), and the installer's name with the reason."""
    uv = shutil.which("uv")
    if requested == "uv" and uv is None:
        raise SetupError("`--installer` must be pip if uv is not installed, but is 'uv' instead.")
    if requested is not None:
        return (uv if requested == "uv" else None), f"{requested}, as --installer says"
    if uv is not None and pip_has_own_sources():
        return None, "pip, which is configured with sources that uv does not read"
    return uv, "pip" if uv is None else "uv"


def _announce(recipe: Recipe, why: str) -> None:
    """Print build and folder as comments, so that the whole output is a shell script."""
    wheel = recipe.wheel
    source = f"from {wheel.index}" if wheel.index else "from the installer's own sources"
    print(f"# torch {wheel.version} {source} ({wheel.reason})")
    print(f"# environment '{recipe.name}' in {recipe.folder}, with {why}", flush=True)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a command's newest line on a terminal, and elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda line: None
        return
    width = shutil.get_terminal_size().columns

    def show(line: str) -> None:
        """Replace the shown line; an empty text clears it."""
        print(f"\r\x1b[2K{line.strip()[: width - 1]}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")


def _check(options: argparse.Namespace) -> int:
    from hetexp.commands.support.env_check import check, result_table, selected

    results = check(selected(interpreters(), options.names))
    print_parts(result_table(results))
    return 1 if any(result.problems for result in results) else 0
