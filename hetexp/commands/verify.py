"""`hetexp verify`: certify that a plan's steps are those of one device, for the user's model and data."""

from __future__ import annotations

import argparse
import io
import os
import platform
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.commands.support.command_line import (
    add_shared,
    at_least_one,
    command_parser,
    exit_code,
    parse_overrides,
)

if TYPE_CHECKING:
    from rich.console import Console

    from hetexp.commands.support.certificate import Certificate
    from hetexp.core.config import Config
    from hetexp.core.plan import Plan
    from hetexp.hardware.selection.pool import Selection
    from hetexp.plan.run_spec import RunSpec

_EPILOG = """\
examples
  hetexp verify model=gpt data=text hardware.devices=[cuda:0,cpu] balancing=manual balancing.weights=[9,1]
  hetexp verify hardware=nvidia_arc --precision float32
  hetexp verify trainer.accumulate=4 trainer.clip_norm=1 --steps 20

It exits with 0 if the run is exact, 1 if it is not, 2 if an argument is wrong."""

NO_CLIPPING = 1e30
"""Norm to clip at that changes nothing: with clipping, a run logs its gradient's norm."""
TIME_SCALE = 1e-6
"""Time scale at which emulated devices are not slowed down: only their results count."""


def main(arguments: Sequence[str]) -> int:
    """Verify and print the certificate; return 0 for an exact run, 1 for any other, 2 for a wrong command."""
    options = parse_overrides(_parser(), arguments)
    return exit_code(lambda: _run(options), failure=1)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    folder = Path(options.output) if options.output else _default_folder()
    console = Console(stderr=True)
    certificate = verify(
        options.overrides, folder, options.steps, options.precision, options.config_dir, console
    )
    print(certificate.markdown())
    print(f"The same as JSON: {folder / 'certificate.json'}")
    return 0 if certificate.verdict == "exact" else 1


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "verify",
        "Train a few steps as configured and the same steps on one device, and print the difference "
        "of each step: the certificate that this plan computes the gradient of one device.",
        _EPILOG,
    )
    add_shared(parser, "overrides")
    parser.add_argument("--steps", type=at_least_one, default=5, metavar="N", help="optimizer steps (5)")
    parser.add_argument(
        "--precision",
        choices=("float64", "float32"),
        default="float64",
        help="float64 shows every mistake; float32 allows twice the effect of another microbatch size",
    )
    parser.add_argument("--output", metavar="FOLDER", help="where certificate.json and certificate.md go")
    add_shared(parser, "--config-dir")
    return parser


def _default_folder() -> Path:
    now = datetime.now()
    return Path("outputs", f"{now:%Y-%m-%d}", f"{now:%H-%M-%S}-verify-{secrets.token_hex(3)}")


def verify(
    overrides: Sequence[str],
    folder: Path,
    steps: int = 5,
    precision: str = "float64",
    config_dir: str | None = None,
    console: Console | None = None,
) -> Certificate:
    """Train the configured run and its reference, and write `certificate.json` and `certificate.md`.

    The runs' own folders are removed in the end. If a run fails, they stay, with its logs.

    Args:
        folder: of the result, made here; each run stores `steps` checkpoints in it.
        precision: `float64` or `float32`, of all runs, instead of `trainer.precision`.
        console: shows the progress.

    Raises:
        ConfigError: the configuration is wrong, or its strategy is not exact.
        SetupError, RunFailedError: a run could not be started, or failed.
    """
    from rich.console import Console

    from hetexp.commands.support.certificate import Certificate, Tolerance, compare
    from hetexp.core.files import write_json, write_text

    folder = folder.absolute()
    console = console or Console(quiet=True)
    runs = _Runs(*_prepare(overrides, folder, config_dir, console), console, steps, precision)
    plan = runs.as_configured("run")
    runs.alone("alone")
    tolerance = Tolerance()
    if precision != "float64":
        cuts = [cut for cut in (2, 4) if cut <= plan.config["trainer"]["global_batch_size"]]
        names = [runs.alone(f"alone_{cut}", cut) for cut in cuts]
        tolerance = Tolerance.of_microbatches([compare(runs.at(name), runs.at("alone")) for name in names])
    control, must_differ = None, runs.shares_differ(plan)
    if runs.averages(plan):
        runs.as_configured("control", normalizer="per_rank")
        control = compare(runs.at("control"), runs.at("alone"))
    found, cause = compare(runs.at("run"), runs.at("alone")), None
    if not found.within(tolerance):
        from hetexp.training.measuring.coupling import coupling

        cause = coupling(runs.config)
    certificate = Certificate(runs.facts(plan, overrides), found, tolerance, control, must_differ, cause)
    shutil.rmtree(folder / "runs")
    write_json(folder / "certificate.json", certificate.to_dict())
    write_text(folder / "certificate.md", certificate.markdown())
    return certificate


