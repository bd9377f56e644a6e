"""`strategy=auto`: the strategy with the shortest predicted step takes its place before the plan is made.

Every exact strategy that can run on the chosen devices is predicted with the run's own policy. The prediction
uses kept measurements of the devices, else the catalogue, and starts nothing.
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
from hetexp.launch.prepare.estimates import with_ddp
from hetexp.launch.prepare.planning import (
    Alternatives,
    alternatives,
    option_of,
    predict_strategies,
    several_hosts,
)
from hetexp.launch.prepare.preparation import Measure, Preparation
from hetexp.launch.terminal.lines import print_line
from hetexp.launch.terminal.prediction import show_prediction
from hetexp.plan.planner import check_plan, make_plan
from hetexp.plan.predict.pick import pick, why_picked
from hetexp.plan.run_spec import RunSpec


def select_strategy(spec: RunSpec, console: Console, measure: Measure | None = None) -> RunSpec:
    """Return a run with the strategy that `strategy=auto` picks; a run with another strategy as it is.

    The table and the reason are printed. A strategy for one device also selects that device.

    Args:
        measure: lets running ranks measure their devices, if the policy needs it; `None`: nothing is started.

    Raises:
        ConfigError: no strategy can run on these devices.
    """
    all_choices = cache(partial(alternatives, spec))
    candidates = spec.strategy.candidates(lambda: all_choices().strategies, several_hosts(spec))
    if not candidates:
        return spec
    choices = all_choices()
    name = choices.own["balancing"]
    policies = {name: choices.policies[name]}
    choices = replace(choices, strategies=dict(candidates), policies=policies, problems={})
    base = with_ddp(spec)
    plan = make_plan(base)
    if measure is not None:  # the ranks run already
        preparation = Preparation(base, measure)
        preparation.split(plan, preparation.memory(plan))
    prediction, refused = predict_strategies(base, plan, choices), []
    while (row := pick(prediction, name)) is not None:
        # A row without a policy has one device.
        ranks = row.ranks if row.policy is None else range(len(plan.devices))
        picked = _with(spec, row.strategy, why_picked(row, prediction), ranks)
        problems = check_plan(picked)
        if not problems:
            show_prediction(replace(prediction, best=row, reasons=()), console)
            return _print_reason(picked, console)
        refused += problems
        others = tuple(other for other in prediction.rows if other.strategy != row.strategy)
        prediction = replace(prediction, rows=others)
    if prediction.estimates.complete:
        why = dict.fromkeys(row.problem for row in prediction.rows if row.problem is not None)
        raise ConfigError([*refused, *why])
    return _print_reason(_without_prediction(spec, base, plan, choices), console)


def preview(spec: RunSpec) -> tuple[RunSpec, Plan, list[str]]:
    """Return a checked run with its final strategy, its probable plan, and remarks on what is not known.

    Nothing is started. If a run would measure its devices first, the split follows the catalogue, or it is
    the one with which they are measured.

    Raises:
        ConfigError: a device has too little memory, the model cannot be cut into these stages, or
            `strategy=auto` finds no strategy.
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
    """Return the run on some of its devices with the option of a strategy."""
    devices = [spec.selection.devices[rank] for rank in ranks]
    selection = replace(spec.selection, devices=devices, reasons=[*spec.selection.reasons, reason])
    request = replace(spec.request, choices={**spec.request.choices, "strategy": name})
    node = group_options("strategy", only=[name])[name]
    return spec.with_values(strategy=node).replaced(selection=selection, request=request)


def _print_reason(spec: RunSpec, console: Console) -> RunSpec:
    print_line(console, f"→ {spec.selection.reasons[-1]}")
    return spec


def _without_prediction(spec: RunSpec, base: RunSpec, plan: Plan, choices: Alternatives) -> RunSpec:
    """Return the run without a prediction: with a replica on each device, if each holds the model.

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
    because = "no device alone holds the model" if problems else f"{alone} is not among the candidates"
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
