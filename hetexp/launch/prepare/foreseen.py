"""The plan that a run would have, as far as it can be known before its devices are measured."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from hetexp.core.compose.options import group_options
from hetexp.core.config import Config
from hetexp.core.instantiate import instantiate
from hetexp.core.plan import Plan
from hetexp.hardware.selection.pool import Selection
from hetexp.launch.prepare.choose_strategy import chosen
from hetexp.launch.prepare.known import known_of
from hetexp.launch.prepare.plan import best_split, memory_of, with_measured_split, with_memory
from hetexp.launch.prepare.planning import option_of
from hetexp.launch.prepare.stages import with_stages
from hetexp.plan import calibrations
from hetexp.plan.known import MEASURED
from hetexp.plan.measured import replanned
from hetexp.plan.planner import Request, in_one_process, make_plan


def foreseen(
    config: Config, raw: dict[str, Any], selection: Selection, request: Request
) -> tuple[Plan, list[str]]:
    """Return the plan of a configuration that `hetexp.app.check` has nothing against, and what is not known.

    Nothing is started: where a run would measure its devices first, the split follows the catalogue's
    figures, or is the one that they are measured with.

    Raises:
        ConfigError: a device has less memory than it needs, the model cannot be cut so, or `strategy=auto`
            finds none.
    """
    quiet = Console(file=io.StringIO())
    run, remarks = chosen(config, raw, selection, request, quiet), []
    if run.config.strategy != config.strategy:
        remarks.append(run.selection.reasons[-1])
    policy = option_of(config.balancing, group_options("balancing"))
    run.request.choices.setdefault("balancing", policy)
    config = run.config
    plan = make_plan(config, run.raw, run.selection, run.request)
    strategy = instantiate(config.strategy)
    if strategy.steps == "staged":
        return with_stages(plan, config), remarks
    plan = in_one_process(plan, strategy)
    memory = memory_of(plan, config)
    if not _would_measure(plan, config):
        return with_memory(with_measured_split(plan, config, memory, quiet), memory), remarks
    plan, remark = _before_measuring(plan, config, memory, policy)
    return with_memory(plan, memory), [*remarks, remark]


def _would_measure(plan: Plan, config: Config) -> bool:
    """Return whether a run of the plan would measure its devices before it trains."""
    policy = instantiate(config.balancing)
    if not policy.measures or plan.world_size < 2 or config.trainer.fast_dev_run:
        return False
    return policy.recalibrate or calibrations.find(plan, config) is None


def _before_measuring(plan: Plan, config: Config, memory: Any, policy: str) -> tuple[Plan, str]:
    """Return the plan with the best split that is known of, and the sentence that says what is not."""
    from hetexp.training.measuring.estimate import RunMemory

    built = memory
    if built is None:
        strategy = instantiate(config.strategy)
        built = RunMemory(config, plan.devices, plan.local_batch_sizes, plan.precisions, strategy)
    known = known_of(plan, config, built)
    first = f"A run measures its devices first (balancing={policy})"
    own = [one for one in known.devices if one is not None]
    if len(own) < plan.world_size:
        names = ", ".join(
            device.id for device, one in zip(plan.devices, known.devices, strict=True) if one is None
        )
        return plan, f"{first}; this split is where it begins, as nothing is known of {names}."
    devices, choice = best_split(plan, config, memory, own, known.exchange)
    plan = replanned(plan, devices, known.exchange.to_dict(), choice)
    source = " and ".join(dict.fromkeys(known.sources))
    if set(known.sources) == {MEASURED}:
        source = "measured before for another batch or strategy"
    return plan, f"{first}; this split and step are by figures {source}."
