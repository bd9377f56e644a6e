"""The process that checks and predicts for the server, with torch: by the same functions as the command line.

It reads one JSON object a line from standard input, and answers each with one. Whatever a model's code prints
goes to standard error. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.core.errors import ConfigError, HetexpError

if TYPE_CHECKING:
    from hetexp.core.config import Config
    from hetexp.core.plan import Plan
    from hetexp.hardware.selection.pool import Selection

Answer = dict[str, Any]
_FIRST = ("hardware.devices=[cpu,cpu]", "hardware.cards=null")
"""A warm-up question: its answer imports what the answers to users' questions need, too."""


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.append(str(Path.cwd()))  # a person's own classes, as for `hetexp train`
    work: dict[str, Callable[[Sequence[str], Sequence[str]], Answer]] = {
        "check": checked,
        "estimate": estimated,
    }
    with contextlib.suppress(Exception):  # a user's question reports what is wrong
        estimated(_FIRST, ("cpu", "cpu"))
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = work[order["kind"]](order["words"], order["gpu_ids"])
        except HetexpError as error:
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            answer = {"problems": problems}
        except Exception as error:  # a person's own classes run any code
            answer = {"problems": [f"The configuration cannot be checked: {type(error).__name__}: {error}"]}
        answers.write(json.dumps(answer, allow_nan=False) + "\n")
        answers.flush()


def checked(words: Sequence[str], gpu_ids: Sequence[str]) -> Answer:
    """Return what is wrong with a training, or what its row tells before it starts.

    A card that another run holds is none of its problems: the training waits for it.
    """
    raw, config, selection = _composed(words)
    from hetexp.core.compose.options import group_options
    from hetexp.launch.prepare.planning import option_of

    return {
        "problems": [],
        "strategy": option_of(config.strategy, group_options("strategy")),
        "balancing": option_of(config.balancing, group_options("balancing")),
        "name": config.name,
        "emulated": any(device.emulated for device in selection.devices),
    }


def estimated(words: Sequence[str], gpu_ids: Sequence[str]) -> Answer:
    """Return what a step would be on the chosen devices, with the shapes that the API documents."""
    from hetexp.launch.prepare.foreseen import foreseen
    from hetexp.plan.planner import Request, make_plan

    raw, config, selection = _composed(words)
    here = Path.cwd()
    request = Request(here / "estimate", here, overrides=tuple(words))
    whole = make_plan(config, raw, selection, request)
    problem: str | None = None
    notes: list[str] = []
    try:
        plan, notes = foreseen(config, raw, selection, request)
    except ConfigError as error:  # it does not fit
        problem = " ".join(error.problems)
        plan = whole
    step, best = (None, []) if problem else _predicted(plan, whole, config)
    chosen = {device.id: own for device, own in zip(selection.devices, gpu_ids, strict=True)}
    return {
        "problems": [],
        "effective_batch_size": config.trainer.global_batch_size,
        "per_device": [_of_device(plan, place, chosen, problem) for place in range(len(plan.all_devices))],
        "recommended": [chosen[name] for name in best if name in chosen],
        "predicted_step_seconds": step,
        "problem": problem,
        "notes": [*notes, *selection.reasons],
    }


def _composed(words: Sequence[str]) -> tuple[dict[str, Any], Config, Selection]:
    """Compose and check as `hetexp train` does.

    Raises:
        ConfigError: everything that is wrong.
    """
    from hetexp.app import check, register_resolvers
    from hetexp.core.compose.overrides import compose_typed
    from hetexp.hardware.selection.pool import Selection

    register_resolvers()
    composed, problems = compose_typed(words)
    if composed is None:
        raise ConfigError(problems)
    raw, config, selection, wrong = check(composed, Path.cwd(), leases=False)
    problems += wrong
    if problems or config is None or not isinstance(selection, Selection):
        raise ConfigError(list(dict.fromkeys(problems)))
    return raw, config, selection


def _predicted(plan: Plan, whole: Plan, config: Config) -> tuple[float | None, list[str]]:
    """Return the predicted step of a plan's own strategy and policy, and the devices that serve it best.

    Args:
        whole: the plan of all chosen devices, of which that one may leave some out.
    """
    from dataclasses import replace

    from hetexp.launch.prepare.known import like_ddp
    from hetexp.launch.prepare.planning import Alternatives, Wanted, alternatives, predicted

    choices: Alternatives = alternatives(config)
    config = like_ddp(config) if choices.picks else config
    name = plan.strategy if plan.strategy in choices.strategies else choices.own["strategy"]
    own = {key: one for key, one in choices.strategies.items() if key == name} or choices.strategies
    choices = replace(choices, strategies=own, problems={})
    found = predicted(whole, config, choices, Wanted())
    mine = [row for row in found.rows if row.predicted and row.policy in (None, choices.own["balancing"])]
    step = mine[0].step_seconds if mine else found.best.step_seconds if found.best else None
    row = found.best or (mine[0] if mine else None)
    if row is None:
        return plan.predicted_step_seconds or step, []
    taking = zip(row.ranks, row.counts or (1,) * len(row.ranks), strict=True)
    return step, [whole.devices[rank].id for rank, count in taking if count]


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
