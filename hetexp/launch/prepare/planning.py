"""What would come of a plan: every strategy and policy on its devices, on others, on clusters of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.compose.options import group_options
from hetexp.core.config import Config
from hetexp.core.errors import ConfigError, must_be
from hetexp.core.instantiate import check_component, instantiate
from hetexp.core.plan import Plan
from hetexp.hardware.catalogue import load_catalogue
from hetexp.hardware.selection.pool import Selection
from hetexp.launch.prepare.known import known_of, like_ddp, memory_of
from hetexp.launch.prepare.preparation import layers_of
from hetexp.plan.known import MEASURED, Known
from hetexp.plan.planner import check_plan, make_plan
from hetexp.plan.predict.as_json import prediction
from hetexp.plan.predict.inputs import Needs, Objective, PredictedRun, PredictionInputs
from hetexp.plan.predict.pick import pick, why_picked
from hetexp.plan.predict.runs import Prediction, predict_runs
from hetexp.plan.predict.scale import Scaled, scaled
from hetexp.plan.predict.what_if import Change, changed
from hetexp.plan.run_spec import RunSpec
from hetexp.plan.strategy import Strategy

if TYPE_CHECKING:
    from hetexp.training.measuring.estimate import RunMemory


@dataclass(frozen=True)
class Wanted:
    """What a person wants to know beside what the devices do as they are."""

    changes: tuple[Change, ...] = ()
    scale: int | None = None
    objective: Objective = "time"
    budget_watts: float | None = None


@dataclass(frozen=True)
class OtherPlan:
    """The plan of other devices."""

    plan: Plan
    kept: tuple[int | None, ...]
    """Of each device its place among those of the first plan, `None` for a new one."""


@dataclass(frozen=True)
class Foreseen:
    """All that was asked."""

    as_it_is: Prediction
    changes: tuple[Change, ...] = ()
    what_if: Prediction | None = None
    scaled: Scaled | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON."""
        return prediction(self.as_it_is, self.changes, self.what_if, self.scaled)


@dataclass
class Alternatives:
    """The strategies and policies that are configured somewhere, by the names of their options."""

    strategies: dict[str, Strategy] = field(default_factory=dict)
    policies: dict[str, BalancingPolicy] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Option → why it cannot be built."""
    own: dict[str, str] = field(default_factory=dict)
    """Group → option that the run itself has."""


def foresee(spec: RunSpec, wanted: Wanted, other: OtherPlan | None = None) -> Foreseen:
    """Predict a run on its devices as they are, and what else is wanted.

    Args:
        other: what `what_if` returned, if devices are changed.

    Raises:
        ConfigError: an option cannot be composed, or nothing is known of a device that a cluster is made of.
    """
    choices, plan = alternatives(spec), make_plan(spec)
    candidates = spec.strategy.candidates(lambda: choices.strategies, several_hosts(spec))
    base = like_ddp(spec) if candidates else spec
    first, second = predicted(base, plan, choices, wanted), None
    known = first.known
    if other is not None:
        second = predicted(base, other.plan, choices, wanted, other.kept, known)
        known = second.known
    first = _with_pick(first, candidates, choices)
    second = _with_pick(second, candidates, choices) if second is not None else None
    last = second or first
    cluster = None
    if wanted.scale is not None:
        if not last.known.complete:
            names = [str(d) for d, one in zip(last.plan.devices, known.devices, strict=True) if one is None]
            raise ConfigError(
                "`--scale` must repeat devices that the catalogue knows, but does not know "
                f"{', '.join(names)}{f': {known.reason}' if known.reason else ''}."
            )
        hardware = spec.config.hardware
        network = load_catalogue(hardware.catalogue).links[hardware.network]
        cluster = scaled(last.plan, last.known, wanted.scale, choices.policies, network)
    return Foreseen(first, wanted.changes, second, cluster)


def predicted(
    spec: RunSpec,
    plan: Plan,
    choices: Alternatives,
    wanted: Wanted = Wanted(),
    kept: Sequence[int | None] = (),
    old: Known | None = None,
) -> Prediction:
    """Predict some strategies with some policies on a plan's devices.

    Args:
        spec: the run, whose own strategy decides what its ranks need of their memory.
        kept: of each device its place among those of `old`, `None` for a new one.
        old: what is known of the devices before a change.
    """
    memory = memory_of(plan, spec)
    known, needs = _known(plan, spec, memory, kept, old)
    inputs = PredictionInputs(
        plan,
        known,
        choices.policies,
        needs,
        wanted.objective,
        wanted.budget_watts,
        partial(layers_of, plan, spec, memory),
    )
    asked = choices.strategies.items()
    checked = {name: " ".join(one.check_candidate(spec.config, plan.devices)) for name, one in asked}
    refusals = {name: refused for name, refused in checked.items() if refused}
    found = predict_runs(inputs, choices.strategies, choices.own["balancing"], refusals)
    return _with_problems(found, choices)


def what_if(changes: Sequence[Change], spec: RunSpec) -> OtherPlan:
    """Return the plan of the selected devices after some changes.

    Raises:
        ConfigError: everything that is wrong with the changes, or with the configuration on such devices.
    """
    selection, catalogue = spec.selection, load_catalogue(spec.config.hardware.catalogue)
    devices, kept = changed(selection.devices, changes, catalogue)
    other = spec.replaced(selection=Selection(devices, network=selection.network))
    problems = check_plan(other)
    if problems:
        raise ConfigError(
            [f"With --what-if {','.join(map(str, changes))}: {problem}" for problem in problems]
        )
    return OtherPlan(make_plan(other), tuple(kept))


def alternatives(spec: RunSpec) -> Alternatives:
    """Return every strategy and policy of the configuration folders, with the run's own settings of its own.

    An option that leaves a value for the person to give (`weights: ???`) is left out unless it is the run's.
    """
    found, config = Alternatives(), spec.config
    groups: list[tuple[str, Mapping[str, Any], Any, dict[str, Any]]] = [
        ("strategy", config.strategy, spec.strategy, found.strategies),
        ("balancing", config.balancing, spec.policy, found.policies),
    ]
    for group, own, ours, built in groups:
        nodes = group_options(group)
        name = option_of(own, nodes)
        nodes[name] = dict(own)
        found.own[group] = name
        for option, node in nodes.items():
            if option == name:
                built[option] = ours
                continue
            if "???" in node.values():
                continue
            problems = check_component(group, node)
            try:
                if not problems:
                    built[option] = instantiate(node)
            except ConfigError as error:
                problems = error.problems
            if problems:
                found.problems[f"{group}={option}"] = " ".join(problems)
    return found


def several_hosts(spec: RunSpec) -> bool:
    """Return whether a network is between some of a run's devices."""
    return len({device.host for device in spec.selection.devices}) > 1


