"""`summary.json`: one record for each run, with the same fields for every end."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import Required, TypedDict

import hetexp
from hetexp.core.plan import Plan
from hetexp.core.precision import exchanged_in
from hetexp.core.section import first_problem

SCHEMA = 1
_Count = Annotated[int, Field(ge=0, lt=2**63)] | None
_Number = float | None
LOST_TO = ("imbalance", "communication", "rounding", "data", "other")
LOADING_MATTERS = 0.05
"""Share of a step's time that it may wait for samples before the user is told."""


LEAST_STEPS = 20
"""Fewest steps after the warm-up that show how fast a run is."""
SPEED = "samples_per_second"
"""Last word of the name of a metric that is a speed."""


class _Device(TypedDict, total=False):
    id: Required[str]
    name: Required[str]
    emulated: bool
    share: Required[_Number]
    local_batch: Required[_Count]
    steps: _Count
    samples_per_s: _Number
    solo_samples_per_s: _Number
    idle_s: _Number
    peak_memory: _Number
    energy_j: _Number
    energy_source: str | None
    precision: str | None


class _Summary(TypedDict, total=False):
    status: Required[str]
    error: Required[str | None]
    run_id: str
    emulated: bool
    time_scale: _Number
    invalid_reason: str | None
    strategy: Required[str]
    fallback: dict[str, str] | None
    seed: _Count
    global_batch: _Count
    steps: _Count
    samples: _Count
    wall_s: _Number
    samples_per_s: _Number
    solo_source: str | None
    ceiling: _Number
    efficiency: _Number
    lost_to: Required[dict[str, _Number]]
    calibration: dict[str, Any] | None
    predicted_step_s: _Number
    measured_step_s: _Number
    loading: dict[str, _Number]
    comm: Required[dict[str, Any]]
    devices: Required[list[_Device]]
    final: Required[dict[str, _Number | dict[str, _Number]]]
    versions: dict[str, str]


def summary_problem(raw: Any) -> str:
    """Return what in the content of a `summary.json` is not as hetexp writes it; empty if nothing is."""
    try:
        _form().validate_python(raw, strict=True)
    except ValidationError as error:
        return first_problem(error)
    return ""


@functools.cache
def _form() -> TypeAdapter[_Summary]:
    return TypeAdapter(_Summary)


def modelled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics of a step with the speeds of emulated devices in samples per modelled second.

    Args:
        values: a line of `metrics.jsonl`, whose speeds are in real seconds; its `time_scale` is the number of
            real seconds of a modelled one, and is absent where no device is emulated. It returns as
            `emulation/time_scale`.
    """
    scale = values.get("time_scale")
    if not scale or not isinstance(scale, (int, float)):
        return dict(values)
    fast = {n for n, value in values.items() if n.endswith(SPEED) and isinstance(value, (int, float))}
    names = {"time_scale": "emulation/time_scale"}
    return {names.get(name, name): v * scale if name in fast else v for name, v in values.items()}


def blank_summary(plan: Plan, status: str) -> dict[str, Any]:
    """Return a summary with null for the results of the training.

    Args:
        status: `completed`, `failed` or `interrupted`.
    """
    config = plan.config
    return {
        "schema": SCHEMA,
        "run_id": plan.run_id,
        "status": status,
        "error": None,
        "emulated": plan.emulated,
        "time_scale": None,
        "link_emulated": False,
        "valid": None,
        "invalid_reason": None,
        "hardware": plan.choices.get("hardware"),
        "strategy": plan.strategy,
        "balancing": plan.choices.get("balancing"),
        "exact": plan.exact,
        "fallback": plan.fallback,
        "model": plan.choices.get("model"),
        "data": plan.choices.get("data"),
        "seed": config["trainer"]["seed"] if plan.script is None else None,
        "world_size": plan.world_size,
        "global_batch": config["trainer"]["global_batch_size"] if plan.script is None else None,
        "steps": None,
        "samples": None,
        "wall_s": None,
        "start_up": None,
        "samples_per_s": None,
        "solo_samples_per_s": None,
        "solo_source": None,
        "ceiling": None,
        "efficiency": None,
        "lost_to": dict.fromkeys(LOST_TO),
        "calibration": _calibration(plan),
        "predicted_step_s": None,
        "measured_step_s": None,
        "measured_steps": None,
        "fastest_alone": {"device": None, "samples_per_s": None, "gain": None},
        "loading": {"wait_s": None, "load_s": None, "workers": None},
        "splits": None,
        "comm": {
            "backend": plan.way.name or plan.collective_backend,
            "wire_dtype": exchanged_in(plan.precisions) if plan.wire == "float32" else plan.wire,
            "fallback": plan.route_fallback,
            "bytes_per_step": None,
            "exchange_s": None,
            "exposed_s": None,
        },
        "pipeline": None,
        "devices": [_device(plan, place) for place in range(len(plan.all_devices))],
        "failures": [],
        "final": {"train_loss": None, "eval": None},
        "merge": None,
        "checkpoint": None,
        "versions": {"hetexp": hetexp.__version__, "python": platform.python_version()},
    }


def _calibration(plan: Plan) -> dict[str, Any] | None:
    """Return when the devices were measured, and whether an earlier run measured them."""
    calibration = plan.calibration or {}
    if "measured_at" not in calibration:
        return None
    return {"measured_at": calibration["measured_at"], "cached": calibration["cached"]}


def _device(plan: Plan, place: int) -> dict[str, Any]:
    device = plan.all_devices[place]
    return {
        "id": device.id,
        "backend": device.backend,
        "vendor": device.vendor,
        "name": device.name,
        "emulated": device.emulated,
        "python": None,
        "torch": None,
        "driver": device.driver,
        "share": plan.share_of(place),
        "local_batch": plan.batch_size_of(place) if plan.script is None else None,
        "micro_batch": None,
        "precision": plan.precision_of(place),
        "samples_per_s": None,
        "solo_samples_per_s": None,
        "idle_s": None,
        "peak_memory": None,
        "energy_j": None,
        "energy_source": None,
        "steps": None,
    }
