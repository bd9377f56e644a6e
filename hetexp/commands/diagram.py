"""`hetexp diagram`: draw a plan, of a run or of a configuration, without running anything."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from hetexp.commands.support.command_line import (
    add_shared,
    command_parser,
    exit_code,
    parse_overrides,
    reading,
)

if TYPE_CHECKING:
    from hetexp.core.plan import Plan

DEFAULT_FORMATS = "mmd,svg"

_EPILOG = """\
examples
  hetexp diagram hardware=nvidia_arc strategy=pipeline model=gpt data=text
  hetexp diagram hardware=eight_mixed --format svg,pdf --output drawings
  hetexp diagram outputs/2026-01-31/12-00-00-0a1b2c"""


def main(arguments: Sequence[str]) -> int:
    """Draw and print the files' paths.

    Returns:
        2 if an argument is wrong, 1 if a requested format cannot be drawn.
    """
    options = parse_overrides(_parser(), arguments)
    return exit_code(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    from hetexp.report.diagram.files import FORMATS

    parser = command_parser(
        "diagram",
        "Draw machines, devices, links, shares or layers and memory of a plan, as Mermaid text "
        "(mmd) and, if Graphviz is installed, as SVG, PNG or PDF. Nothing is started.",
        _EPILOG,
    )
    parser.add_argument(
        "config",
        nargs="*",
        help="group=option and key=value, as for hetexp train; or a run folder, or its plan.json",
    )
    parser.add_argument(
        "--format", metavar="LIST", help=f"of {', '.join(FORMATS)} (default: {DEFAULT_FORMATS})"
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="where to write (default: the run folder, or the current one)"
    )
    add_shared(parser, "--config-dir", "--trust")
    return parser


def _run(options: argparse.Namespace) -> int:
    from hetexp.core.errors import ConfigError, must_be
    from hetexp.core.files import folder_problem
    from hetexp.report.diagram.files import FORMATS, write_diagrams
    from hetexp.report.diagram.picture import strategy_problems

    formats = [name.strip() for name in (options.format or DEFAULT_FORMATS).split(",")]
    problems = [
        must_be("--format", f"some of {', '.join(FORMATS)}, with commas between", options.format)
        for name in formats
        if name not in FORMATS
    ][:1]
    given = Path(options.config[0]) if len(options.config) == 1 else None
    stored = given is not None and (given.exists() or "=" not in given.name)
    if given is not None and stored:
        folder = Path(options.output) if options.output else given if given.is_dir() else given.parent
        plan, remarks, plan_problems = _stored_plan(given)
    else:
        sys.path.append(str(Path.cwd()))  # the user's own classes, as for `hetexp train`
        folder = Path(options.output or ".")
        plan, remarks, plan_problems = _predicted_plan(options)
    problems += plan_problems
    if reason := folder_problem(folder):
        problems.append(must_be("--output", "a folder that can be written", str(folder), reason))
    if problems:
        raise ConfigError(problems)
    assert plan is not None
    folder.mkdir(parents=True, exist_ok=True)
    with reading(options.trust) if stored else nullcontext():
        drawn = write_diagrams(plan, folder, formats, remarks)
        for problem in strategy_problems(plan):
            print(problem, file=sys.stderr)
    for path in drawn.paths:
        print(path)
    if drawn.problem is not None:
        print(drawn.problem, file=sys.stderr)
    return 1 if drawn.problem is not None and options.format else 0


def _stored_plan(given: Path) -> tuple[Plan | None, list[str], list[str]]:
    """Return the plan of a run, no remarks, and the problems of the path."""
    from hetexp.core.errors import must_be, plain_line
    from hetexp.core.plan import Plan

    path = given / "plan.json" if given.is_dir() else given
    accepted = "overrides, a run folder or its plan.json"
    if not path.is_file():
        return None, [], [must_be("CONFIG", accepted, str(given), f"There is no {path}.")]
    try:
        return Plan.read_checked(path), [], []
    except (OSError, ValueError) as error:
        kind = "no JSON" if isinstance(error, json.JSONDecodeError) else "no plan of this version of hetexp"
        why = f"{path} is {kind} ({plain_line(error)})."
        return None, [], [must_be("CONFIG", accepted, str(given), why)]


def _predicted_plan(options: argparse.Namespace) -> tuple[Plan | None, list[str], list[str]]:
    """Return the plan that a run would have, remarks on unknown parts, and the problems of the words."""
    from hetexp.app import compose_and_check
    from hetexp.launch.prepare.select_strategy import preview
    from hetexp.plan.run_spec import Request

    here = Path.cwd()
    request = Request(here / "plan", here, overrides=tuple(options.config))
    checked = compose_and_check(options.config, request, options.config_dir)
    if checked.problems or checked.spec is None:
        return None, [], checked.problems
    _, plan, remarks = preview(checked.spec)
    return plan, remarks, []
