"""`hetexp plan`: predict each strategy and policy on the given devices, without running anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.commands.support.command_line import add_shared, command_parser, exit_code, parse_overrides

if TYPE_CHECKING:
    from hetexp.launch.prepare.planning import ChangedPlan, PredictionRequest
    from hetexp.plan.run_spec import RunSpec

_EPILOG = """\
examples
  hetexp plan hardware=nvidia_arc model=gpt data=text trainer.global_batch_size=256
  hetexp plan hardware=nvidia_arc --what-if +rtx_4090 --what-if -arc_a770
  hetexp plan hardware=eight_mixed --scale 10000
  hetexp plan hardware=nvidia_arc --objective budget --watts 300"""


def main(arguments: Sequence[str]) -> int:
    """Print the prediction as tables or as JSON; return 2 if an argument is wrong."""
    options = parse_overrides(_parser(), _joined(arguments))
    return exit_code(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "plan",
        "Say what to type for the given devices and how much faster than the fastest of them alone that is, "
        "by predictions of every strategy and policy. Nothing is started.",
        _EPILOG,
    )
    add_shared(parser, "overrides", "--json")
    parser.add_argument(
        "--details", action="store_true", help="all rows, each device's samples and memory, all reasons"
    )
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="CHANGE",
        help="cards of the catalogue more (+rtx_4090, +2*t4) or devices fewer (-arc_a770, -cuda:1); may be "
        "given several times, all changes apply together",
    )
    parser.add_argument(
        "--scale", type=int, metavar="N", help="repeat the devices up to so many, in boxes of them"
    )
    parser.add_argument(
        "--objective",
        choices=("time", "energy", "budget"),
        default="time",
        help="recommend the fastest, the thriftiest of those hardly slower, or the fastest within --watts",
    )
    parser.add_argument("--watts", type=float, metavar="W", help="most that the devices may draw together")
    add_shared(parser, "--config-dir")
    return parser


def _joined(words: Sequence[str]) -> list[str]:
    """Return the words with `--what-if` and its value as one: argparse takes `-card` for an option."""
    joined: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        joined.append(f"{word}={left.pop(0)}" if word == "--what-if" and left else word)
    return joined


def _run(options: argparse.Namespace) -> int:
    from hetexp.app import compose_and_check
    from hetexp.core.errors import ConfigError
    from hetexp.launch.prepare.planning import check_scale, predict_run
    from hetexp.plan.run_spec import Request

    here = Path.cwd()
    wanted, problems = _wanted(options)
    request = Request(here / "plan", here, overrides=tuple(options.overrides))
    checked = compose_and_check(options.overrides, request, options.config_dir)
    spec, other = checked.spec, None
    problems += checked.problems
    if spec is not None and not checked.problems:
        problems += check_scale(wanted.scale, spec.config)
        other = _other(wanted, spec, problems)
    if problems:
        raise ConfigError(problems)
    assert spec is not None
    prediction = predict_run(spec, wanted, other)
    if options.json:
        print(json.dumps(prediction.to_dict(), indent=2))
        return 0
    from rich.console import Console

    from hetexp.launch.terminal.prediction import show

    show(prediction, Console(), options.details)
    return 0


def _wanted(options: argparse.Namespace) -> tuple[PredictionRequest, list[str]]:
    """Return the requested prediction, and the problems of the options."""
    from hetexp.core.errors import ConfigError, must_be
    from hetexp.launch.prepare.planning import PredictionRequest
    from hetexp.plan.predict.what_if import parse_changes

    problems: list[str] = []
    changes: list[Any] = []
    try:
        changes = parse_changes(options.what_if)
    except ConfigError as error:
        problems += error.problems
    if options.objective == "budget" and options.watts is None:
        problems.append("`--watts` must be given with --objective budget, but is missing.")
    if options.watts is not None and options.objective != "budget":
        problems.append(must_be("--objective", "budget if --watts is given", options.objective))
    if options.watts is not None and not 0 < options.watts < float("inf"):
        problems.append(must_be("--watts", "a number above 0", options.watts))
    return PredictionRequest(tuple(changes), options.scale, options.objective, options.watts), problems


def _other(wanted: PredictionRequest, spec: RunSpec, problems: list[str]) -> ChangedPlan | None:
    """Return the plan after `--what-if`; append problems of the changes and of `--scale` to `problems`."""
    from hetexp.core.errors import ConfigError, must_be
    from hetexp.launch.prepare.planning import what_if
    from hetexp.plan.predict.scale import MOST

    other = None
    if wanted.changes:
        try:
            other = what_if(wanted.changes, spec)
        except ConfigError as error:
            problems += error.problems
    devices = len(other.plan.devices if other is not None else spec.selection.devices)
    if wanted.scale is not None and not devices <= wanted.scale <= MOST:
        accepted = f"from {devices}, the devices given, to {MOST}"
        problems.append(must_be("--scale", accepted, wanted.scale))
    return other
