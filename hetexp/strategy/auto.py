"""The strategy that the planner picks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, NoReturn

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, did_you_mean, must_be
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.plan.predict.pick import BETWEEN_HOSTS
from hetexp.plan.strategy import Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn


class Auto(Strategy):
    """A placeholder for the exact strategy with the fastest prediction on the devices of the run.

    Between hosts on a slow network it may become a strategy that is exact inside each host only. The launcher
    replaces it before it makes the plan (`hetexp.launch.prepare.select_strategy`), so no rank ever has it.

    Args:
        among: strategies to choose from, such as `[ddp,pipeline]`; `None`: every exact strategy.
        between_hosts: whether `hierarchical_sgd`, which is not exact, may be chosen on several hosts. Its
            prediction must be at least twice as fast as that of any exact strategy.
    """

    name: ClassVar[str] = "auto"
    exact = True

    def __init__(self, among: list[str] | None = None, between_hosts: bool = True) -> None:
        self.among = among
        self.between_hosts = between_hosts

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        if self.among is None or self.among:
            return []
        return ["`strategy.among` must name at least one strategy, but is [] instead. null means all."]

    def candidates(
        self, offered: Callable[[], Mapping[str, Strategy]], several_hosts: bool
    ) -> Mapping[str, Strategy]:
        strategies = offered()
        exact = {name: s for name, s in strategies.items() if s.exact and not isinstance(s, Auto)}
        names = self.among if self.among is not None else list(exact)
        accepted = "a list of " + ", ".join(sorted(exact))
        problems = [
            must_be("strategy.among", accepted, name, did_you_mean(name, exact).strip())
            for name in names
            if name not in exact
        ]
        if problems:
            raise ConfigError(problems)
        candidates = {name: exact[name] for name in names}
        if several_hosts and self.between_hosts and BETWEEN_HOSTS in strategies:
            candidates[BETWEEN_HOSTS] = strategies[BETWEEN_HOSTS]
        return candidates

    def predict(self, inputs: PredictionInputs) -> list[PredictedRun]:
        return []  # the candidates have rows of their own

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        _refuse()

    def accumulate(self, module: nn.Module) -> AbstractContextManager[None]:
        _refuse()

    def gradient_divisor(self, world_size: int) -> int:
        _refuse()


def _refuse() -> NoReturn:
    raise RuntimeError("strategy=auto is replaced by another strategy before ranks start")
