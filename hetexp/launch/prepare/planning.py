"""Predictions for `hetexp plan`: every strategy and policy on the devices, on other ones, and on clusters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.compose.options import group_options
from hetexp.core.config import Config
from hetexp.core.config.trainer import how_it_ends
from hetexp.core.cost.calibration import DeviceCalibration
from hetexp.core.errors import ConfigError, must_be
from hetexp.core.instantiate import check_component, instantiate
from hetexp.core.plan import Plan
from hetexp.hardware.catalogue import load_catalogue
from hetexp.hardware.selection.pool import Selection
from hetexp.launch.prepare.estimates import estimate_devices, estimate_memory, with_ddp
from hetexp.launch.prepare.preparation import layers_of
from hetexp.plan.device_estimates import MEASURED, DeviceEstimates
from hetexp.plan.planner import check_plan, make_plan
from hetexp.plan.predict.answer import answer
from hetexp.plan.predict.as_json import prediction_json
from hetexp.plan.predict.inputs import Objective, PredictedRun, PredictionInputs
from hetexp.plan.predict.paying_batch import LARGEST_MULTIPLE, BatchPrediction, batch_predictor, paying_batch
from hetexp.plan.predict.pick import pick, why_picked
from hetexp.plan.predict.runs import Prediction, predict_runs
from hetexp.plan.predict.scale import Scaled, scaled
from hetexp.plan.predict.what_if import Change, changed
from hetexp.plan.run_spec import RunSpec
from hetexp.plan.strategy import Strategy

if TYPE_CHECKING:
    from hetexp.training.measuring.estimate import RunMemory


@dataclass(frozen=True)
class PredictionRequest:
    """Options of a prediction."""

    changes: tuple[Change, ...] = ()
    scale: int | None = None
    objective: Objective = "time"
    budget_watts: float | None = None


@dataclass(frozen=True)
class ChangedPlan:
    """The plan of changed devices."""

    plan: Plan
    kept: tuple[int | None, ...]
    """Each device's place in the first plan; `None` for a new device."""


@dataclass(frozen=True)
class RunPrediction:
    """The predictions of a run."""

    as_it_is: Prediction
    changes: tuple[Change, ...] = ()
    what_if: Prediction | None = None
    scaled: Scaled | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON."""
        return prediction_json(self.as_it_is, self.changes, self.what_if, self.scaled)


@dataclass
class Alternatives:
    """The strategies and policies of the configuration folders, by the names of their options."""

    strategies: dict[str, Strategy] = field(default_factory=dict)
    policies: dict[str, BalancingPolicy] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Option → why it cannot be built."""
    own: dict[str, str] = field(default_factory=dict)
    """Group → option of the run."""


def predict_run(
    spec: RunSpec, request: PredictionRequest, changed_plan: ChangedPlan | None = None
) -> RunPrediction:
    """Predict a run on its devices, on changed ones, and on a cluster of them.

    Args:
        changed_plan: the result of `what_if`, if devices are changed.

    Raises:
        ConfigError: an option cannot be composed, or the speed of a cluster's device is not known.
    """
    choices, plan = alternatives(spec), make_plan(spec)
    candidates = spec.strategy.candidates(lambda: choices.strategies, several_hosts(spec))
    base = with_ddp(spec) if candidates else spec
    first, second = predict_strategies(base, plan, choices, request, search=True), None
    estimates = first.estimates
    if changed_plan is not None:
        second = predict_strategies(
            base, changed_plan.plan, choices, request, changed_plan.kept, estimates, search=True
        )
        estimates = second.estimates
    first = _with_pick(first, candidates, choices)
    second = _with_pick(second, candidates, choices) if second is not None else None
    last = second or first
    cluster = None
    if request.scale is not None:
        if not last.estimates.complete:
            pairs = zip(last.plan.devices, estimates.devices, strict=True)
            names = [str(device) for device, calibration in pairs if calibration is None]
            raise ConfigError(
                "`--scale` must repeat devices that the catalogue knows, but does not know "
                f"{', '.join(names)}{f': {estimates.reason}' if estimates.reason else ''}."
            )
        hardware = spec.config.hardware
        network = load_catalogue(hardware.catalogue).links[hardware.network]
        cluster = scaled(last.plan, last.estimates, request.scale, choices.policies, network)
    return RunPrediction(first, request.changes, second, cluster)


