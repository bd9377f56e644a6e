"""Run folders as a run leaves them, made of a few numbers, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.summary import blank_summary

FAST, SLOW = "RTX 3090", "Arc A770"
BATCH, STEPS = 64, 4


def write_run(
    folder: Path,
    *,
    speed: float = 100.0,
    strategy: str = "ddp",
    balancing: str = "equal",
    seed: int = 0,
    names: Sequence[str] = (FAST, SLOW),
    shares: Sequence[float] | None = None,
    scale: float | None = 10.0,
    status: str = "completed",
    loss: float | None = 1.0,
    eval_loss: float | None = 2.0,
    solo: Sequence[float] | None = None,
    choices: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    trainer: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    **summary: Any,
) -> Path:
    """Write plan, log and summary of a run, and return its folder.

    Args:
        speed: samples a second in modelled time, of each step.
        scale: of emulated devices; `None`: the devices are real.
        solo: what each device would do alone, in modelled time.
        choices: options of groups besides strategy and balancing.
        trainer: more of the configuration's section.
        plan: fields of the plan that are others.
        summary: fields of the summary that are others.
    """
    emulated, wall = scale is not None, scale or 1.0
    shares = shares or [1 / len(names)] * len(names)
    config = {
        "trainer": {"seed": seed, "global_batch_size": BATCH, "max_steps": STEPS, **(trainer or {})},
        "fault": {"events": []},
    }
    made = Plan(
        **{
            "run_id": folder.name,
            "run_dir": str(folder),
            "name": folder.name,
            "group": None,
            "config": config,
            "devices": tuple(_device(place, name, emulated) for place, name in enumerate(names)),
            "strategy": strategy,
            "shares": tuple(shares),
            "local_batch_sizes": tuple(round(BATCH * share) for share in shares),
            "collective_backend": "gloo",
            "threads": (1,) * len(names),
            "choices": {**(choices or {}), "balancing": balancing, "strategy": strategy},
            "overrides": tuple(overrides),
            **(plan or {}),
        }
    )
    folder.mkdir(parents=True)
    made.write(folder / "plan.json")
    step_seconds = BATCH * wall / speed
    write_log(folder, [device.id for device in made.all_devices], shares, step_seconds, loss, eval_loss)
    told = blank_summary(made, status) | {
        "time_scale": scale,
        "valid": True,
        "steps": STEPS,
        "samples": STEPS * BATCH,
        "wall_s": 2 * STEPS * step_seconds,
        "samples_per_s": BATCH / step_seconds,
        "measured_step_s": step_seconds,
        "final": {"train_loss": loss, "eval": None if eval_loss is None else {"loss": eval_loss}},
    }
    told["comm"]["bytes_per_step"] = 1000
    told["versions"] |= {"torch": "2.13.0"}
    for place, device in enumerate(told["devices"]):
        device |= {"steps": STEPS, "share": shares[place]}
        if solo is not None:
            device["solo_samples_per_s"] = solo[place] / wall
    if solo is not None:
        told |= {"solo_source": "calibration", "efficiency": speed / sum(solo), "ceiling": 1.0}
        rest = 1 - speed / sum(solo)
        told["lost_to"] = dict.fromkeys(told["lost_to"], 0.0) | {"communication": rest}
    (folder / "summary.json").write_text(json.dumps(told | summary))
    return folder


def write_log(
    folder: Path,
    ids: Sequence[str],
    shares: Sequence[float],
    step_seconds: float,
    loss: float | None,
    eval_loss: float | None,
    first_step: int = 0,
) -> None:
    """Write a log with a line every two steps, whose loss falls to `loss`, and an evaluation at the end."""
    lines = []
    for step in range(first_step + 2, first_step + STEPS + 1, 2):
        line: dict[str, Any] = {
            "step": step,
            "train/loss": None if loss is None else loss * (1 + first_step + STEPS - step),
            "train/samples": step * BATCH,
            "samples_per_second": BATCH / step_seconds,
            "step_seconds": step_seconds,
        }
        for device, share in zip(ids, shares, strict=True):
            line |= {f"device/{device}/share": share, f"device/{device}/samples_per_second": 1.0}
        lines.append(line)
    if eval_loss is not None:
        lines.append({"step": first_step + STEPS, "eval/loss": eval_loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _device(place: int, name: str, emulated: bool) -> DeviceSpec:
    kind, mark = ("emulated", " (emulated)") if emulated else ("cuda", "")
    vendor = "intel" if name == SLOW else "nvidia"
    card = "arc_a770" if name == SLOW else "rtx_3090"
    return DeviceSpec(
        f"{kind}:{place}", kind, place, f"{name}{mark}", vendor, card=card if emulated else None
    )
