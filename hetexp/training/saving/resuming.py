"""Resumes a run from a checkpoint of any strategy and devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetexp.core.config import group_entries, optimizer_keys, own_arguments
from hetexp.core.errors import CheckpointError, logged
from hetexp.data.base import stream_of
from hetexp.data.sampler import Position
from hetexp.optimizer.build import build_optimizer, follow_schedule, schedule_of
from hetexp.optimizer.schedule import ClassSchedule, length_of
from hetexp.training.nonfinite.loss_scale import LossScale
from hetexp.training.saving.data_facts import changes
from hetexp.training.saving.random_states import restore_random
from hetexp.training.state import Progress, TrainState

log = logging.getLogger(__name__)


def resume(state: TrainState, configured: bool = True) -> Progress:
    """Load the checkpoint that `resume` names, and return where the run stands.

    Args:
        configured: whether the configuration describes the optimizer, so that its new values hold. The groups
            of a script's own optimizer take all values from the checkpoint, as `load_state_dict` does.

    Raises:
        CheckpointError: the checkpoint does not exist, is incomplete or of another model.
    """
    if state.config.resume is None:
        return Progress(position=_first_position(state))
    configured_groups = [dict(group) for group in state.optimizer.param_groups]
    folder = state.engine.find(Path(state.plan.working_dir, state.config.resume))
    saved = state.engine.load(folder)
    state.resumed_from = {key: saved.extra.get(key) for key in ("run_id", "group")} | {"step": saved.step}
    state.balancer.restore(saved.extra.get("balancer"))
    if state.loss_scale is not None and saved.extra.get("loss_scale") is not None:
        state.loss_scale = LossScale.from_dict(saved.extra["loss_scale"])
    state.engine.restore(folder, saved.extra)
    _merge_groups(state, configured_groups, saved.extra.get("config", {}) if configured else None)
    restore_random(state, folder)
    state.microbatch_limits = _limits_before(state, saved.extra.get("devices", []))
    progress = Progress.from_dict(saved.step, saved.position, saved.extra["progress"])
    if (stream := stream_of(state.train_data)) is not None:
        stream.restore(progress.position, saved.extra.get("stream"))
    _name_changed_data(state, progress, saved.extra.get("data") or {})
    if configured:
        set_total_steps(state, _total_steps(state, progress))
    # The learning rates follow from how far the run is and from this run's configuration.
    follow_schedule(state.schedule, progress.step, progress.position.epoch, progress.schedule)
    return progress


def set_total_steps(state: TrainState, total_steps: int) -> None:
    """Set the optimizer steps of the whole run, and the schedule over them, if it is another number."""
    if total_steps == state.total_steps:
        return
    state.total_steps, trainer = total_steps, state.config.trainer
    steps_per_epoch = state.sampler.steps_per_epoch
    if isinstance(state.schedule, ClassSchedule):
        state.schedule.set_length(length_of(trainer, total_steps, steps_per_epoch))
    else:
        state.schedule = schedule_of(state.optimizer, trainer, total_steps, steps_per_epoch)


def _total_steps(state: TrainState, progress: Progress) -> int:
    """Return the optimizer steps of the whole run, of which some may have been taken with another batch."""
    trainer = state.config.trainer
    if trainer.fast_dev_run or trainer.epochs is None:
        return state.total_steps
    by_epochs = progress.step + state.sampler.steps_left(progress.position, trainer.epochs)
    return by_epochs if trainer.max_steps is None else min(by_epochs, trainer.max_steps)


def _name_changed_data(state: TrainState, progress: Progress, saved: Mapping[str, Any]) -> None:
    """Warn of data that are not those of the checkpoint's run, and forget what no longer holds.

    The place within an epoch means nothing in other training data: a new epoch begins. The best evaluation
    means nothing for other evaluation data.
    """
    if not saved or not state.data_facts:
        return
    training, evaluation = changes(saved, state.data_facts)
    if training:
        goes_on = ""
        if progress.position.offset:
            progress.position = Position(progress.position.epoch + 1)
            goes_on = f" Its place in the epoch is lost: epoch {progress.position.epoch + 1} begins."
        _warn(state, f"the training data are not those of the checkpoint: {training[0]}.{goes_on}")
    if evaluation:
        forgets = ""
        if progress.best is not None:
            progress.best, progress.bad_evaluations = None, 0
            forgets = " Early stopping begins again."
        _warn(state, f"the evaluation data are not those of the checkpoint: {evaluation[0]}.{forgets}")


def _warn(state: TrainState, text: str) -> None:
    if state.rank == 0:
        log.warning("resume: %s", text)


def _first_position(state: TrainState) -> Position:
    """Return where a new run begins in the data."""
    steps, sampler = state.config.debug.first_epoch_steps, state.sampler
    skipped = 0 if steps is None else max(0, sampler.steps_per_epoch - steps)
    return Position(offset=skipped * sampler.global_batch_size)


def _merge_groups(
    state: TrainState, built: Sequence[Mapping[str, Any]], saved: Mapping[str, Any] | None
) -> None:
    """Choose each value of the optimizer's groups, which now hold the checkpoint's values.

    Learning rates, and values that differ between the two runs' configurations, are this run's. All other
    values stay the checkpoint's, as an optimizer may count or estimate something in its groups.

    Args:
        built: the groups before the checkpoint was loaded.
        saved: the saved run's configuration; `None`: the checkpoint's values hold.

    Raises:
        CheckpointError: the optimizer's state in the checkpoint lacks what the new values need.
    """
    groups = state.optimizer.param_groups
    holds: set[str] = set()
    if saved is not None:
        section, before = state.plan.config["optimizer"], saved.get("optimizer") or {}
        holds = {key for key in section.keys() | before.keys() if section.get(key) != before.get(key)}
        holds = _options_of(holds, section, before)
        if any(key not in group for key in holds for group in groups):  # keys of a function that makes groups
            holds = {key for group in built for key in group}
        holds = (holds | {"lr", "initial_lr"}) - {"params", "param_names"}
    moved = state.schedule.moved if isinstance(state.schedule, ClassSchedule) else set()
    held, taken = {}, {}
    for group, first in zip(groups, built, strict=True):
        for key in first.keys() - {"params", "param_names"}:
            now, new = group[key], first[key]
            if key in moved and key not in holds:  # the schedule sets it
                continue
            if key in holds:
                group[key] = new
            if _plain(now) == _plain(new) or (saved is not None and key == "lr"):  # a schedule moves it
                continue
            name = "lr" if key == "initial_lr" else key
            if key in holds:
                held[name] = f"{name}={_plain(new)} (before: {_plain(now)})"
            else:
                taken[name] = f"{name}={_plain(now)} (not {_plain(new)})"
    if held.keys() - {"lr"} and (lacking := _lacking_state(state)):
        raise CheckpointError(
            f"`optimizer` must be as in the checkpoint's run, but has {', '.join(sorted(held.values()))}. "
            f"The checkpoint has no '{lacking[0]}', which the optimizer then needs."
        )
    if held and state.rank == 0:
        log.info("resume: the optimizer has this run's %s.", ", ".join(sorted(held.values())))
    if taken and state.rank == 0:
        level = logging.INFO if saved is not None else logging.WARNING  # a script alone shows only these
        values = ", ".join(sorted(taken.values()))
        log.log(level, "resume: the optimizer has the checkpoint's %s.", values)


def _options_of(changed: set[str], *sections: Mapping[str, Any]) -> set[str]:
    """Return changed keys of the section `optimizer` as the options of groups that they set."""
    options = changed - {"groups", "no_decay"}
    options |= {"weight_decay"} if "no_decay" in changed else set()
    for section in sections if "groups" in changed else ():
        keys, _ = optimizer_keys(dict(section))
        for group in group_entries(keys.groups).values() if keys is not None else ():
            options |= (group.model_extra or {}).keys()
    return options


def _plain(value: Any) -> Any:
    """Return a value to compare and show: a configuration has lists for the tuples of a class."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _lacking_state(state: TrainState) -> list[str]:
    """Return the names of optimizer state that the checkpoint lacks for a parameter."""
    kept = [parameter for parameter, moments in state.optimizer.state.items() if moments]
    if not kept:
        return []
    smallest = min(kept, key=torch.Tensor.numel)
    twin = nn.Parameter(torch.zeros_like(smallest))
    twin.grad = torch.zeros_like(smallest)
    with logged("resume: what the optimizer needs is not checked, as its step takes more than a gradient"):
        section = own_arguments("optimizer", state.plan.config["optimizer"])  # its groups have other names
        fresh = build_optimizer(section, nn.ParameterList([twin]))
        fresh.step()
        return sorted(fresh.state[twin].keys() - state.optimizer.state[smallest].keys())
    return []


def _limits_before(state: TrainState, devices: list[dict[str, Any]]) -> list[int | None]:
    """Return the microbatch limits of the same devices in the saved run."""
    limits = {(device["id"], device["name"]): device.get("microbatch_limit") for device in devices}
    return [limits.get((device.id, device.name)) for device in state.plan.devices]