def predict_strategies(
    spec: RunSpec,
    plan: Plan,
    choices: Alternatives,
    request: PredictionRequest = PredictionRequest(),
    kept: Sequence[int | None] = (),
    old: DeviceEstimates | None = None,
    search: bool = False,
) -> Prediction:
    """Predict some strategies with some policies on a plan's devices.

    Args:
        spec: the run, whose strategy decides the memory of its ranks.
        kept: each device's place in `old`; `None` for a new device.
        old: estimates of the devices before a change.
        search: whether to answer in a sentence; if the best row leaves devices out, larger batches are tried.
    """
    memory = estimate_memory(plan, spec)
    unlimited = estimate_devices(plan, spec, memory)
    if old is not None and set(unlimited.sources) != {MEASURED}:
        unlimited = unlimited.mixed(kept, old)
    check = spec.config.hardware.check_memory
    estimates = _limited(unlimited, memory, spec.config.trainer.global_batch_size) if check else unlimited
    needs = partial(_needs, plan, memory) if check else None
    inputs = PredictionInputs(
        plan,
        estimates,
        choices.policies,
        needs,
        request.objective,
        request.budget_watts,
        partial(layers_of, plan, spec, memory),
    )
    problems = {
        name: strategy.check_candidate(spec.config, plan.devices)
        for name, strategy in choices.strategies.items()
    }
    refusals = {name: " ".join(sentences) for name, sentences in problems.items() if sentences}
    prediction = predict_runs(inputs, choices.strategies, choices.own["balancing"], refusals)
    ends = how_it_ends(spec.config.trainer, memory.steps_per_epoch)
    prediction = replace(_with_problems(prediction, choices), ends=ends)
    if not search or request.objective != "time":
        return replace(prediction, answer=prediction.reasons[0] if search else "")
    paying = _paying_batch(inputs, prediction, unlimited, memory if check else None)
    return replace(prediction, paying=paying, answer=answer(replace(prediction, paying=paying)))


def what_if(changes: Sequence[Change], spec: RunSpec) -> ChangedPlan:
    """Return the plan of the selected devices after some changes.

    Raises:
        ConfigError: everything that is wrong with the changes, or with the configuration on these devices.
    """
    selection, catalogue = spec.selection, load_catalogue(spec.config.hardware.catalogue)
    devices, kept = changed(selection.devices, changes, catalogue)
    changed_spec = spec.replaced(selection=Selection(devices, network=selection.network))
    problems = check_plan(changed_spec)
    if problems:
        raise ConfigError(
            [f"With --what-if {','.join(map(str, changes))}: {problem}" for problem in problems]
        )
    return ChangedPlan(make_plan(changed_spec), tuple(kept))


def alternatives(spec: RunSpec) -> Alternatives:
    """Return every strategy and policy of the configuration folders; the run's own have its settings.

    An option with a missing value (`weights: ???`) is left out, unless the run has it.
    """
    choices, config = Alternatives(), spec.config
    groups: list[tuple[str, Mapping[str, Any], Any, dict[str, Any]]] = [
        ("strategy", config.strategy, spec.strategy, choices.strategies),
        ("balancing", config.balancing, spec.policy, choices.policies),
    ]
    for group, section, component, built in groups:
        nodes = group_options(group)
        name = option_of(section, nodes)
        nodes[name] = dict(section)
        choices.own[group] = name
        for option, node in nodes.items():
            if option == name:
                built[option] = component
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
                choices.problems[f"{group}={option}"] = " ".join(problems)
    return choices


