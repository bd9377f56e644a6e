"""Rows of strategies that cut the model: each policy's stages, and what they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from hetexp.core.errors import ConfigError
from hetexp.core.stage import Layer
from hetexp.plan.scene import Row, Scene
from hetexp.plan.staged import Arrangement, CutsModels, arrange
from hetexp.strategy.base import Strategy


def staged(scene: Scene, name: str, strategy: Strategy, layers: Sequence[Layer] | str) -> list[Row]:
    """Return the row of each policy.

    Policies by which the devices are taken to be as fast as by another's get the same stages; they are found
    once.

    Args:
        layers: of the model, or why it is not cut.
    """
    if isinstance(layers, str):
        return [Row(name, label, problem=layers) for label in scene.policies]
    found: dict[object, Arrangement | str] = {}
    rows = []
    for label, policy in scene.policies.items():
        try:
            shares = policy.shares(scene.plan.devices, scene.plan.precisions)
        except ConfigError as error:
            rows.append(Row(name, label, problem=" ".join(error.problems)))
            continue
        settles = policy.measures or policy.follows
        if settles and not scene.known.complete:
            rows.append(Row(name, label, problem=f"{scene.unknown()}: its shares would decide"))
            continue
        key: object = (policy.measures and policy.drop_slower) if settles else shares
        if key not in found:
            cuts = cast(CutsModels, strategy)
            try:
                found[key] = arrange(scene.plan, cuts, policy, layers, scene.known, scene.checks_memory)
            except ConfigError as error:
                found[key] = " ".join(error.problems)
        arrangement = found[key]
        if isinstance(arrangement, str):
            rows.append(Row(name, label, problem=arrangement))
        else:
            rows.append(_row(scene, name, label, arrangement, settles))
    ceiling = max(
        (row.efficiency for row in rows if row.efficiency is not None and row.measures), default=None
    )
    return [row.reaching(ceiling) for row in rows]


def _row(scene: Scene, name: str, label: str, found: Arrangement, measures: bool) -> Row:
    seconds = found.step_seconds
    rate = scene.total / seconds if seconds else None
    watts = [scene.watts[rank] for rank in found.ranks]
    known = None if None in watts else sum(one or 0.0 for one in watts)
    joules = None
    if known is not None and found.bubble is not None and seconds is not None:
        busy = [one or 0.0 for one in found.busy_seconds]
        joules = sum((w or 0.0) * s for w, s in zip(watts, busy, strict=True)) / scene.total
    return Row(
        name,
        label,
        found.ranks,
        found.local_batch_sizes,
        step_seconds=seconds,
        samples_per_second=rate,
        efficiency=rate / scene.whole if rate is not None and scene.whole else None,
        watts=known,
        joules_per_sample=joules,
        memory_bytes=found.memory_bytes if scene.checks_memory else (None,) * len(found.ranks),
        reasons=found.reasons,
        measures=measures,
        stages=found.stages,
        bubble=found.bubble,
    )
