"""Learning-rate schedules of any class: those of `torch.optim.lr_scheduler`, or a user's own.

The rates follow from the numbers of steps and epochs done, so that a resumed run and a rank that joins later
take the schedule's steps again. Only a schedule that follows a metric has state, which is part of the run's
`Progress`.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch

from hetexp.core.config.trainer import TrainerConfig
from hetexp.core.errors import ConfigError, must_be
from hetexp.core.instantiate import OF_A_SCHEDULE, instantiate, locate

Unit = Literal["step", "epoch", "evaluation"]
LENGTHS = OF_A_SCHEDULE[1:]
"""Arguments that a class without a value for them gets from the length of the run."""
_MOVED = ("lr", "momentum", "betas")
"""Options of a group that schedules change."""


class ClassSchedule:
    """The schedule of a class, with the same interface as `LambdaLR` where the training uses it.

    Args:
        optimizer: whose groups have the rates before the schedule.
        node: `trainer.schedule`, with `_target_`.
        every: unit in which it counts.
        warmup_steps: steps of a linear rise from 0 to its first rate; it begins after them.
        length: units of the whole run, those of the warm-up left out.

    Raises:
        ConfigError: the class refuses its arguments or the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        node: Mapping[str, Any],
        every: Unit,
        warmup_steps: int,
        length: int,
    ) -> None:
        self.optimizer, self.every, self._warmup_steps = optimizer, every, warmup_steps
        self.follows_metric = follows_metric(node)
        self._kind = f"{node['_target_']} by {every}"
        self._node, self._length = node, length
        self._base = [{key: g[key] for key in _MOVED if key in g} for g in optimizer.param_groups]
        before = [set(group) for group in optimizer.param_groups]
        self.added: set[str] = {"initial_lr"}
        """Keys of the optimizer's groups that the schedule has added."""
        self._begin()
        for group, keys in zip(optimizer.param_groups, before, strict=True):
            self.added |= group.keys() - keys
        self._warm()

    @property
    def moved(self) -> set[str]:
        """Keys of the optimizer's groups that the schedule decides, beside the rate."""
        return (self.added - {"initial_lr"}) | {"momentum", "betas"}

    def set_length(self, length: int) -> None:
        """Begin again with another length of the run; `follow` comes next."""
        self._length = length
        self._begin()

    def _begin(self) -> None:
        """Build the schedule again, as at the beginning of the run."""
        for group, base in zip(self.optimizer.param_groups, self._base, strict=True):
            for key in self.added:
                group.pop(key, None)
            group.update(base)
        self._inner = make(self._node, self.optimizer, self._length)
        self._first = [group["lr"] for group in self.optimizer.param_groups]
        self.last_epoch = self.count = 0

    def step(self) -> None:
        """Set the rates of the next step: one more is done."""
        self.last_epoch += 1
        if self.last_epoch <= self._warmup_steps:
            self._warm()
        elif self.every == "step":
            self._advance()

    def _warm(self) -> None:
        factor = (
            (self.last_epoch + 1) / (self._warmup_steps + 1) if self.last_epoch < self._warmup_steps else 1
        )
        for group, first in zip(self.optimizer.param_groups, self._first, strict=True):
            group["lr"] = first * factor

    def _advance(self, *metric: float) -> None:
        with warnings.catch_warnings():  # torch's own, if a step was left out before the first of them
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self._inner.step(*metric)
        self.count += 1

    def restart(self, step: int) -> None:
        """Go to the point of a run that has taken `step` optimizer steps; `follow` sets its other units."""
        if step == self.last_epoch + 1:
            self.step()
            return
        if self.every != "step":
            self.last_epoch = step
            if step <= self._warmup_steps:
                self._warm()
            return
        self._begin()
        self._warm()
        for _ in range(step):
            self.step()

    def follow(self, step: int, epoch: int, state: Mapping[str, Any] | None) -> None:
        """Go to the point of a run that has taken `step` optimizer steps and `epoch` passes over the data.

        Args:
            state: result of `unit_over`, or that of another schedule, which is no use here.
        """
        if self.every == "step":
            self.restart(step)
            return
        self._begin()
        self.last_epoch = step
        known = state if state is not None and state["kind"] == self._kind else None
        if self.follows_metric:
            if known is not None:
                self._restore(known)
        else:
            for _ in range(known["count"] if known is not None else epoch if self.every == "epoch" else 0):
                self._advance()
        if step < self._warmup_steps:
            self._warm()

    def unit_over(self, *metric: float) -> dict[str, Any]:
        """Count an epoch or an evaluation, unless it ends in the warm-up; return the state for `follow`.

        Args:
            metric: that the schedule follows, if it follows one.
        """
        if self.last_epoch >= self._warmup_steps:
            self._advance(*metric)
        state: dict[str, Any] = {"kind": self._kind, "count": self.count}
        if self.follows_metric:
            inner = {key: value for key, value in self._inner.state_dict().items() if _is_plain(value)}
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            state |= {"rates": rates, "base": self._rates_before(), "inner": inner}
        return state

    def _restore(self, state: Mapping[str, Any]) -> None:
        own = self._inner.state_dict().keys()
        self._inner.load_state_dict({key: value for key, value in state["inner"].items() if key in own})
        self.count = int(state["count"])
        before = zip(self._rates_before(), state["base"], state["rates"], strict=True)
        for group, (base, old, rate) in zip(self.optimizer.param_groups, before, strict=True):
            # What was typed on resume holds: the reductions so far apply to the new rate.
            group["lr"] = rate if base == old or not old else base * rate / old

    def _rates_before(self) -> list[float]:
        return [float(base["lr"]) for base in self._base]


