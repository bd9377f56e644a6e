"""What a rank, or all of them together, make of the training's state: one checkpoint."""

from __future__ import annotations

from typing import Any

from hetexp.checkpoint.folder import TrainingState, save_checkpoint
from hetexp.training.state import Parts, Progress


def provenance(parts: Parts) -> list[dict[str, Any]]:
    """Return what trained the model: each rank's device, its part of the batch, and what it ran on."""
    plan = parts.plan
    kept = ("id", "backend", "vendor", "name", "uuid", "architecture", "driver", "emulated")
    return [
        {key: getattr(device, key) for key in kept}
        | {"share": plan.shares[rank], "precision": plan.precisions[rank] if plan.precisions else None}
        | {"microbatch_limit": parts.microbatch_limits[rank]}
        | (parts.run_on[rank] if parts.run_on else {})
        for rank, device in enumerate(plan.devices)
    ]


def save(parts: Parts, progress: Progress) -> str | None:
    """Write a checkpoint on rank 0, whose replica is as good as any; return its path there.

    The others wait for it, as long as it takes.
    """
    path = None
    if parts.rank == 0:
        with parts.communicator.working():
            path = _write(parts, progress)
    parts.communicator.meet()
    return path


def _write(parts: Parts, progress: Progress) -> str:
    state = TrainingState(
        step=progress.step,
        position=progress.position.to_dict(),
        schedule={"step": parts.schedule.last_epoch},
        extra={
            "run_id": parts.plan.run_id,
            "progress": progress.to_dict(),
            "emulated": parts.plan.emulated,
            "devices": provenance(parts),
            "config": parts.plan.config,
            "balancer": parts.balancer.to_dict(),
            "loss_scale": parts.loss_scale.to_dict() if parts.loss_scale is not None else None,
        },
    )
    return str(save_checkpoint(parts.checkpoints, parts.model, parts.optimizer, state))
