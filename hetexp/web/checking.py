"""The process that checks and predicts for the server, with torch and the functions of the command line.

It reads one JSON object a line from standard input, and answers each with one line. Prints of a model's code
go to standard error. The process ends when its standard input ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.core.errors import ConfigError, HetexpError, logged

if TYPE_CHECKING:
    from hetexp.core.plan import Plan
    from hetexp.plan.run_spec import RunSpec

Answer = dict[str, Any]
_FIRST = ("hardware.devices=[cpu,cpu]", "hardware.cards=null")
"""A warm-up question: its answer does the imports for later questions."""


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.append(str(Path.cwd()))  # the user's own classes, as for `hetexp train`
    functions: dict[str, Callable[[Sequence[str], Sequence[str]], Answer]] = {
        "check": checked,
        "estimate": estimated,
    }
    with logged("the first estimate, which imports what later ones need, failed"):
        estimated(_FIRST, ("cpu", "cpu"))
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = functions[question["kind"]](question["words"], question["gpu_ids"])
        except HetexpError as error:
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            answer = {"problems": problems}
        except Exception as error:  # the user's own classes run any code
            answer = {"problems": [f"The configuration cannot be checked: {type(error).__name__}: {error}"]}
        answers.write(json.dumps(answer, allow_nan=False) + "\n")
        answers.flush()


def checked(words: Sequence[str], gpu_ids: Sequence[str]) -> Answer:
    """Return the problems of a training, or the facts of its row before it starts.

    A card that another run holds is no problem: the training waits for it.
    """
    from hetexp.core.compose.options import group_options
    from hetexp.launch.prepare.planning import option_of

    spec = _composed(words)
    config = spec.config
    return {
        "problems": [],
        "strategy": option_of(config.strategy, group_options("strategy")),
        "balancing": option_of(config.balancing, group_options("balancing")),
        "name": config.name,
        "emulated": any(device.emulated for device in spec.selection.devices),
    }


def estimated(words: Sequence[str], gpu_ids: Sequence[str]) -> Answer:
    """Return the prediction of a step on the chosen devices, in the form of `hetexp.web.schemas.Estimate`."""
    from hetexp.launch.prepare.select_strategy import preview
    from hetexp.plan.planner import make_plan

    spec = _composed(words)
    selection, run = spec.selection, spec
    problem: str | None = None
    notes: list[str] = []
    try:
        run, plan, notes = preview(spec)
    except ConfigError as error:  # it does not fit
        problem, plan = " ".join(error.problems), make_plan(spec)
    step, best = (None, []) if problem else _predicted(run, plan)
    chosen = {device.id: own for device, own in zip(selection.devices, gpu_ids, strict=True)}
    return {
        "problems": [],
        "effective_batch_size": spec.config.trainer.global_batch_size,
        "per_device": [_of_device(plan, place, chosen, problem) for place in range(len(plan.all_devices))],
        "recommended": [chosen[name] for name in best if name in chosen],
        "predicted_step_seconds": step,
        "problem": problem,
        "notes": [*notes, *selection.reasons],
    }


def _composed(words: Sequence[str]) -> RunSpec:
    """Compose and check as `hetexp train` does.

    Raises:
        ConfigError: all problems of the configuration.
    """
    from hetexp.app import compose_and_check
    from hetexp.plan.run_spec import Request

    here = Path.cwd()
    request = Request(here / "estimate", here, overrides=tuple(words))
    return compose_and_check(words, request, leases=False).accepted()


def _predicted(run: RunSpec, plan: Plan) -> tuple[float | None, list[str]]:
    """Return the predicted step of a run's own strategy and policy, and the ids of the best devices.

    Args:
        plan: the final plan, which may leave some of the run's devices out.
    """
    from dataclasses import replace

    from hetexp.launch.prepare.planning import alternatives, predict_strategies
    from hetexp.plan.planner import make_plan

    choices = alternatives(run)
    choices = replace(choices, strategies={choices.own["strategy"]: run.strategy}, problems={})
    prediction = predict_strategies(run, make_plan(run), choices)
    policies = (None, choices.own["balancing"])
    own = next((row for row in prediction.rows if row.predicted and row.policy in policies), prediction.best)
    best = prediction.best or own
    step = own.step_seconds if own is not None else None
    if best is None:
        return plan.predicted_step_seconds or step, []
    counts = zip(best.ranks, best.counts or (1,) * len(best.ranks), strict=True)
    return step, [run.selection.devices[rank].id for rank, count in counts if count]


def _of_device(plan: Plan, place: int, chosen: dict[str, str], problem: str | None) -> Answer:
    device = plan.all_devices[place]
    rank, local = plan.rank_of(place), plan.batch_size_of(place)
    limit = plan.microbatch_size(rank)
    memory = plan.memory_bytes[rank] if plan.memory_bytes else None
    named = problem is not None and device.id in problem
    return {
        "id": chosen.get(device.id, device.id),
        "device": device.id,
        "name": device.name,
        "local_batch_size": local,
        "micro_batch_size": min(local, limit) if limit is not None else local,
        "memory_bytes": memory,
        "memory_total_bytes": device.memory_bytes,
        "fits": False if named else None if memory is None or device.memory_bytes is None else True,
    }
