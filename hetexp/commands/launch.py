"""`hetexp launch`: the user's own training script as the ranks of a plan, one process a device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.commands.support.command_line import add_shared, command_parser, exit_code, parse_overrides
from hetexp.core.errors import logged

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from hetexp.core.plan import Plan
    from hetexp.plan.run_spec import CheckedRun, Request, RunSpec

SCRIPT_SECTIONS = ("model", "data", "optimizer", "trainer")
"""Sections of the configuration that a script decides by its code."""
POLICIES = ("auto", "adaptive", "tflops", "vram", "manual", "equal")
RUN_DIR = "hydra.run.dir="

_EPILOG = """\
The script calls hetexp.setup (docs/how-to/library.md). It decides model, data, optimizer and batch; what is
given here decides the devices and how they share the work. `python script.py` runs it on one device.

examples
  hetexp launch script.py hardware=nvidia_arc
  hetexp launch script.py hardware.devices=[cuda:0,cpu] balancing=manual balancing.weights=[0.9,0.1]
  hetexp launch script.py hardware=nvidia -- --epochs 3"""


def main(arguments: Sequence[str]) -> int:
    """Launch the script; return 2 if an argument is wrong, else the run's exit code."""
    options, script_arguments = parse(arguments)
    return exit_code(lambda: _run(options, script_arguments), failure=1)


def _run(options: argparse.Namespace, script_arguments: Sequence[str]) -> int:
    from rich.console import Console

    plan, spec = make(options, script_arguments)
    from hetexp.launch.launcher import launch  # with torch

    launch(plan, spec, Console())
    return 0


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return hetexp's options, and the script's own arguments."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    return parse_overrides(_parser(), words[:end]), words[end + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "launch",
        "Run your own PyTorch script on several unequal devices, one process each.",
        _EPILOG,
        usage="hetexp launch SCRIPT [group=option ...] [key=value ...] [-- ARGUMENTS]",
    )
    parser.add_argument("script", help="a Python file that calls hetexp.setup")
    parser.add_argument(
        "overrides", nargs="*", help="hardware=…, strategy=…, balancing=…, as for hetexp train"
    )
    add_shared(parser, "--config-dir")
    return parser


def make(options: argparse.Namespace, script_arguments: Sequence[str] = ()) -> tuple[Plan, RunSpec]:
    """Return the plan of a command line, and its run.

    Raises:
        ConfigError: all problems of the command line, before any process starts.
        RunFailedError: the disk is full.
    """
    from omegaconf import OmegaConf

    from hetexp.app import register_resolvers
    from hetexp.core.compose.conf_folders import name_own_conf_dir
    from hetexp.core.compose.overrides import compose_typed
    from hetexp.core.compose.words import written_out
    from hetexp.core.errors import ConfigError, HetexpError, must_be
    from hetexp.core.files import ending_when_full, write_text
    from hetexp.core.sweep.folder import new_name
    from hetexp.plan.run_spec import CheckedRun, Request

    register_resolvers()
    here, script = Path.cwd(), Path(options.script)
    sys.path.append(str(here))  # the user's own policies and trackers, as for `hetexp train`
    name_own_conf_dir(Path(options.config_dir) if options.config_dir else None)
    folders = [word for word in options.overrides if word.startswith(RUN_DIR)]
    typed = written_out([word for word in options.overrides if word not in folders])
    problems = [*_check_script(script), *_script_key_problems(typed)]
    new_folder = f"outputs/{date.today()}/{new_name()}"
    folder = here / (folders[-1].removeprefix(RUN_DIR) if folders else new_folder)
    composed, compose_problems = compose_typed(
        [word for word in typed if not _decided_by_script(word)], config_dir=options.config_dir
    )
    if composed is None:
        raise ConfigError([*problems, *compose_problems])
    request = Request(
        run_dir=folder,
        working_dir=here,
        choices=_choices(typed),
        overrides=(script.name, *options.overrides),
        script=script,
        script_arguments=tuple(script_arguments),
    )
    checked = check(composed, request, compose_problems)
    spec, origin = checked.spec, None
    problems += checked.problems
    if spec is None:
        raise ConfigError(problems)
    from hetexp.launch.resume import clear, find, going_on  # with torch, like the checks of devices
    from hetexp.plan.planner import make_plan

    hosts = spec.config.cluster
    if hosts.hosts:
        fix = "Your own script runs on the devices of one machine."
        problems.append(must_be("cluster.hosts", "empty (cluster=none)", hosts.names, fix))
    try:
        origin = find(spec)
    except HetexpError as error:
        problems += error.problems if isinstance(error, ConfigError) else [str(error)]
    if origin is not None and origin.finished:
        problems.append(must_be("hydra.run.dir", "a folder whose run has not ended", str(folder)))
    spec = CheckedRun(spec, problems).accepted()
    assert origin is not None
    for sentence in origin.sentences:
        print(sentence)
    spec = going_on(spec, origin)
    with ending_when_full(folder):
        clear(origin, folder)
        plan = make_plan(spec)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(spec.raw)))
    return plan, spec


