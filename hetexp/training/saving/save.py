"""Saves the training's state as a checkpoint, written by one rank for all or by each rank for itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetexp.checkpoint.folder import Snapshot, SnapshotMemory, TrainingState, packed_whole
from hetexp.checkpoint.manifest import folder_name
from hetexp.checkpoint.rotation import KEPT_TIMED, Rotation
from hetexp.core.errors import CheckpointError
from hetexp.data.base import stream_of
from hetexp.optimizer.build import follow_schedule
from hetexp.training.engine import CheckpointParts
from hetexp.training.saving.random_states import random_files
from hetexp.training.state import Progress, TrainState


def provenance(state: TrainState) -> list[dict[str, Any]]:
    """Return each rank's device, its share of the batch, and its versions, for the checkpoint."""
    plan = state.plan
    ranks = [rank for rank in range(plan.world_size) for _ in plan.devices_of(rank)]
    kept = ("id", "backend", "vendor", "name", "uuid", "architecture", "driver", "emulated")
    return [
        {key: getattr(device, key) for key in kept}
        | {"share": share, "precision": plan.precisions[rank] if plan.precisions else None}
        | {"microbatch_limit": state.microbatch_limits[rank]}
        | (state.run_on[rank] if state.run_on else {})
        for rank, device, share in zip(ranks, plan.all_devices, plan.card_shares or plan.shares, strict=True)
    ]


def save(
    state: TrainState,
    progress: Progress,
    evaluation: Mapping[str, float] | None = None,
    wait: bool = False,
    timed: bool = False,
) -> str | None:
    """Write a checkpoint on rank 0, whose replica equals all others; return its path there.

    All ranks call it, and go on once the snapshot is taken (`trainer.checkpoint_in_background`), however long
    that takes. One write is under way at a time.

    Args:
        evaluation: of the present weights, if they were evaluated.
        wait: until the checkpoint is on the disk.
        timed: whether it is written only because the last one is old (`trainer.checkpoint_minutes`).

    Raises:
        CheckpointError: the write failed, or the one before it with `trainer.on_save_error=stop`.
    """
    engine = state.engine
    files = random_files(state) | engine.state_files()
    gathered, path = engine.gather(progress.step), None
    if engine.group.rank == 0:
        described = _state(state, progress)
        described.extra.update(engine.state_extra() if gathered is None else gathered.extra)
        with state.communicator.working():
            _write(state, Content(described, files, evaluation, timed, gathered), wait)
        path = engine.checkpoint_path(progress.step)
    state.communicator.meet()
    return path


def add_evaluation(state: TrainState, step: int, evaluation: Mapping[str, float]) -> None:
    """Add an evaluation to the checkpoint that was saved at this step; all ranks call it."""
    if not evaluation or state.engine.group.rank:
        return
    folder = state.engine.checkpoint_folder / folder_name(step)
    state.saver.add_evaluation(folder, evaluation, _rotation(state))


def finish_saving(state: TrainState) -> None:
    """Wait until the last checkpoint is on the disk; all ranks call it.

    Raises:
        CheckpointError: the write failed.
    """
    with state.communicator.working():
        state.saver.wait()
    state.communicator.meet()


def save_before(state: TrainState, good: Progress, first_step: int, saved_at: int) -> str:
    """Save the state before a step that ends the run; return the advice on how to resume. All ranks call it.

    Args:
        good: progress before that step, to which the weights belong.
        first_step: number of steps done when this run began: its first state needs no checkpoint.
        saved_at: step of the last checkpoint.
    """
    fix = "with a lower `optimizer.lr`, with `trainer.clip_norm`, or with trainer.non_finite=skip"
    if state.config.trainer.fast_dev_run or good.step == first_step:
        state.communicator.barrier()  # no rank leaves while rank 0 still writes metrics
        return f"No step before it is worth a checkpoint: start again {fix}, which leaves such steps out."
    if saved_at != good.step:
        follow_schedule(state.schedule, good.step, good.position.epoch, good.schedule)
        try:
            save(state, good, wait=True)
        except CheckpointError as error:  # on rank 0, for which the others wait
            state.communicator.meet()
            return f"The state before it could not be saved: {error}"
    try:
        state.saver.wait()
    except CheckpointError as error:
        state.communicator.barrier()
        return f"The state before it could not be saved: {error}"
    state.communicator.barrier()
    return (
        f"The state before it is saved ({state.checkpoints / folder_name(good.step)}): go on from there by "
        f"resume={state.plan.run_dir}, {fix}, which leaves such steps out."
    )


def _state(state: TrainState, progress: Progress) -> TrainingState:
    stream = stream_of(state.train_data)
    return TrainingState(
        step=progress.step,
        position=progress.position.to_dict(),
        schedule={"step": state.schedule.last_epoch},
        extra={
            "run_id": state.plan.run_id,
            "group": state.group,
            "progress": progress.to_dict(),
            "emulated": state.plan.emulated,
            "devices": provenance(state),
            "config": state.plan.config,
            "data": state.data_facts,
            "stream": None if stream is None else stream.saved_at(progress.position),
            "balancer": state.balancer.to_dict(),
            "loss_scale": state.loss_scale.to_dict() if state.loss_scale is not None else None,
        },
    )


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint beside this rank's model and optimizer."""

    state: TrainingState
    files: dict[str, bytes]
    evaluation: Mapping[str, float] | None = None
    timed: bool = False
    gathered: CheckpointParts | None = None
    """Model and optimizer of all ranks, if each has a part of them."""


def _write(state: TrainState, content: Content, wait: bool) -> None:
    """Write the gathered model and optimizer, or this rank's if none were gathered."""
    trainer = state.config.trainer

    def take(memory: SnapshotMemory) -> Snapshot:
        gathered = content.gathered
        model, optimizer = (
            packed_whole(state.model, state.optimizer)
            if gathered is None
            else (gathered.model, gathered.optimizer)
        )
        return memory.take(model, optimizer, content.state, content.files, content.evaluation, content.timed)

    state.saver.write(
        state.engine.checkpoint_folder,
        take,
        _rotation(state),
        trainer.on_save_error,
        wait or not trainer.checkpoint_in_background,
    )


def _rotation(state: TrainState) -> Rotation:
    trainer, spare = state.config.trainer, state.engine.spare_checkpoints
    most = trainer.keep_last + spare if trainer.keep_last else None
    return Rotation(most, trainer.keep_best, trainer.early_stopping.metric, KEPT_TIMED + spare)
