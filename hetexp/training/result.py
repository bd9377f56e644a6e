"""From what each rank measured to the summary of the run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hetexp.balancing.accounting import Account, account
from hetexp.comm.compression import compressor_of
from hetexp.comm.rendezvous import exchange
from hetexp.core.cost.calibration import DeviceCalibration
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Work, step_seconds
from hetexp.core.files import write_json
from hetexp.core.plan import Plan
from hetexp.core.split import apportion
from hetexp.core.summary import blank_summary
from hetexp.hardware.backend import backend_class
from hetexp.hardware.emulation.emulated import OUTRUN_TOLERANCE
from hetexp.hardware.emulation.pacing import tensors
from hetexp.hardware.links import links_of
from hetexp.strategy.pipeline.summary import pipeline_fields, stage_fields
from hetexp.training.loop import Outcome, driven
from hetexp.training.measure import Totals
from hetexp.training.state import TrainState
from hetexp.training.wiring import versions


def report(parts: TrainState, store: dist.Store, outcome: Outcome, wall_seconds: float) -> dict[str, Any]:
    """Gather every rank's measurements; return the summary, the same on every rank but for `checkpoint`."""
    limit = parts.config.comm.timeout_seconds
    everyone = exchange(store, "result", parts.rank, parts.plan.world_size, _mine(parts, outcome), limit)
    time_scale = parts.time_scale
    emulation = _emulation(parts, everyone, time_scale) if time_scale is not None else None
    if emulation is not None and parts.rank == 0:
        write_json(Path(parts.plan.run_dir) / "emulation.json", emulation)
    totals = outcome.totals.settled
    seconds = totals.train_seconds
    reasons = [rank["invalid_reason"] for rank in everyone if rank["invalid_reason"]]
    summary = blank_summary(parts.plan, "completed")
    summary |= {
        "time_scale": time_scale,
        "link_emulated": parts.plan.paced,
        "predicted_step_s": emulation["predicted_step_s"] if emulation is not None else None,
        "valid": not reasons,
        "invalid_reason": "; ".join(reasons) or None,
        "steps": outcome.progress.step,
        "samples": outcome.progress.samples,
        "wall_s": wall_seconds,
        "samples_per_s": totals.global_samples / seconds if totals.steps else None,
        "measured_step_s": seconds / totals.steps if totals.steps else None,
        "final": {"train_loss": outcome.train_loss, "eval": outcome.evaluation or None},
        "merge": parts.local.merged if parts.local is not None else None,
        "checkpoint": outcome.checkpoint,
        "splits": parts.balancer.num_changes,
    }
    sent = [rank["sent"] for rank in everyone if rank["sent"] is not None]
    summary["comm"]["bytes_per_step"] = max(sent) if len(sent) == len(everyone) else None
    if parts.local is not None and parts.local.settings is not None:
        wire = parts.local.settings.wire
        summary["comm"]["wire_dtype"] = wire if wire != "float32" else summary["comm"]["wire_dtype"]
    summary["versions"] |= versions()
    for place, device in enumerate(summary["devices"]):
        facts = everyone[0 if parts.plan.cards else place]["device"]
        device |= _of_card(parts.plan, facts, place) if parts.plan.cards else facts
        joules = everyone[0 if parts.plan.cards else place]["joules"][place if parts.plan.cards else 0]
        source = backend_class(device["backend"]).energy_source if joules is not None else None
        device |= {"energy_j": joules, "energy_source": source}
    if parts.staging is not None:
        summary["pipeline"] = pipeline_fields(parts, [rank["stages"] for rank in everyone])
        predicted = parts.plan.predicted_step_seconds
        summary["predicted_step_s"] = None if predicted is None else predicted * (time_scale or 1.0)
    elif totals.steps:
        # The rank that never waits for another's work waits for the exchange alone.
        summary["comm"]["exposed_s"] = min(rank["own"]["waited"] for rank in everyone) / totals.steps
        exchanged = [rank["exchanged"] for rank in everyone if rank["exchanged"] is not None]
        summary["comm"]["exchange_s"] = min(exchanged) if len(exchanged) == len(everyone) else None
        counts = parts.balancer.now(parts.config.trainer.global_batch_size).counts
        if (parts.plan.calibration or {}).get("predicted_step_seconds") is not None:
            accounted = _by_calibration(parts.plan, summary, totals, counts, time_scale or 1.0)
        else:
            accounted = _by_own_work(summary, totals, counts, [rank["own"] for rank in everyone])
        for device, solo in zip(summary["devices"], accounted.pop("solo", []), strict=False):
            device["solo_samples_per_s"] = solo
        summary |= accounted
    return summary


