"""Builds the optimizer and the learning-rate schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hetexp.core.config import Config, TrainerConfig, group_entries, optimizer_keys, own_arguments
from hetexp.core.errors import ConfigError, did_you_mean, must_be, must_build
from hetexp.core.instantiate import accepts, check_component, instantiate, locate
from hetexp.optimizer.groups import Groups, parameter_groups
from hetexp.optimizer.schedule import ClassSchedule, follows_metric, length_of, make, unit_of

ScheduleKind = Literal["constant", "linear", "cosine"]
Schedule: TypeAlias = LambdaLR | ClassSchedule
FUSES = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that update by one kernel by default here. torch's default passes over the parameters several
times, with temporaries of their size."""
FUSED_ON = ("cuda", "xpu")
"""torch's types of devices with such kernels (AMD cards are `cuda`, too)."""


def build_optimizer(
    section: Mapping[str, Any],
    model: nn.Module,
    fuses: bool | None = None,
    groups: Groups | None = None,
    lr_factor: float = 1.0,
) -> torch.optim.Optimizer:
    """Build the optimizer that the `optimizer` section describes.

    It gets the parameters that require a gradient, tied ones once. If the section leaves it open, the update
    is one kernel on devices that have one.

    Args:
        section: the section; `_partial_` is implied.
        model: model on its device.
        fuses: whether the device has such a kernel; `None`: by the device of the parameters.
        groups: of the whole model's parameters, if `model` is a part of it.
        lr_factor: factor of all learning rates (`TrainerConfig.lr_factor`).

    Raises:
        ConfigError: the optimizer refuses its arguments, is no `torch.optim.Optimizer`, or has nothing to
            train; a group matches nothing.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("`model` must have a parameter that requires a gradient, but has none.")
    node, groups = own_arguments("optimizer", dict(section)), groups or parameter_groups(section, model)

    def given() -> list[Any]:
        return trainable if groups.single else groups.divide(model)

    built = _build(node, given())
    if fuses is None:
        fuses = all(parameter.device.type in FUSED_ON for parameter in trainable)
    built = _build({**node, "fused": True}, given()) if fuses and _may_fuse(built) else built
    if problems := _unknown_options(built, groups):
        raise ConfigError(problems)
    if lr_factor != 1.0:
        _scale_rates(built, lr_factor)
    return built


def _unknown_options(optimizer: torch.optim.Optimizer, groups: Groups) -> list[str]:
    """Return the options of groups that the optimizer does not have, so that it would ignore them."""
    defaults_of = getattr(optimizer, "defaults_of", lambda _: optimizer.defaults)
    problems = []
    for group, options in zip(optimizer.param_groups, groups.options, strict=False):
        known = defaults_of(group)
        for name in options.keys() - known.keys():
            problems.append(_no_option(name, optimizer, known))
    return list(dict.fromkeys(problems))


def _no_option(name: str, optimizer: object, known: Mapping[str, Any]) -> str:
    key, kind = ("no_decay" if name == "weight_decay" else "groups"), type(optimizer).__name__
    return f"`optimizer.{key}` sets {name}, which is no option of {kind}.{did_you_mean(name, known)}"


def _scale_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the learning rates of all groups.

    Raises:
        ConfigError: the optimizer chooses its own rate.
    """
    for group in optimizer.param_groups:
        if group.get("lr") is None:
            accepted = "null where the optimizer chooses its own learning rate"
            raise ConfigError(must_be("trainer.lr_batch_size", accepted, "a number"))
        group["lr"] = group["lr"] * factor


