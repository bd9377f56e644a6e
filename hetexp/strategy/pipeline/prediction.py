"""Rows of strategies that cut the model: each policy's stages, and what they take."""

from __future__ import annotations

from hetexp.core.errors import ConfigError
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.plan.stages.arrange import Arrangement, CutsModels, arrange


def rows_of(inputs: PredictionInputs, cuts: CutsModels) -> list[PredictedRun]:
    """Return the row of each policy.

    Policies by which the devices are taken to be as fast as by another's get the same stages; they are found
    once.
    """
    try:
        layers = inputs.layers()
    except ConfigError as error:
        why = " ".join(error.problems)
        return [PredictedRun(label, problem=why) for label in inputs.policies]
    found: dict[object, Arrangement | str] = {}
    rows = []
    for label, policy in inputs.policies.items():
        try:
            shares = policy.shares(inputs.plan.devices, inputs.plan.precisions)
        except ConfigError as error:
            rows.append(PredictedRun(label, problem=" ".join(error.problems)))
            continue
        settles = policy.measures or policy.follows
        if settles and not inputs.known.complete:
            rows.append(PredictedRun(label, problem=f"{inputs.unknown()}: its shares would decide"))
            continue
        key: object = (policy.measures and policy.drop_slower) if settles else shares
        if key not in found:
            try:
                found[key] = arrange(inputs.plan, cuts, policy, layers, inputs.known, inputs.checks_memory)
            except ConfigError as error:
                found[key] = " ".join(error.problems)
        arrangement = found[key]
        if isinstance(arrangement, str):
            rows.append(PredictedRun(label, problem=arrangement))
        else:
            rows.append(_row(inputs, label, arrangement, settles))
    ceiling = max(
        (row.efficiency for row in rows if row.efficiency is not None and row.measures), default=None
    )
    return [row.reaching(ceiling) for row in rows]


def _row(inputs: PredictionInputs, label: str, found: Arrangement, measures: bool) -> PredictedRun:
    seconds = found.step_seconds
    watts = [inputs.watts[rank] for rank in found.ranks]
    known = None if None in watts else sum(one or 0.0 for one in watts)
    joules = None
    if known is not None and found.bubble is not None and seconds is not None:
        busy = [one or 0.0 for one in found.busy_seconds]
        joules = sum((w or 0.0) * s for w, s in zip(watts, busy, strict=True)) / inputs.total
    row = PredictedRun(
        label,
        found.ranks,
        found.local_batch_sizes,
        watts=known,
        joules_per_sample=joules,
        memory_bytes=found.memory_bytes if inputs.checks_memory else (None,) * len(found.ranks),
        reasons=found.reasons,
        measures=measures,
        stages=found.stages,
        bubble=found.bubble,
    )
    return inputs.timed(row, seconds)
