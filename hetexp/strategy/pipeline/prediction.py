"""Predictions of strategies that cut the model: each policy's stages and their times."""

from __future__ import annotations

from hetexp.core.errors import ConfigError
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.plan.stages.assign import StageAssignment, StagedStrategy, assign_stages


def rows_of(inputs: PredictionInputs, cuts: StagedStrategy) -> list[PredictedRun]:
    """Return the row of each policy.

    Policies that assume the same speeds of the devices get the same stages, which are searched once.
    """
    try:
        layers = inputs.layers()
    except ConfigError as error:
        why = " ".join(error.problems)
        return [PredictedRun(label, problem=why) for label in inputs.policies]
    arrangements: dict[object, StageAssignment | str] = {}
    rows = []
    for label, policy in inputs.policies.items():
        try:
            shares = policy.shares(inputs.plan.devices, inputs.plan.precisions)
        except ConfigError as error:
            rows.append(PredictedRun(label, problem=" ".join(error.problems)))
            continue
        settles = policy.measures or policy.follows
        if settles and not inputs.estimates.complete:
            rows.append(PredictedRun(label, problem=f"{inputs.unknown()}: its shares would decide"))
            continue
        key: object = (policy.measures and policy.drop_slower) if settles else shares
        if key not in arrangements:
            try:
                arrangements[key] = assign_stages(
                    inputs.plan, cuts, policy, layers, inputs.estimates, inputs.checks_memory
                )
            except ConfigError as error:
                arrangements[key] = " ".join(error.problems)
        arrangement = arrangements[key]
        if isinstance(arrangement, str):
            rows.append(PredictedRun(label, problem=arrangement))
        else:
            rows.append(_row(inputs, label, arrangement, settles))
    ceiling = max(
        (row.efficiency for row in rows if row.efficiency is not None and row.measures), default=None
    )
    return [row.reaching(ceiling) for row in rows]


def _row(inputs: PredictionInputs, label: str, arrangement: StageAssignment, measures: bool) -> PredictedRun:
    seconds, ranks = arrangement.step_seconds, arrangement.ranks
    watts = [inputs.watts[rank] for rank in ranks]
    total = None if None in watts else sum(w or 0.0 for w in watts)
    joules = None
    if total is not None and arrangement.bubble is not None and seconds is not None:
        busy = [s or 0.0 for s in arrangement.busy_seconds]
        joules = sum((w or 0.0) * s for w, s in zip(watts, busy, strict=True)) / inputs.total
    row = PredictedRun(
        label,
        ranks,
        arrangement.local_batch_sizes,
        watts=total,
        joules_per_sample=joules,
        memory_bytes=arrangement.memory_bytes if inputs.checks_memory else (None,) * len(ranks),
        reasons=arrangement.reasons,
        measures=measures,
        stages=arrangement.stages,
        bubble=arrangement.bubble,
    )
    return inputs.timed(row, seconds)
