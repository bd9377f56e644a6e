"""Builds the optimizer and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hetexp.core.errors import ConfigError, must_build
from hetexp.core.instantiate import instantiate

ScheduleKind = Literal["constant", "linear", "cosine"]
FUSES = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that update by one kernel by default here. torch's default passes over the parameters several
times, with temporaries of their size."""
FUSED_ON = ("cuda", "xpu")
"""torch's types of devices with such kernels (AMD cards are `cuda`, too)."""


def build_optimizer(
    node: Mapping[str, Any], model: nn.Module, fuses: bool | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer that the `optimizer` section describes.

    It gets the parameters that require a gradient, tied ones once. If the section leaves it open, the update
    is one kernel on devices that have one.

    Args:
        node: the section; `_partial_` is implied.
        model: model on its device.
        fuses: whether the device has such a kernel; `None`: by the device of the parameters.

    Raises:
        ConfigError: the optimizer refuses its arguments, is no `torch.optim.Optimizer`, or has nothing to
            train.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("`model` must have a parameter that requires a gradient, but has none.")
    built = _build(node, trainable)
    if fuses is None:
        fuses = all(parameter.device.type in FUSED_ON for parameter in trainable)
    return _build({**node, "fused": True}, trainable) if fuses and _may_fuse(built) else built


def _may_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a kernel for the whole update and its options allow it."""
    return type(optimizer) in FUSES and all(
        group["fused"] is None
        and group["foreach"] is None
        and not group["differentiable"]
        and all(parameter.is_floating_point() for parameter in group["params"])
        for group in optimizer.param_groups
    )


def check_optimizer(node: Mapping[str, Any]) -> list[str]:
    """Return the problems of the optimizer's arguments, such as a negative `lr`.

    The optimizer is built without parameters: torch checks the arguments first and the parameters last,
    before it imports its compiler, which would take the launcher longer than all other checks.
    """
    try:
        _build(node, [])
    except ConfigError as error:
        return [problem for problem in error.problems if "empty parameter list" not in problem]
    return []


def _build(node: Mapping[str, Any], trainable: list[nn.Parameter]) -> torch.optim.Optimizer:
    make = instantiate({**node, "_partial_": True})
    try:
        built = make(trainable)
    except (ValueError, TypeError, RuntimeError) as error:  # torch refuses arguments with all three
        raise ConfigError(f"`optimizer`: {error}") from error
    if not isinstance(built, torch.optim.Optimizer):
        raise ConfigError(must_build("optimizer._target_", "a torch.optim.Optimizer", built))
    return built


def build_schedule(
    optimizer: torch.optim.Optimizer, kind: ScheduleKind, warmup_steps: int, total_steps: int
) -> LambdaLR:
    """Return the scheduler, to be stepped once after each optimizer step; see `schedule_factor`."""
    return LambdaLR(optimizer, lambda step: schedule_factor(step, kind, warmup_steps, total_steps))


def restart_schedule(schedule: LambdaLR, step: int) -> None:
    """Set a new schedule to a run that has taken `step` optimizer steps."""
    schedule.last_epoch = step
    rates = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
    for group, base, factor in rates:
        group["lr"] = base * factor(step)


def schedule_factor(step: int, kind: ScheduleKind, warmup_steps: int, total_steps: int) -> float:
    """Return the factor of the learning rate at an optimizer step, from 0 to 1.

    It depends on the step only, so that a resumed run needs no other state.

    Args:
        step: optimizer steps already taken. kind: after the warm-up constant at 1, or falling to 0 at
        `total_steps` linearly or by half a cosine wave. warmup_steps: steps of a linear rise; the first is
        above 0, and step `warmup_steps` has 1. total_steps: optimizer steps of the whole run.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if kind == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
