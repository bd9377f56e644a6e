"""A checked run: its configuration, devices, request, strategy and policy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.core.errors import ConfigError

if TYPE_CHECKING:  # imported at each start of the command, also to complete a word
    from hetexp.balancing.base import BalancingPolicy
    from hetexp.core.config import Config
    from hetexp.hardware.selection.pool import Selection
    from hetexp.plan.strategy import Strategy

_BUILT = {"strategy": "strategy", "policy": "balancing"}
"""Object that a run builds once → its section of the configuration."""


@dataclass(frozen=True)
class Request:
    """The facts about a run besides its configuration: its folders and the typed words."""

    run_dir: Path
    working_dir: Path
    choices: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    group: str | None = None
    sweep: Path | None = None
    """Folder of the sweep that the run is one of."""
    script: Path | None = None
    """A user's own script that the ranks run, which decides the size of a batch."""
    script_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSpec:
    """One run, passed from its checks to its launch.

    It builds strategy and policy once. Another section makes another `RunSpec`, so that they cannot be stale.
    """

    config: Config
    raw: dict[str, Any]
    """The configuration as plain types, which the plan holds."""
    selection: Selection
    request: Request

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy.

        Raises:
            ConfigError: the configuration of the strategy is wrong.
        """
        from hetexp.core.instantiate import instantiate

        built: Strategy = instantiate(self.config.strategy)
        return built

    @cached_property
    def policy(self) -> BalancingPolicy:
        """The balancing policy.

        Raises:
            ConfigError: the configuration of the policy is wrong.
        """
        from hetexp.core.instantiate import instantiate

        built: BalancingPolicy = instantiate(self.config.balancing)
        return built

    def replaced(self, **changes: Any) -> RunSpec:
        """Return the run with other fields; strategy and policy stay while their sections do."""
        other = replace(self, **changes)
        for name, section in _BUILT.items():
            if name in self.__dict__ and getattr(other.config, section) == getattr(self.config, section):
                other.__dict__[name] = self.__dict__[name]
        return other

    def with_values(self, **values: Any) -> RunSpec:
        """Return the run with other values of top-level keys, in both forms of the configuration."""
        raw = {**self.raw, **values}
        if "strategy" in values and self.config.fallback is not None:
            raw["strategy"] = values["strategy"] | {"fallback": self.config.fallback}
        return self.replaced(config=self.config.model_copy(update=values), raw=raw)


@dataclass(frozen=True)
class CheckedRun:
    """The result of a check."""

    spec: RunSpec | None
    """`None` if the configuration cannot be read."""
    problems: list[str]

    def accepted(self) -> RunSpec:
        """Return the run.

        Raises:
            ConfigError: everything that is wrong with it.
        """
        if self.problems or self.spec is None:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        return self.spec
