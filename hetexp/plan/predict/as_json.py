"""Predictions as plain types, for `hetexp plan --json` and `prediction.json`; unknown values are null."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import hetexp
from hetexp.plan.predict.inputs import PredictedRun
from hetexp.plan.predict.runs import Prediction
from hetexp.plan.predict.scale import Scaled
from hetexp.plan.predict.what_if import Change
from hetexp.plan.routes import route_of_all

SCHEMA = 1


def prediction_json(
    prediction: Prediction, changes: Sequence[Change], what_if: Prediction | None, cluster: Scaled | None
) -> dict[str, Any]:
    """Return all predictions of a run."""
    return {
        "schema": SCHEMA,
        "hetexp": hetexp.__version__,
        **_prediction_fields(prediction),
        "what_if": None
        if what_if is None
        else {"changes": [str(change) for change in changes], **_prediction_fields(what_if)},
        "scale": None if cluster is None else asdict(cluster),
    }


def _prediction_fields(prediction: Prediction) -> dict[str, Any]:
    facts = zip(
        prediction.plan.devices,
        prediction.estimates.sources,
        prediction.solo_samples_per_second,
        prediction.estimates.devices,
        strict=True,
    )
    return {
        "emulated": prediction.plan.emulated,
        "global_batch": prediction.total,
        "devices": [
            {
                "id": device.id,
                "name": device.name,
                "vendor": device.vendor,
                "backend": device.backend,
                "speed": source,
                "solo_samples_per_s": solo,
                "power_limit_watts": device.power_limit_watts,
                "memory_bytes": device.memory_bytes,
                "calibration": one.to_dict() if one is not None else None,
            }
            for device, source, solo, one in facts
        ],
        "exchange": prediction.estimates.exchange.to_dict(),
        "route": asdict(route_of_all(prediction.plan)) | {"name": route_of_all(prediction.plan).name},
        "rows": [_row(row, prediction) for row in prediction.rows],
        "best": prediction.rows.index(prediction.best) if prediction.best is not None else None,
        "reasons": list(prediction.reasons),
        "answer": prediction.answer,
        "paying_batch": asdict(prediction.paying) if prediction.paying is not None else None,
    }


def _row(row: PredictedRun, prediction: Prediction) -> dict[str, Any]:
    memory = row.memory_bytes or (None,) * len(row.ranks)
    stages = row.stages or ((),) * len(row.ranks)
    return {
        "strategy": row.strategy,
        "policy": row.policy,
        "exact": row.exact,
        "predicted_step_s": row.step_seconds,
        "samples_per_s": row.samples_per_second,
        "efficiency": row.efficiency,
        "ceiling": row.ceiling,
        "bubble": row.bubble,
        "watts": row.watts,
        "joules_per_sample": row.joules_per_sample,
        "split": [
            {
                "device": prediction.plan.devices[rank].id,
                "samples": count,
                "memory_bytes": need,
                "stages": [
                    {"pipeline": s.replica, "index": s.index, "layers": [s.first_layer, s.end_layer]}
                    for s in own
                ],
            }
            for rank, count, need, own in zip(row.ranks, row.counts, memory, stages, strict=True)
        ],
        "problem": row.problem,
        "reasons": list(row.reasons),
    }