def _prepare(
    overrides: Sequence[str], folder: Path, config_dir: str | None, console: Console
) -> tuple[RunSpec, Plan]:
    """Return the configured run, checked, and its plan."""
    from functools import partial

    from hetexp.app import compose_and_check
    from hetexp.core.errors import ConfigError, must_be
    from hetexp.plan.run_spec import Request

    request = Request(folder / "runs" / "plan", Path.cwd(), overrides=tuple(overrides))
    checked = compose_and_check(overrides, request, config_dir)
    spec, problems = checked.spec, checked.problems
    if spec is not None and spec.config.resume is not None:
        value = spec.config.resume
        problems.append(must_be("resume", "null for hetexp verify, which starts from scratch", value))
    if spec is not None and not problems and not spec.strategy.exact:
        problems.append(
            must_be(
                "strategy",
                "one whose every step is that of one device, such as ddp",
                spec.strategy.name,
                "Its ranks take steps of their own: there is nothing to certify.",
            )
        )
    if spec is None or problems:
        raise ConfigError(problems)
    from hetexp.launch.launcher import measure  # with torch
    from hetexp.launch.prepare.preparation import prepare
    from hetexp.launch.prepare.select_strategy import select_strategy
    from hetexp.plan.planner import make_plan

    request.run_dir.mkdir(parents=True, exist_ok=True)
    spec = select_strategy(spec, console)
    return spec, prepare(make_plan(spec), spec, partial(measure, console=console))