def _of_card(plan: Plan, facts: dict[str, Any], place: int) -> dict[str, Any]:
    """Return what is known of one of a single rank's cards: it is the rank that was timed, not the card."""
    largest = apportion(facts["micro_batch"], plan.card_shares).counts[place]
    unknown = {"samples_per_s": None, "peak_memory": facts["peak_memory"] if place == 0 else None}
    own = {"share": plan.card_shares[place], "local_batch": plan.card_batch_sizes[place]}
    return facts | own | unknown | {"micro_batch": largest}


def _by_calibration(
    plan: Plan, summary: dict[str, Any], totals: Totals, counts: Sequence[int], scale: float
) -> dict[str, Any]:
    """Return the fields that say how near the run came to what its devices do alone, as measured before.

    Args:
        counts: the split, at the end where it followed the devices' speeds.
        scale: real seconds a second of the calibration's clock.
    """
    assert plan.calibration is not None
    predicted = plan.calibration["predicted_step_seconds"]
    full_step = plan.config["trainer"]["global_batch_size"] / summary["samples_per_s"] / scale
    curves = [DeviceCalibration.from_dict(one).curve for one in plan.calibration["devices"]]
    data = totals.data_seconds / totals.steps / scale
    found = account(curves, counts, predicted, predicted, full_step, data)
    return _fields(found, "calibration", scale) | {"predicted_step_s": predicted * scale}


