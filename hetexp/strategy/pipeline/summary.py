"""What a run in stages tells of them: how long their passes took, how much of a step was a bubble."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from hetexp.training.state import TrainState


def stage_fields(parts: TrainState) -> dict[str, Any]:
    """Return what this rank alone knows of its stages; medians over all microbatches of all steps."""
    staging = parts.staging
    assert staging is not None
    times = staging.times
    return {
        "stages": [
            {
                "index": stage.index,
                "layers": [stage.first_layer, stage.end_layer],
                "forward_s": times.median(stage.index, "forward"),
                "backward_s": times.median(stage.index, "backward"),
                "weights_s": times.median(stage.index, "weights"),
            }
            for stage in staging.cut.stages
        ],
        "busy_s": statistics.median(times.busy_seconds) if times.busy_seconds else None,
        "step_s": statistics.median(times.step_seconds) if times.step_seconds else None,
        "microbatches": staging.num_microbatches,
        "sent": staging.sent_bytes(),
    }


def pipeline_fields(parts: TrainState, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry a pipeline, with its stages in order.

    `step_s` is the median time of a step's schedule, from the first microbatch to the last gradient, without
    the exchange between pipelines and the update. `bubble` is the part of it in which a device of the
    pipeline neither computed nor moved tensors, the mean over its devices.
    """
    found = []
    for replica, samples in enumerate(parts.plan.replica_batch_sizes):
        own = [r for r, stages in enumerate(parts.plan.stages) if stages[0].replica == replica]
        steps = [ranks[rank]["step_s"] for rank in own]
        busy = [ranks[rank]["busy_s"] for rank in own]
        known = all(step is not None for step in steps)
        step = max(steps) if known else None
        stages = [stage | {"rank": rank} for rank in own for stage in ranks[rank]["stages"]]
        found.append(
            {
                "devices": [parts.plan.devices[rank].id for rank in own],
                "samples": samples,
                "microbatches": ranks[own[0]]["microbatches"],
                "step_s": step,
                "boundary_wire": parts.plan.boundary_wire,
                "boundary_bytes": sum(ranks[rank]["sent"] for rank in own),
                "bubble": 1.0 - sum(busy) / len(own) / step if step else None,
                "stages": sorted(stages, key=lambda stage: stage["index"]),
            }
        )
    return found
