"""Gathers every rank's measurements into the summary of the run."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hetexp.comm.rendezvous import all_gather_json
from hetexp.core.cost.step import Work, step_seconds
from hetexp.core.files import write_json
from hetexp.core.plan import Plan
from hetexp.core.split import apportion
from hetexp.core.summary import LOADING_MATTERS, blank_summary
from hetexp.data.prefetch import reads_in_waits
from hetexp.hardware.backend import backend_class
from hetexp.hardware.emulation.emulated import OUTRUN_TOLERANCE
from hetexp.hardware.links import links_of
from hetexp.training.group import versions
from hetexp.training.loop import Outcome, driven_backends
from hetexp.training.measuring.timer import Totals
from hetexp.training.state import TrainState

SHORTEST_WAIT_SECONDS = 1e-3
"""Of a step. To save a shorter wait, processes that hand samples over cost too much themselves."""


def report(state: TrainState, store: dist.Store, outcome: Outcome, wall_seconds: float) -> dict[str, Any]:
    """Gather every rank's measurements; return the summary, the same on every rank but for `checkpoint`."""
    limit = state.config.comm.timeout_seconds
    local = _local_report(state, outcome)
    ranks = all_gather_json(store, "result", state.rank, state.plan.world_size, local, limit)
    time_scale = state.time_scale
    emulation = _emulation(state, ranks, time_scale) if time_scale is not None else None
    if emulation is not None and state.rank == 0:
        write_json(Path(state.plan.run_dir) / "emulation.json", emulation)
    totals = outcome.totals.after_warmup
    seconds = totals.train_seconds
    reasons = [rank["invalid_reason"] for rank in ranks if rank["invalid_reason"]]
    summary = blank_summary(state.plan, "completed")
    summary |= {
        "time_scale": time_scale,
        "link_emulated": state.plan.paced,
        "predicted_step_s": emulation["predicted_step_s"] if emulation is not None else None,
        "valid": not reasons,
        "invalid_reason": "; ".join(reasons) or None,
        "steps": outcome.progress.step,
        "samples": outcome.progress.samples,
        "wall_s": wall_seconds,
        "samples_per_s": totals.global_samples / seconds if totals.steps else None,
        "measured_step_s": seconds / totals.steps if totals.steps else None,
        "measured_steps": totals.steps,
        "final": {"train_loss": outcome.train_loss, "eval": outcome.evaluation or None},
        "merge": None,
        "checkpoint": outcome.checkpoint,
        "splits": state.balancer.num_changes,
    }
    sent = [rank["sent"] for rank in ranks if rank["sent"] is not None]
    summary["comm"]["bytes_per_step"] = max(sent) if len(sent) == len(ranks) else None
    summary["versions"] |= versions()
    plan = state.plan
    for place, device in enumerate(summary["devices"]):
        rank = ranks[plan.rank_of(place)]
        several = len(plan.devices_of(plan.rank_of(place))) > 1
        device |= _device_of_several(plan, rank["device"], place) if several else rank["device"]
        joules = rank["joules"][place if several else 0]
        source = backend_class(device["backend"]).energy_source if joules is not None else None
        device |= {"energy_j": joules, "energy_source": source}
    loading = [rank["loading"] for rank in ranks if rank["loading"] is not None]
    if loading:
        summary["loading"] = max(loading, key=lambda rank: float(rank["wait_s"]))
    state.engine.summarise(summary, totals, ranks)
    return summary


def loading_of(state: TrainState, totals: Totals) -> dict[str, Any] | None:
    """Return what loading costs a rank: seconds of a step, and the processes that would keep up.

    Processes or a thread that a step waits for are always busy: so long does its load take them.

    Args:
        totals: without the warm-up.

    Returns:
        `wait_s`, `load_s` in a single process, and `workers`: `trainer.num_workers` with which no step would
        wait, `None` if steps hardly wait, or if more processes would not help. `None` without steps.
    """
    if not totals.steps:
        return None
    step, wait = totals.train_seconds / totals.steps, totals.data_seconds / totals.steps
    workers = state.config.trainer.num_workers
    if reads_in_waits(state.train_data, workers, state.collate):
        load = wait + totals.ahead_seconds / totals.steps
    else:
        load = step * max(workers, 1)
    if wait < max(LOADING_MATTERS * step, SHORTEST_WAIT_SECONDS) or (state.walks_stream and workers):
        return {"wait_s": wait, "load_s": None, "workers": None}
    needed = 1 if state.walks_stream else math.ceil(round(load / max(step - wait, wait / 100), 2))
    return {"wait_s": wait, "load_s": load, "workers": max(needed, workers + 1)}