def several_hosts(spec: RunSpec) -> bool:
    """Return whether a run's devices are in several hosts."""
    return len({device.host for device in spec.selection.devices}) > 1


def option_of(section: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of a section's option: of those with its class, the option that differs least."""
    alike = [name for name, node in nodes.items() if node.get("_target_") == section["_target_"]]
    if not alike:
        return str(section["_target_"].rpartition(".")[2].lower())
    return min(alike, key=lambda name: sum(section.get(key) != value for key, value in nodes[name].items()))


def check_scale(scale: int | None, config: Config) -> list[str]:
    """Return the problem of a cluster for which the catalogue has no network."""
    links = load_catalogue(config.hardware.catalogue).links
    if scale is None or config.hardware.network in links:
        return []
    return [must_be("hardware.network", f"one of {', '.join(sorted(links))}", config.hardware.network)]


def _limited(estimates: DeviceEstimates, memory: RunMemory, batch_size: int) -> DeviceEstimates:
    """Return the estimates of a plan's devices within their memory, for a global batch."""
    whole = [batch_size] * len(estimates.devices)
    passes = [size or None for size in memory.largest_passes(whole)]
    return estimates.limited(memory.caps(batch_size), passes)


def _paying_batch(
    inputs: PredictionInputs, prediction: Prediction, unlimited: DeviceEstimates, memory: RunMemory | None
) -> BatchPrediction | None:
    """Return the smallest larger batch with which all devices pay, else more devices than in the best row.

    `None` if there is none, or if the best row has all devices.

    Args:
        unlimited: estimates whatever the memory.
        memory: of the devices; `None`: it is not checked.
    """
    best, num_all, total = prediction.best, len(inputs.plan.devices), inputs.total
    if best is None or len(best.ranks) == num_all:
        return None

    def limited(batch_size: int) -> list[DeviceCalibration]:
        able = _limited(unlimited, memory, batch_size) if memory is not None else unlimited
        return [device for device in able.devices if device is not None]

    common = inputs.linked, inputs.devices, inputs.estimates.exchange
    # Memory is measured from the first batch on that may pay, because that takes a while.
    quick, exact = batch_predictor(*common), batch_predictor(*common, limited)
    for num_devices in dict.fromkeys((num_all, len(best.ranks) + 1)):
        first = paying_batch(quick, 2 * total, num_devices, LARGEST_MULTIPLE // 2)
        if first is not None:
            left = LARGEST_MULTIPLE * total // first.batch_size
            if paying := paying_batch(exact, first.batch_size, num_devices, left):
                return paying
    return None


def _needs(plan: Plan, memory: RunMemory, ranks: Sequence[int], counts: Sequence[int]) -> list[int | None]:
    """Return the memory need in bytes of each rank with so many samples; `None`: not known."""
    devices = [plan.devices[rank] for rank in ranks]
    precisions = [plan.precisions[rank] for rank in ranks]
    sizes = [size or None for size in memory.of(devices, counts, precisions).largest_passes(counts)]
    estimates = memory.of(devices, counts, precisions, sizes).estimates
    return [estimate.total_bytes if estimate is not None else None for estimate in estimates]


def _with_pick(prediction: Prediction, candidates: Collection[str], choices: Alternatives) -> Prediction:
    """Return a prediction with the reason for the best candidate, if there are candidates."""
    of_candidates = replace(
        prediction, rows=tuple(row for row in prediction.rows if row.strategy in candidates)
    )
    row = pick(of_candidates, choices.own["balancing"])
    if row is None:
        return prediction
    return replace(prediction, reasons=(*prediction.reasons, why_picked(row, of_candidates)))


def _with_problems(prediction: Prediction, choices: Alternatives) -> Prediction:
    rows = []
    for option, why in choices.problems.items():
        group, _, name = option.partition("=")
        rows.append(
            PredictedRun(None, problem=why, strategy=name)
            if group == "strategy"
            else PredictedRun(name, problem=why)
        )
    return replace(prediction, rows=(*prediction.rows, *rows))