class _Runs:
    """The runs of one certificate, each in its own folder."""

    def __init__(self, spec: RunSpec, plan: Plan, console: Console, steps: int, precision: str) -> None:
        self._spec, self._plan, self._console = spec, plan, console
        self._steps, self._precision = steps, precision

    @property
    def config(self) -> Config:
        return self._spec.config

    def at(self, name: str) -> Path:
        """Return the folder of a run."""
        return self._spec.request.run_dir.parent / name

    def as_configured(self, name: str, normalizer: str | None = None) -> Plan:
        """Run the plan itself, and return it as it was launched.

        Args:
            normalizer: `debug.normalizer` of this run; `None`: as configured.
        """
        from hetexp.core.precision import choose_precisions

        raw = self._adjusted(self._spec.raw)
        raw["debug"]["normalizer"] = normalizer or raw["debug"]["normalizer"]
        plan = replace(
            self._plan,
            precisions=choose_precisions(self._precision, self._plan.devices),
            microbatch_sizes=(),
        )
        return self._launch(name, self._with(raw, self._spec.selection), plan)

    def alone(self, name: str, accumulate: int = 1) -> str:
        """Train one device on whole batches of `accumulate` microbatches; return the run's name."""
        from hetexp.hardware.selection.pool import Selection
        from hetexp.plan.planner import make_plan

        raw = self._adjusted(self._spec.raw)
        raw["trainer"] |= {"accumulate": accumulate, "microbatch_size": None}
        raw["strategy"] = {"_target_": "hetexp.strategy.single.Single"}
        raw["balancing"] = {"_target_": "hetexp.balancing.equal.Equal"}
        spec = self._with(raw, Selection([self._plan.devices[0]]))
        self._launch(name, spec, make_plan(spec))
        return name

    def _with(self, raw: dict[str, Any], selection: Selection) -> RunSpec:
        """Return the run of an adjusted configuration."""
        from hetexp.core.config import read_config

        return self._spec.replaced(config=read_config(raw), raw=raw, selection=selection)

    def _adjusted(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration for a comparison: few steps, each of them logged and saved."""
        trainer = raw["trainer"]
        return raw | {
            "trainer": trainer
            | {
                "fast_dev_run": self._steps,  # evaluates no more batches than it trains on
                "max_steps": self._steps,
                "max_epochs": None,
                "warmup_steps": 0,
                "schedule": "constant",
                "log_every": 1,
                "checkpoint_every": 1,
                "eval_every": 0,
                "early_stopping": trainer["early_stopping"] | {"patience": None},
                "precision": self._precision,
                "clip_norm": trainer["clip_norm"] or NO_CLIPPING,
            },
            # So the last batch of an epoch, which may be short, is among the steps.
            "debug": raw["debug"]
            | {"dropout": False, "first_epoch_steps": self._steps - 1 if self._steps > 1 else None},
            "hardware": raw["hardware"] | {"time_scale": TIME_SCALE},
            "fault": {"events": []},
            "logger": {"_target_": "hetexp.logger.base.NoLogger"},
            "monitor": {"enabled": False},  # these runs are no trainings of the user
        }

    def _launch(self, name: str, spec: RunSpec, plan: Plan) -> Plan:
        from rich.console import Console

        from hetexp.core.errors import ConfigError, RunFailedError
        from hetexp.core.precision import precision_problems
        from hetexp.launch.launcher import launch
        from hetexp.launch.prepare.preparation import Preparation, with_memory

        problems = precision_problems(self._precision, plan.devices)
        if problems:
            hint = " hetexp verify --precision float32 asks for less." if self._precision == "float64" else ""
            raise ConfigError([problem + hint for problem in problems])
        plan = replace(plan, run_dir=str(self.at(name)), config=spec.raw)
        self.at(name).mkdir(parents=True)
        plan = with_memory(plan, spec, Preparation(spec).memory(plan))
        title = f"{name}: {self._steps} steps, {plan.strategy} on {plan.world_size} …"
        self._console.print(title, highlight=False)
        screen = io.StringIO()
        try:
            launch(plan, spec, Console(file=screen, width=120))
        except RunFailedError:
            self._console.print(screen.getvalue(), markup=False, highlight=False)
            raise
        return plan

    def averages(self, plan: Plan) -> bool:
        """Return whether gradients are averaged over ranks that each have a part of the batch."""
        return self._spec.strategy.averages_gradients(plan)

    def shares_differ(self, plan: Plan) -> bool:
        """Return whether the averaged gradients are of different numbers of samples."""
        counts = plan.replica_batch_sizes or plan.local_batch_sizes
        return self.averages(plan) and len({count for count in counts if count}) > 1

    def facts(self, plan: Plan, overrides: Sequence[str]) -> dict[str, Any]:
        """Return machine, versions, devices and settings of the run, for the certificate."""
        import torch

        import hetexp

        trainer = self._spec.raw["trainer"]
        microbatches = f"accumulate {trainer['accumulate']}"
        if trainer["microbatch_size"] is not None:
            microbatches = f"microbatches of at most {trainer['microbatch_size']}"
        return {
            "date": f"{datetime.now():%Y-%m-%d}",
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "versions": {
                "hetexp": hetexp.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            "overrides": list(overrides),
            "strategy": plan.strategy,
            "devices": [
                {"id": device.id, "name": device.name, "samples": count}
                for device, count in zip(plan.devices, plan.local_batch_sizes, strict=True)
            ],
            "replica_batch_sizes": list(plan.replica_batch_sizes),
            "emulated": plan.emulated,
            "precision": self._precision,
            "reference": str(plan.devices[0]),
            "cut": microbatches,
        }