def make(node: Mapping[str, Any], optimizer: torch.optim.Optimizer, length: int) -> Any:
    """Build what `trainer.schedule` describes; schedules among its arguments get the optimizer, too.

    Args:
        length: for arguments such as `T_max` that have no value.

    Raises:
        ConfigError: the class refuses its arguments or the optimizer.
    """

    def built(value: Any) -> Any:
        if isinstance(value, list):
            return [built(item) for item in value]
        if not isinstance(value, Mapping) or "_target_" not in value:
            return value
        if "optimizer" not in _parameters(value):
            return instantiate(value)
        target = locate(str(value["_target_"]))
        return target(optimizer, **{key: built(item) for key, item in _arguments(value, length).items()})

    try:
        schedule = built(dict(node))
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ConfigError(f"`trainer.schedule`: {error}") from error
    if not callable(getattr(schedule, "step", None)) or not hasattr(schedule, "state_dict"):
        target = str(node["_target_"])
        raise ConfigError(
            must_be("trainer.schedule._target_", "a class with `step` and `state_dict`", target)
        )
    return schedule


def _arguments(node: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return a node's arguments, with the length of the run where it is missing."""
    arguments = {key: value for key, value in node.items() if not key.startswith("_")}
    by_epochs = arguments.get("epochs") is not None  # OneCycleLR's other way
    for name, parameter in _parameters(node).items():
        optional = name not in arguments and parameter.default not in (None, parameter.empty)
        if name in LENGTHS and arguments.get(name) is None and not optional and not by_epochs:
            arguments[name] = max(1, length)
    return arguments


def _parameters(node: Mapping[str, Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(locate(str(node["_target_"]))).parameters
    except (TypeError, ValueError):
        return {}


def follows_metric(node: Mapping[str, Any]) -> bool:
    """Return whether a schedule's steps need a metric, as those of ReduceLROnPlateau do."""
    step = getattr(locate(str(node["_target_"])), "step", None)
    if step is None:  # a function that returns a schedule
        return False
    _, *arguments = inspect.signature(step).parameters.values()
    return any(argument.default is argument.empty for argument in arguments[:1])


def unit_of(trainer: TrainerConfig) -> Unit | None:
    """Return the unit in which the schedule counts; `None` for a shipped one."""
    if isinstance(trainer.schedule, str):
        return None
    return trainer.schedule_every or ("evaluation" if follows_metric(trainer.schedule) else "step")


def length_of(trainer: TrainerConfig, total_steps: int, steps_per_epoch: int) -> int:
    """Return the units of a class schedule in a whole run."""
    unit = unit_of(trainer)
    if unit == "epoch":
        return -(-total_steps // steps_per_epoch)
    steps = total_steps - trainer.warmup_steps
    return steps // trainer.eval_every if unit == "evaluation" and trainer.eval_every else steps


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
