"""`strategy=auto`: the strategy that is predicted to be the fastest takes its place before the plan is made.

Every exact strategy that can run on the chosen devices is predicted with the run's own policy, by what was
measured of the devices and kept, else by the catalogue; nothing is started for it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from rich.console import Console

from hetexp.core.compose.options import group_options
from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.launch.prepare.known import like_ddp
from hetexp.launch.prepare.planning import Alternatives, alternatives, option_of, predicted, several_hosts
from hetexp.launch.prepare.preparation import Measure, Preparation
from hetexp.launch.terminal.prediction import show_forecast
from hetexp.plan.planner import check_plan, make_plan
from hetexp.plan.predict.pick import pick, why_picked
from hetexp.plan.run_spec import RunSpec


def select_strategy(spec: RunSpec, console: Console, measure: Measure | None = None) -> RunSpec:
    """Return a run with the strategy that is picked if it has `strategy=auto`; else as it is.

    The table and the reason are printed. A strategy for one device also leaves one device.

    Args:
        measure: lets ranks that are there already measure their devices, if the policy asks for it; `None`:
            nothing is started.

    Raises:
        ConfigError: no strategy can run on these devices.
    """
    offered = cache(partial(alternatives, spec))
    candidates = spec.strategy.candidates(lambda: offered().strategies, several_hosts(spec))
    if not candidates:
        return spec
    choices = offered()
    name = choices.own["balancing"]
    policies = {name: choices.policies[name]}
    choices = replace(choices, strategies=dict(candidates), policies=policies, problems={})
    base = like_ddp(spec)
    plan = make_plan(base)
    if measure is not None:  # the ranks are there
        preparation = Preparation(base, measure)
        preparation.split(plan, preparation.memory(plan))
    found, refused = predicted(base, plan, choices), []
    while (row := pick(found, name)) is not None:
        # A row without a policy is of one device.
        ranks = row.ranks if row.policy is None else range(len(plan.devices))
        other = _with(spec, row.strategy, why_picked(row, found), ranks)
        problems = check_plan(other)
        if not problems:
            show_forecast(replace(found, best=row, reasons=()), console)
            return _say_reason(other, console)
        refused += problems
        found = replace(found, rows=tuple(one for one in found.rows if one.strategy != row.strategy))
    if found.known.complete:
        why = dict.fromkeys(one.problem for one in found.rows if one.problem is not None)
        raise ConfigError([*refused, *why])
    return _say_reason(_without_figures(spec, base, plan, choices), console)


def foreseen(spec: RunSpec) -> tuple[RunSpec, Plan, list[str]]:
    """Return a checked run with its final strategy, the plan that it would have, and what is not known of it.

    Nothing is started: if a run would measure its devices first, the split follows the catalogue's figures,
    or is the one that they are measured with.

    Raises:
        ConfigError: a device has less memory than it needs, the model cannot be cut so, or `strategy=auto`
            finds none.
    """
    run = select_strategy(spec, Console(file=io.StringIO()))
    remarks = [run.selection.reasons[-1]] if run is not spec else []
    policy = option_of(run.config.balancing, group_options("balancing"))
    choices = {"balancing": policy, **run.request.choices}
    run = run.replaced(request=replace(run.request, choices=choices))
    preparation = Preparation(run)
    plan = run.strategy.prepare(make_plan(run), preparation)
    return run, plan, remarks + preparation.remarks


def _with(spec: RunSpec, name: str, reason: str, ranks: Sequence[int]) -> RunSpec:
    """Return a run of some of its devices with a strategy as its option has it."""
    devices = [spec.selection.devices[rank] for rank in ranks]
    selection = replace(spec.selection, devices=devices, reasons=[*spec.selection.reasons, reason])
    request = replace(spec.request, choices={**spec.request.choices, "strategy": name})
    node = group_options("strategy", only=[name])[name]
    return spec.with_values(strategy=node).replaced(selection=selection, request=request)


def _say_reason(spec: RunSpec, console: Console) -> RunSpec:
    console.print(f"→ {spec.selection.reasons[-1]}", markup=False, highlight=False, soft_wrap=True)
    return spec


def _without_figures(spec: RunSpec, base: RunSpec, plan: Plan, choices: Alternatives) -> RunSpec:
    """Return the run if nothing is predicted: a replica a device, if each holds the model.

    Raises:
        ConfigError: no strategy fits.
    """
    why = "nothing is known of the devices' speeds, neither by measurement nor by the catalogue"
    alone = "single" if plan.world_size == 1 else "ddp"
    memory = Preparation(base).memory(plan)
    problems = memory.problems() if memory is not None else []
    ranks = range(plan.world_size)
    if alone in choices.strategies and not problems:
        reason = f"strategy=auto takes {alone}: {why}, so that nothing else is predicted to be faster."
        return _with(spec, alone, reason, ranks)
    because = "no device alone holds the model" if problems else f"{alone} is not among those wanted"
    for name in choices.strategies:
        run = _with(spec, name, f"strategy=auto takes {name}: {why}, and {because}.", ranks)
        objections = run.strategy.check(run.config, run.selection.devices)
        if not objections:
            try:
                run.strategy.prepare(make_plan(run), Preparation(run))
                return run
            except ConfigError as error:
                objections = error.problems
        problems += [problem for problem in objections if problem not in problems]
    raise ConfigError(problems)