def check(cfg: DictConfig, request: Request, problems: Sequence[str] = ()) -> CheckedRun:
    """Return the run of a script with its devices, and all its problems.

    Sections of the script's own objects are emptied, so that none of these is built.

    Args:
        problems: those of the words from which the configuration was composed.
    """
    from hetexp import app
    from hetexp.plan.run_spec import CheckedRun

    for section in ("model", "data", "optimizer"):
        cfg[section] = {}
    checked = app.check(cfg, request, problems=problems)
    unsupported = [] if checked.spec is None else _unsupported(checked.spec)
    return CheckedRun(checked.spec, [*checked.problems, *unsupported])


def _unsupported(spec: RunSpec) -> list[str]:
    """Return one sentence for each requested feature that only hetexp's own training has."""
    from hetexp.core.errors import must_be
    from hetexp.core.precision import choose_precisions

    config = spec.config
    problems: list[str] | None = None
    with logged("policy and strategy are reported by their own checks"):
        policy, problems = spec.policy, spec.strategy.check_script()
    if problems is None:
        return []
    if policy.measures and not policy.follows:
        why = "Only a model that hetexp builds is measured beforehand; auto follows a script's own steps."
        name = type(policy).__name__.lower()
        problems.append(must_be("balancing", f"one of {', '.join(POLICIES)} with hetexp launch", name, why))
    chosen = choose_precisions(config.trainer.precision, spec.selection.devices)
    if wrong := set(chosen) - {"float32", "bfloat16"}:
        why = (
            "A script's own optimizer cannot leave a step out when a loss scale asks for it."
            if "float16" in wrong
            else "The script's model decides: after model.double() all is float64."
        )
        accepted = "float32 or bfloat16 on every device with hetexp launch"
        problems.append(must_be("trainer.precision", accepted, ", ".join(sorted(wrong)), why))
    if config.plan_only:
        problems.append(
            must_be("plan_only", "false with hetexp launch", True, "A script's work is not known.")
        )
    return problems


def _check_script(script: Path) -> list[str]:
    from hetexp.core.errors import must_be

    if script.is_file():
        return []
    fix = "The script comes first: hetexp launch script.py hardware=…" if "=" in script.name else ""
    return [must_be("script", "a Python file", str(script), fix)]


def _script_key_problems(typed: Sequence[str]) -> list[str]:
    """Return one sentence for each word that sets what the script decides."""
    return [
        f"`{word.lstrip('+~').partition('=')[0]}` must be absent with hetexp launch, but is "
        f"'{word.partition('=')[2]}' instead. The script decides it; what it reads itself comes after `--`."
        for word in typed
        if _decided_by_script(word)
    ]


def _decided_by_script(word: str) -> bool:
    section = word.lstrip("+~").partition("=")[0].partition(".")[0]
    is_precision = word.lstrip("+").partition("=")[0] == "trainer.precision"
    return section in SCRIPT_SECTIONS and not is_precision


def _choices(typed: Sequence[str]) -> dict[str, str]:
    """Return the chosen options of `hardware`, `strategy` and `balancing`, for the run's summary."""
    from omegaconf import OmegaConf

    from hetexp.core.compose.conf_folders import conf_dir

    shipped: Any = OmegaConf.load(conf_dir() / "config.yaml")
    choices = {
        str(key): str(value)
        for entry in shipped.defaults
        if isinstance(entry, Mapping)
        for key, value in entry.items()
        if str(key) in ("hardware", "strategy", "balancing")
    }
    words = [word.partition("=") for word in typed]
    return choices | {key: value for key, _, value in words if key in choices}