def _by_own_work(
    summary: dict[str, Any], totals: Totals, counts: Sequence[int], own: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Return these fields from each device's own work during the run, where nothing was measured before it.

    A device's time is taken to grow with its samples, so that large fixed costs make its own speed look
    lower than it is. Nothing is reported if a device had no samples, or of a device alone.
    """
    if len(own) < 2 or not all(one["compute"] > 0 and one["samples"] for one in own):
        return {}
    # What is more than the least of them is waiting for others and rank 0's log, not the device's own.
    update = max(min(one["rest"] for one in own), 0.0) / totals.steps
    curves = [SpeedCurve(0.0, one["compute"] / one["samples"], update_seconds=update) for one in own]
    full_step = sum(counts) / summary["samples_per_s"]
    slowest = max(curve.seconds(count) for curve, count in zip(curves, counts, strict=True))
    joint = slowest + summary["comm"]["exposed_s"]
    data = totals.data_seconds / totals.steps
    return _fields(account(curves, counts, joint, joint, full_step, data), "run", 1.0)


def _fields(found: Account, source: str, scale: float) -> dict[str, Any]:
    return {
        "solo_samples_per_s": sum(found.solo_samples_per_second) / scale,
        "solo_source": source,
        "ceiling": found.ceiling if source == "calibration" else None,
        "efficiency": found.efficiency,
        "lost_to": found.lost_to,
        "solo": [one / scale for one in found.solo_samples_per_second],
    }


def _emulation(parts: TrainState, everyone: list[dict[str, Any]], time_scale: float) -> dict[str, Any]:
    """Return what the cost model says of a step and what each rank really paced, in real seconds."""
    work = [rank["work"] for rank in everyone]
    # A rank without samples has no backward pass: its buckets leave at once.
    computing = [rank["buckets"] for rank in everyone if rank["work"] and rank["work"]["backward"]]
    buckets: list[tuple[float, int]] = computing[0] if computing else []
    predicted = None
    if all(work):
        model = [Work(tuple(w["forward"]), tuple(w["backward"]), w["update"]) for w in work]
        links = links_of(parts.plan)
        predicted = step_seconds(model, links, buckets) * time_scale
        if parts.local is not None and parts.local.settings is not None:
            predicted += parts.local.sync_seconds(parts) * time_scale / parts.local.settings.sync_every
            predicted += parts.local.host_seconds(parts) * time_scale
    return {
        "time_scale": time_scale,
        "predicted_step_s": predicted,
        "buckets": buckets,
        "devices": [
            {"id": device.id, "work": rank["work"], "phases": rank["phases"]}
            for device, rank in zip(parts.plan.devices, everyone, strict=True)
        ],
    }


def _phases(parts: TrainState) -> dict[str, dict[str, float]]:
    """Return the medians of real and modelled seconds of each kind of phase that this rank paced."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for name, real, modelled in parts.backend.paced():
        pairs.setdefault(name, []).append((real, modelled))
    if parts.paced is not None:
        pairs["exchange"] = parts.paced.link_seconds
    return {
        name: {
            "real": statistics.median(real for real, _ in found),
            "modelled": statistics.median(modelled for _, modelled in found),
            "ratio": statistics.median(real / modelled for real, modelled in found),
        }
        for name, found in pairs.items()
        if found
    }


def _sent_bytes(parts: TrainState, steps: int) -> float | None:
    """Return the bytes that this rank hands to others in a step: gradients, weights, payloads."""
    if parts.staging is not None:
        return parts.staging.sent_bytes() + parts.staging.gradients.num_bytes
    if parts.local is not None:
        return parts.local.sent_bytes / steps if steps else None
    if not parts.config.debug.exchange:
        return 0
    if parts.hook is not None:
        return parts.hook.sent_bytes / steps if steps else None
    codec = compressor_of(parts.config.comm.wire)
    if parts.paced is not None and codec is not None:
        size = parts.dtype.itemsize
        return sum(codec.sent_bytes(num_bytes // size) for _, num_bytes in parts.paced.buckets)
    return parts.strategy.exchanged_bytes(parts.model, parts.communicator.world_size)


def _invalid_reason(parts: TrainState) -> str | None:
    """Return why this rank's timings must not be used, `None` where they may."""
    reason = parts.backend.invalid_reason()
    paced = parts.staging.gradients if parts.staging is not None else parts.paced
    if parts.local is not None and parts.local.host is not None:
        paced = parts.local.host.gradients
    if reason is None and paced is not None and paced.late_share() > OUTRUN_TOLERANCE:
        reason = (
            f"{parts.backend.spec}: this machine's real exchange took {paced.late_share():.0%} "
            "longer than the emulated links; raise `hardware.time_scale`"
        )
    return reason


def _input_bytes(parts: TrainState) -> int:
    """Return the bytes of one sample on its way to the device."""
    if parts.input_bytes is not None:
        return parts.input_bytes
    inputs, _ = parts.train_data[0]
    return sum(t.numel() * t.element_size() for t in tensors(parts.to_device(inputs)))


def _mine(parts: TrainState, outcome: Outcome) -> dict[str, Any]:
    """Return what only this rank knows."""
    totals, settled = outcome.totals, outcome.totals.settled
    working = settled.local_samples and settled.compute_seconds
    share = totals.local_samples / totals.global_samples if totals.steps else None
    work, staging = None, parts.staging
    if staging is None:
        local = parts.balancer.now(parts.config.trainer.global_batch_size).counts[parts.rank]
        sizes = parts.pass_sizes(local)
        work = parts.backend.modelled_work(sizes, _input_bytes(parts))
    else:  # a rank has all samples of its pipeline, and its share is one of the work
        local, share = parts.plan.replica_batch_sizes[staging.replica], parts.plan.shares[parts.rank]
        sizes = [staging.rows]
    return {
        "stages": stage_fields(parts) if staging is not None else None,
        "invalid_reason": _invalid_reason(parts),
        "work": asdict(work) if work is not None else None,
        "buckets": parts.paced.buckets if parts.paced is not None else [],
        "phases": _phases(parts),
        "own": {
            "compute": settled.compute_seconds,
            "waited": settled.wait_seconds,
            "samples": settled.local_samples,
            # The update, and what the host does between two steps.
            "rest": settled.train_seconds
            - settled.compute_seconds
            - settled.wait_seconds
            - settled.data_seconds,
        },
        "sent": _sent_bytes(parts, totals.steps),
        "exchanged": parts.hook.exchange_seconds / totals.steps if parts.hook and totals.steps else None,
        "joules": outcome.energy.joules() if outcome.energy is not None else [None] * len(driven(parts)),
        "device": {
            **versions(),
            "share": share,
            "local_batch": local,
            "micro_batch": max(sizes, default=0),
            "samples_per_s": settled.local_samples / settled.compute_seconds if working else None,
            "idle_s": totals.wait_seconds,
            "peak_memory": parts.backend.peak_memory_bytes(),
            "steps": totals.steps,
        },
    }
