"""`strategy=auto`: the strategy that is predicted to be the fastest takes its place before the plan is made.

Every exact strategy that can run on the chosen devices is predicted with the run's own policy, by what was
measured of the devices and kept, else by the catalogue; nothing is started for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from hetexp.core.compose.options import group_options
from hetexp.core.config import Config
from hetexp.core.errors import ConfigError, did_you_mean, must_be
from hetexp.core.instantiate import instantiate
from hetexp.core.plan import Plan
from hetexp.hardware.selection.pool import Selection
from hetexp.launch.prepare.arrange import arranged
from hetexp.launch.prepare.known import like_ddp
from hetexp.launch.prepare.plan import Measure, memory_of, with_measured_split
from hetexp.launch.prepare.planning import Alternatives, alternatives, predicted
from hetexp.launch.terminal.prediction import show_forecast
from hetexp.plan.planner import Request, check_plan, make_plan
from hetexp.plan.predict.pick import BETWEEN_HOSTS, pick, why_picked
from hetexp.strategy.auto import Auto


@dataclass(frozen=True)
class Chosen:
    """A run as it goes on."""

    config: Config
    raw: dict[str, Any]
    selection: Selection
    request: Request


def chosen(
    config: Config,
    raw: dict[str, Any],
    selection: Selection,
    request: Request,
    console: Console,
    measure_by: Measure | None = None,
) -> Chosen:
    """Return a run with the strategy that is picked where it has `strategy=auto`; else as it is.

    The table and the reason are printed. A strategy for one device also leaves one device.

    Args:
        measure_by: lets ranks that are there already measure their devices, where the policy asks for it;
            `None`: nothing is started.

    Raises:
        ConfigError: no strategy can run on these devices.
    """
    strategy = instantiate(config.strategy)
    if not isinstance(strategy, Auto):
        return Chosen(config, raw, selection, request)
    choices = _candidates(strategy, config, len({device.host for device in selection.devices}) > 1)
    base, base_raw = like_ddp(config), {**raw, "strategy": like_ddp(config).strategy}
    plan = make_plan(base, base_raw, selection, request)
    if measure_by is not None:  # the ranks are there
        with_measured_split(plan, base, memory_of(plan, base), console, measure_by)
    found = predicted(plan, base, choices)
    run, refused = Chosen(config, raw, selection, request), []
    while (row := pick(found, choices.own["balancing"])) is not None:
        alone = choices.strategies[row.strategy].solo
        ranks = row.ranks if alone else range(len(selection.devices))
        other = _with(run, row.strategy, why_picked(row, found), ranks)
        problems = check_plan(other.config, other.selection)
        if not problems:
            show_forecast(replace(found, best=row, reasons=()), console)
            return _say_reason(other, console)
        refused += problems
        found = replace(found, rows=tuple(one for one in found.rows if one.strategy != row.strategy))
    if found.known.complete:
        why = dict.fromkeys(one.problem for one in found.rows if one.problem is not None)
        raise ConfigError([*refused, *why])
    name, reason = _without_figures(plan, base, choices)
    return _say_reason(_with(run, name, reason, range(len(selection.devices))), console)


def _with(run: Chosen, name: str, reason: str, ranks: Sequence[int]) -> Chosen:
    """Return a run of some of its devices with a strategy as its option has it."""
    node = group_options("strategy", only=[name])[name]
    return Chosen(
        run.config.model_copy(update={"strategy": node}),
        {**run.raw, "strategy": node | ({"fallback": run.config.fallback} if run.config.fallback else {})},
        replace(
            run.selection,
            devices=[run.selection.devices[rank] for rank in ranks],
            reasons=[*run.selection.reasons, reason],
        ),
        replace(run.request, choices={**run.request.choices, "strategy": name}),
    )


def _say_reason(run: Chosen, console: Console) -> Chosen:
    console.print(f"→ {run.selection.reasons[-1]}", markup=False, highlight=False, soft_wrap=True)
    return run


def _candidates(strategy: Auto, config: Config, several_hosts: bool) -> Alternatives:
    """Return the strategies to pick from, with the run's own policy.

    Args:
        several_hosts: whether a network is between some of the devices.

    Raises:
        ConfigError: a name of `strategy.among` is none of an exact strategy.
    """
    choices = alternatives(config)
    exact = {name: one for name, one in choices.strategies.items() if one.exact}
    wanted = strategy.among if strategy.among is not None else list(exact)
    accepted = "a list of " + ", ".join(sorted(exact))
    problems = [
        must_be("strategy.among", accepted, name, did_you_mean(name, exact).strip())
        for name in wanted
        if name not in exact
    ]
    if problems:
        raise ConfigError(problems)
    own = choices.own["balancing"]
    candidates = {name: exact[name] for name in wanted}
    if several_hosts and strategy.between_hosts and BETWEEN_HOSTS in choices.strategies:
        candidates[BETWEEN_HOSTS] = choices.strategies[BETWEEN_HOSTS]
    return replace(
        choices,
        strategies=candidates,
        policies={own: choices.policies[own]},
        problems={},
    )


def _without_figures(plan: Plan, config: Config, choices: Alternatives) -> tuple[str, str]:
    """Return the strategy where nothing is predicted, and why: a replica a device, if each holds the model.

    Raises:
        ConfigError: no strategy fits.
    """
    why = "nothing is known of the devices' speeds, neither by measurement nor by the catalogue"
    alone = "single" if plan.world_size == 1 else "ddp"
    memory = memory_of(plan, config)
    problems = memory.problems() if memory is not None else []
    if alone in choices.strategies and not problems:
        return alone, f"strategy=auto takes {alone}: {why}, so that nothing else is predicted to be faster."
    because = "no device alone holds the model" if problems else f"{alone} is not among those wanted"
    for name, strategy in choices.strategies.items():
        objections = [] if strategy.solo else strategy.check(config, plan.devices)
        if strategy.predicted_as == "stages" and not objections:
            node = group_options("strategy", only=[name])[name]
            try:
                arranged(plan, config.model_copy(update={"strategy": node}))
            except ConfigError as error:
                objections = error.problems
        elif not objections and problems:
            continue  # it needs the model whole, too
        if not objections:
            return name, f"strategy=auto takes {name}: {why}, and {because}."
        problems += [problem for problem in objections if problem not in problems]
    raise ConfigError(problems)
