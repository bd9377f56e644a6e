"""From what each rank measured to the summary of the run."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hetexp.comm.rendezvous import exchange
from hetexp.core.summary import blank_summary
from hetexp.data.loader import cut
from hetexp.training.loop import Outcome
from hetexp.training.state import Parts
from hetexp.training.wiring import versions


def report(
    parts: Parts, store: dist.Store, outcome: Outcome, time_scale: float | None, wall_seconds: float
) -> dict[str, Any]:
    """Gather every rank's measurements; return the summary, the same on every rank but for `checkpoint`."""
    limit = parts.config.comm.timeout_seconds
    everyone = exchange(store, "result", parts.rank, parts.plan.world_size, _mine(parts, outcome), limit)
    totals, seconds = outcome.totals, outcome.totals.train_seconds
    reasons = [rank["invalid_reason"] for rank in everyone if rank["invalid_reason"]]
    summary = blank_summary(parts.plan, "completed")
    summary |= {
        "time_scale": time_scale,
        "valid": not reasons,
        "invalid_reason": "; ".join(reasons) or None,
        "steps": outcome.progress.step,
        "samples": outcome.progress.samples,
        "wall_s": wall_seconds,
        "samples_per_s": totals.global_samples / seconds if totals.steps else None,
        "measured_step_s": seconds / totals.steps if totals.steps else None,
        "final": {"train_loss": outcome.train_loss, "eval": outcome.evaluation or None},
        "checkpoint": outcome.checkpoint,
    }
    summary["versions"] |= versions()
    for device, rank in zip(summary["devices"], everyone, strict=True):
        device |= rank["device"]
    return summary


def _mine(parts: Parts, outcome: Outcome) -> dict[str, Any]:
    """Return what only this rank knows."""
    trainer, totals = parts.config.trainer, outcome.totals
    sizes = cut(parts.plan.local_batch_sizes[parts.rank], trainer.accumulate, trainer.microbatch_size)
    working = totals.local_samples and totals.compute_seconds
    return {
        "invalid_reason": parts.backend.invalid_reason(),
        "device": {
            **versions(),
            "micro_batch": max(sizes, default=0),
            "samples_per_s": totals.local_samples / totals.compute_seconds if working else None,
            "idle_s": totals.wait_seconds,
            "peak_memory": parts.backend.peak_memory_bytes(),
            "steps": totals.steps,
        },
    }