def _may_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a kernel for the whole update and its options allow it."""
    return type(optimizer) in FUSES and all(
        group["fused"] is None
        and group["foreach"] is None
        and not group["differentiable"]
        and all(parameter.is_floating_point() for parameter in group["params"])
        for group in optimizer.param_groups
    )


def check_optimizer(section: Mapping[str, Any]) -> list[str]:
    """Return the problems of the optimizer's arguments and groups, such as a negative `lr`.

    The optimizer is built without parameters: torch checks the arguments first and the parameters last,
    before it imports its compiler, which would take the launcher longer than all other checks.
    """
    node, target = own_arguments("optimizer", dict(section)), str(section["_target_"])
    located = locate(target)
    problems = _closure_problem(located) or _argument_problems(node, "optimizer")
    keys, _ = optimizer_keys(dict(section))  # its problems are reported with the other sections'
    if problems or keys is None:
        return problems
    if keys.no_decay and inspect.isclass(located) and not accepts(target, "weight_decay"):
        problems.append(must_be("optimizer.no_decay", f"false for {target}, which has no weight decay", True))
    for key, group in group_entries(keys.groups).items():
        options = group.model_extra or {}
        known = inspect.signature(located).parameters
        # A class with kinds of parameters knows the options of each kind only with the model.
        unknown = [] if hasattr(located, "kinds") else [n for n in options if not accepts(target, n)]
        problems += [
            f"`{key}.{name}` is not an option of {target}.{did_you_mean(name, known)}" for name in unknown
        ]
        if options and not unknown and not hasattr(located, "kinds"):
            problems += _argument_problems({**node, **options}, key)
    return problems


def _argument_problems(node: Mapping[str, Any], key: str) -> list[str]:
    try:
        _build(node, [])
    except ConfigError as error:
        found = [problem for problem in error.problems if "empty parameter list" not in problem]
        return [problem.replace("`optimizer`", f"`{key}`", 1) for problem in found]
    return []


def _closure_problem(optimizer: Any) -> list[str]:
    """Return the problem of an optimizer whose `step` must be given a function.

    Args:
        optimizer: its class, or a function that returns one.
    """
    step = getattr(optimizer, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    if closure is None or closure.default is not closure.empty:
        return []
    name = f"{optimizer.__module__}.{optimizer.__qualname__}"
    fix = "Its step calls a function that takes the loss and the gradient again, which no step here can."
    return [must_be("optimizer._target_", "an optimizer whose step needs no closure", name, fix)]


def _build(node: Mapping[str, Any], trainable: Sequence[Any]) -> torch.optim.Optimizer:
    make_optimizer = instantiate({**node, "_partial_": True})
    try:
        built = make_optimizer(trainable)
    except (ValueError, TypeError, RuntimeError) as error:  # torch refuses arguments with all three
        raise ConfigError(f"`optimizer`: {error}") from error
    if not isinstance(built, torch.optim.Optimizer):
        raise ConfigError(must_build("optimizer._target_", "a torch.optim.Optimizer", built))
    if problems := _closure_problem(type(built)):
        raise ConfigError(problems)
    return built


def schedule_of(
    optimizer: torch.optim.Optimizer, trainer: TrainerConfig, total_steps: int, steps_per_epoch: int
) -> Schedule:
    """Return the schedule that `trainer.schedule` describes, to be stepped once after each optimizer step.

    Args:
        total_steps: optimizer steps of the whole run.

    Raises:
        ConfigError: its class refuses its arguments or the optimizer.
    """
    node, unit = trainer.schedule, unit_of(trainer)
    if isinstance(node, str) or unit is None:
        kind: Any = node
        return build_schedule(optimizer, kind, trainer.warmup_steps, total_steps)
    length = length_of(trainer, total_steps, steps_per_epoch)
    return ClassSchedule(optimizer, node, unit, trainer.warmup_steps, length)


def check_schedule(config: Config) -> list[str]:
    """Return the problems of a class in `trainer.schedule`."""
    trainer = config.trainer
    node = trainer.schedule
    if isinstance(node, str):
        return []
    problems = check_component("trainer.schedule", node)
    if problems:
        return problems
    every, follows = trainer.schedule_every, follows_metric(node)
    if follows and every not in (None, "evaluation"):
        fix = f"{node['_target_']} follows the metric of an evaluation."
        problems.append(must_be("trainer.schedule_every", "evaluation or null", every, fix))
    if unit_of(trainer) == "evaluation" and trainer.eval_every == 0:
        problems.append(must_be("trainer.eval_every", "above 0 where the schedule counts evaluations", 0))
    groups, _ = optimizer_keys(config.optimizer)
    simple = groups is not None and groups.groups is None and not groups.no_decay
    if not problems and simple and not hasattr(locate(str(config.optimizer["_target_"])), "kinds"):
        node_of_optimizer = own_arguments("optimizer", config.optimizer)
        try:
            make(node, _build(node_of_optimizer, [nn.Parameter(torch.zeros(2, 2))]), 1000)
        except ConfigError as error:
            problems += error.problems
    return problems


def build_schedule(
    optimizer: torch.optim.Optimizer, kind: ScheduleKind, warmup_steps: int, total_steps: int
) -> LambdaLR:
    """Return the scheduler, to be stepped once after each optimizer step; see `schedule_factor`."""
    return LambdaLR(optimizer, lambda step: schedule_factor(step, kind, warmup_steps, total_steps))


def restart_schedule(schedule: Schedule, step: int) -> None:
    """Set a new schedule to a run that has taken `step` optimizer steps."""
    if isinstance(schedule, ClassSchedule):
        schedule.restart(step)
        return
    schedule.last_epoch = step
    rates = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
    for group, base, factor in rates:
        group["lr"] = base * factor(step)


def follow_schedule(schedule: Schedule, step: int, epoch: int, state: Mapping[str, Any] | None) -> None:
    """Set a new schedule to the point of a run; see `ClassSchedule.follow`."""
    if isinstance(schedule, ClassSchedule):
        schedule.follow(step, epoch, state)
    else:
        restart_schedule(schedule, step)


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