def _device_of_several(plan: Plan, facts: dict[str, Any], place: int) -> dict[str, Any]:
    """Return the facts of one of several devices of a rank, of which only the rank was timed."""
    largest = apportion(facts["micro_batch"], plan.card_shares).counts[place]
    unknown = {"samples_per_s": None, "peak_memory": facts["peak_memory"] if place == 0 else None}
    share = {"share": plan.share_of(place), "local_batch": plan.batch_size_of(place)}
    return facts | share | unknown | {"micro_batch": largest}


def _emulation(state: TrainState, ranks: list[dict[str, Any]], time_scale: float) -> dict[str, Any]:
    """Return the step that the cost model predicts, and each rank's real phases, in real seconds."""
    work = [rank["work"] for rank in ranks]
    # A rank without samples has no backward pass: its buckets leave at once.
    computing = [rank["buckets"] for rank in ranks if rank["work"] and rank["work"]["backward"]]
    buckets: list[tuple[float, int]] = computing[0] if computing else []
    predicted = None
    if all(work):
        model = [Work(tuple(w["forward"]), tuple(w["backward"]), w["update"]) for w in work]
        links = links_of(state.plan)
        predicted = step_seconds(model, links, buckets) * time_scale
        predicted += state.engine.extra_step_seconds() * time_scale
    return {
        "time_scale": time_scale,
        "predicted_step_s": predicted,
        "buckets": buckets,
        "devices": [
            {"id": device.id, "work": rank["work"], "phases": rank["phases"]}
            for device, rank in zip(state.plan.devices, ranks, strict=True)
        ],
    }


def _phases(state: TrainState) -> dict[str, dict[str, float]]:
    """Return the medians of real and modelled seconds of each kind of phase that this rank paced."""
    phases: dict[str, list[tuple[float, float]]] = {}
    for name, real, modelled in state.backend.paced():
        phases.setdefault(name, []).append((real, modelled))
    phases["exchange"] = list(state.hook.link_seconds)
    return {
        name: {
            "real": statistics.median(real for real, _ in pairs),
            "modelled": statistics.median(modelled for _, modelled in pairs),
            "ratio": statistics.median(real / modelled for real, modelled in pairs),
        }
        for name, pairs in phases.items()
        if pairs
    }


def _invalid_reason(state: TrainState) -> str | None:
    """Return why this rank's timings must not be used, `None` if they may."""
    reason = state.backend.invalid_reason()
    late = max((link.late_share() for link in state.engine.paced_links), default=0.0)
    if reason is None and late > OUTRUN_TOLERANCE:
        reason = (
            f"{state.backend.spec}: this machine's real exchange took {late:.0%} "
            "longer than the emulated links; raise `hardware.time_scale`"
        )
    return reason


def _local_report(state: TrainState, outcome: Outcome) -> dict[str, Any]:
    """Return this rank's measurements as plain types."""
    totals, steady = outcome.totals, outcome.totals.after_warmup
    working = steady.local_samples and steady.compute_seconds
    share = totals.local_samples / totals.global_samples if totals.steps else None
    seconds = state.hook.exchange_seconds if state.hook.sent_bytes else None
    work = state.engine.work()
    return {
        "facts": state.engine.facts(),
        "invalid_reason": _invalid_reason(state),
        "work": asdict(work.modelled) if work.modelled is not None else None,
        "buckets": list(state.hook.buckets),
        "phases": _phases(state),
        "own": {
            "compute": steady.compute_seconds,
            "waited": steady.wait_seconds,
            "samples": steady.local_samples,
            # The update, and what the host does between two steps.
            "rest": steady.train_seconds - steady.compute_seconds - steady.wait_seconds - steady.data_seconds,
        },
        "loading": loading_of(state, steady),
        "sent": state.engine.sent_bytes(totals.steps),
        "exchanged": seconds / totals.steps if seconds is not None and totals.steps else None,
        "joules": outcome.energy.joules()
        if outcome.energy is not None
        else [None] * len(driven_backends(state)),
        "device": {
            **versions(),
            "share": share if work.share is None else work.share,
            "local_batch": work.samples,
            "micro_batch": work.microbatch,
            "samples_per_s": steady.local_samples / steady.compute_seconds if working else None,
            "idle_s": totals.wait_seconds,
            "peak_memory": state.backend.peak_memory_bytes(),
            "steps": totals.steps,
        },
    }
