"""`hetexp env check`: compute with every interpreter, and train with this interpreter beside each other."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hetexp.commands.support.command_line import table
from hetexp.commands.support.interpreters import (
    NO_ENVIRONMENT,
    OWN,
    Interpreter,
    repair_command,
    unbroken_line,
)
from hetexp.commands.support.section import Problem
from hetexp.core.errors import HetexpError, RunFailedError, SetupError, did_you_mean
from hetexp.launch.environments.trial import TOLERANCE, Trial, try_interpreter

if TYPE_CHECKING:
    from rich.console import RenderableType

EXCHANGE_TOLERANCE = 1e-9
"""Largest relative difference of a float64 loss between one device and two interpreters' ranks."""

_RUN = (
    "hardware=cpu",
    "hardware.threads_per_rank=1",
    "model=mlp",
    "model.hidden_sizes=[16]",
    "data=synthetic",
    "data.num_samples=64",
    "data.num_test_samples=8",
    "logger=none",
    "monitor=none",
    "trainer.global_batch_size=16",
    "trainer.max_steps=4",
    "trainer.max_epochs=null",
    "trainer.precision=float64",
    "trainer.log_every=1",
)
"""A short training; its losses do not depend on the number of ranks."""


@dataclass
class CheckResult:
    """The result of an interpreter's check."""

    interpreter: Interpreter
    trial: Trial
    exchange: str = "not tried"
    problems: list[Problem] = field(default_factory=list)

    def problem(self, text: str, fix: str = "hetexp doctor") -> None:
        """Add a problem, and the command that fixes it or says more."""
        self.problems.append(Problem(text, fix))

    @property
    def devices(self) -> str:
        """Each device, and whether its results are right."""
        results = [
            f"{device} {'ok' if isinstance(error, float) and error <= TOLERANCE else 'wrong'}"
            for device, error in (self.trial.errors or {}).items()
        ]
        return ", ".join(results) or "not tried"


def selected(interpreters: Sequence[Interpreter], names: Sequence[str]) -> list[Interpreter]:
    """Return this process's interpreter and the named ones, or all if none is named.

    Raises:
        SetupError: a name is not recorded.
    """
    recorded = [interpreter.name for interpreter in interpreters]
    for name in names:
        if name not in recorded:
            hint = did_you_mean(name, recorded)
            raise SetupError(
                f"An environment must be one of {', '.join(recorded)}, but is '{name}' instead.{hint}"
            )
    return [it for it in interpreters if not names or it.name in (OWN, *names)]


def check(interpreters: Sequence[Interpreter]) -> list[CheckResult]:
    """Compute with each interpreter, and train with each beside the first, which is this process's own."""
    results = [_check_devices(interpreter) for interpreter in interpreters]
    this_process, *others = results
    usable = [result for result in others if not result.problems]
    if not usable or this_process.problems:
        return results
    reference, problem = _losses(["hardware.devices=[cpu]", "strategy=single"])
    if problem is not None:
        this_process.problem(f"Training on the CPU alone failed: {problem}")
        return results
    for result in usable:
        _check_exchange(result, reference)
    return results


def _check_devices(interpreter: Interpreter) -> CheckResult:
    trial = try_interpreter(interpreter.python)
    result = CheckResult(interpreter, trial)
    if trial.problem is not None:
        result.problem(f"it cannot be used: {trial.problem}.", repair_command(interpreter))
        return result
    errors = trial.errors or {}
    for device, error in errors.items():
        if isinstance(error, str):
            result.problem(f"{device} cannot compute: {error}.")
        elif not error <= TOLERANCE:  # NaN is wrong, too
            result.problem(
                f"{device} computes wrong: its float32 result differs from float64's by {error:.1e}, and at "
                f"most {TOLERANCE:g} is right. Another driver or build of torch (--torch) may help."
            )
    seen = [device for device in errors if device != "cpu"]
    if interpreter.visible and not seen:
        result.problem(f"its torch sees no card, though it should drive {', '.join(interpreter.visible)}.")
    return result


def _check_exchange(result: CheckResult, reference: Sequence[float]) -> None:
    """Train on two CPU ranks, one under each interpreter, and compare with a single rank."""
    fix = repair_command(result.interpreter)
    python = json.dumps(result.interpreter.python)
    devices = f"hardware.devices=[{{device: cpu}}, {{device: cpu, python: {python}}}]"
    losses, problem = _losses([devices, "strategy=ddp", "comm=gloo"])
    if problem is not None:
        result.exchange = "failed"
        result.problem(f"it cannot train together with this interpreter: {problem}", fix)
        return
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
    if difference <= EXCHANGE_TOLERANCE:
        result.exchange = "ok"
        return
    result.exchange = "wrong"
    result.problem(
        f"trained together with this interpreter, its losses differ from a single device's by "
        f"{difference:.1e}, and at most {EXCHANGE_TOLERANCE:g} is right.",
        fix,
    )


def _losses(overrides: Sequence[str]) -> tuple[list[float], str | None]:
    """Train as `hetexp train` does; return the loss of each step, and the reason if the run failed."""
    from rich.console import Console

    from hetexp.app import compose_config, run
    from hetexp.plan.run_spec import Request

    here = Path.cwd()
    folder = Path(tempfile.mkdtemp(prefix="hetexp-check-"))
    try:
        os.chdir(folder)  # the user's own conf/ must not change the run
        request = Request(folder / "run", folder)
        run(compose_config([*_RUN, *overrides]), request, Console(file=io.StringIO(), width=160))
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_bytes().splitlines()]
    except HetexpError as error:
        if isinstance(error, RunFailedError) and error.exit_code > 128:  # a signal ends the whole check
            shutil.rmtree(folder, ignore_errors=True)
            raise KeyboardInterrupt from None
        return [], f"{str(error).removesuffix('.')}. What it left is in {folder}."
    finally:
        os.chdir(here)
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    return [row["train/loss"] for row in rows if "train/loss" in row], None


def result_table(results: Sequence[CheckResult]) -> list[RenderableType]:
    """Return the table of all results, and below it the problems with their fixes."""
    from rich.text import Text

    rows = []
    for result in results:
        trial, name = result.trial, result.interpreter.name
        versions = [trial.python_version or "n/a", trial.torch_version or "n/a"]
        cells = [name, *versions, result.devices, "–" if name == OWN else result.exchange]
        rows.append([(cell, "red" if result.problems else "") for cell in cells])
    lines: list[RenderableType] = []
    problems = [(result.interpreter.name, problem) for result in results for problem in result.problems]
    for number, (name, problem) in enumerate(problems, start=1):
        lines.append(Text(f"{number}. {name}: {problem.text}"))
        lines.append(unbroken_line(f"{problem.fix}"))
    if not lines:
        lines.append("Nothing is wrong.")
        if len(results) == 1:
            lines.append(NO_ENVIRONMENT)
    return [table(("name", "Python", "torch", "devices", "trains with this"), rows), *lines]