def option_of(own: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the option that a run's own section comes from: the one that differs least."""
    alike = [name for name, node in nodes.items() if node.get("_target_") == own["_target_"]]
    if not alike:
        return str(own["_target_"].rpartition(".")[2].lower())
    return min(alike, key=lambda name: sum(own.get(key) != value for key, value in nodes[name].items()))


def check_scale(scale: int | None, config: Config) -> list[str]:
    """Return what is wrong with a wish for a cluster, as far as it can be known beforehand."""
    links = load_catalogue(config.hardware.catalogue).links
    if scale is None or config.hardware.network in links:
        return []
    return [must_be("hardware.network", f"one of {', '.join(sorted(links))}", config.hardware.network)]


def _known(
    plan: Plan, spec: RunSpec, memory: RunMemory, kept: Sequence[int | None] = (), old: Known | None = None
) -> tuple[Known, Needs | None]:
    """Return what is known of a plan's devices within their memory, and what tells a split's.

    Args:
        kept: of each device its place among those of `old`, `None` for a new one.
        old: what is known of the devices before a change.
    """
    known = known_of(plan, spec, memory)
    if old is not None and set(known.sources) != {MEASURED}:
        known = known.mixed(kept, old)
    if not spec.config.hardware.check_memory:
        return known, None

    def needs(ranks: Sequence[int], counts: Sequence[int]) -> list[int | None]:
        devices = [plan.devices[rank] for rank in ranks]
        precisions = [plan.precisions[rank] for rank in ranks]
        sizes = [size or None for size in memory.of(devices, counts, precisions).largest_passes(counts)]
        estimates = memory.of(devices, counts, precisions, sizes).estimates
        return [one.total_bytes if one is not None else None for one in estimates]

    whole = [spec.config.trainer.global_batch_size] * plan.world_size
    passes = [size or None for size in memory.largest_passes(whole)]
    return known.limited(memory.caps(), passes), needs


def _with_pick(found: Prediction, candidates: Collection[str], choices: Alternatives) -> Prediction:
    """Return a prediction that says which of the candidates would be taken, if there are any."""
    of_candidates = replace(found, rows=tuple(row for row in found.rows if row.strategy in candidates))
    row = pick(of_candidates, choices.own["balancing"])
    if row is None:
        return found
    return replace(found, reasons=(*found.reasons, why_picked(row, of_candidates)))


def _with_problems(found: Prediction, choices: Alternatives) -> Prediction:
    rows = []
    for option, why in choices.problems.items():
        group, _, name = option.partition("=")
        rows.append(
            PredictedRun(None, problem=why, strategy=name)
            if group == "strategy"
            else PredictedRun(name, problem=why)
        )
    return replace(found, rows=(*found.rows, *rows))
