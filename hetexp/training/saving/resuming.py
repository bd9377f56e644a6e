"""Resumes a run from a checkpoint of any strategy and devices."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetexp.core.errors import CheckpointError
from hetexp.data.sampler import Position
from hetexp.optimizer.build import build_optimizer, restart_schedule
from hetexp.training.nonfinite.loss_scale import LossScale
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
    # The learning rates are a function of the step and of this run's configuration.
    restart_schedule(state.schedule, saved.step)
    restore_random(state, folder)
    state.microbatch_limits = _limits_before(state, saved.extra.get("devices", []))
    return Progress.from_dict(saved.step, saved.position, saved.extra["progress"])


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
        if any(key not in group for key in holds for group in groups):  # keys of a function that makes groups
            holds = {key for group in built for key in group}
        holds = (holds | {"lr", "initial_lr"}) - {"params", "param_names"}
    held, taken = {}, {}
    for group, first in zip(groups, built, strict=True):
        for key in first.keys() - {"params", "param_names"}:
            now, new = group[key], first[key]
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
    with contextlib.suppress(Exception):  # an optimizer that needs more than a gradient cannot be checked
        fresh = build_optimizer(state.plan.config["optimizer"], nn.ParameterList([twin]))
        fresh.step()
        return sorted(fresh.state[twin].keys() - state.optimizer.state[smallest].keys())
    return []


def _limits_before(state: TrainState, devices: list[dict[str, Any]]) -> list[int | None]:
    """Return the microbatch limits of the same devices in the saved run."""
    limits = {(device["id"], device["name"]): device.get("microbatch_limit") for device in devices}
    return [limits.get((device.id, device.name)) for device in state.plan.devices]
