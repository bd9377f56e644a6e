"""Where the ranks of a run come from: this launcher, another engine, or several machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rich.console import Console

from hetexp.core.config import Config
from hetexp.core.plan import Plan
from hetexp.hardware.detection.inventory import Inventory
from hetexp.hardware.selection.devices import select_devices
from hetexp.hardware.selection.pool import Selection
from hetexp.launch.launcher import launch, measure
from hetexp.plan.run_spec import RunSpec
from hetexp.plan.strategy import Strategy

NeedBytes = Callable[[int], int | None]
"""Number of devices → memory that the run needs on each of them, `None` if it is not known."""


class RankSource(ABC):
    """Selects the devices of a run's ranks, and measures and trains with these ranks."""

    running = False
    """Whether the ranks run already, so that measuring starts no process."""
    complete = True
    """Whether `select` returns the devices of all ranks, not only those of this machine."""

    def local_config(self, config: Config) -> Config:
        """Return the configuration with the values for this machine.

        Raises:
            ConfigError: the role of this machine is not known.
        """
        return config

    def has_run_folder(self, config: Config) -> bool:
        """Return whether the folders of runs are on this machine."""
        return True

    def select(self, config: Config, inventory: Inventory, need_bytes: NeedBytes | None) -> Selection:
        """Return the selected devices.

        Args:
            config: what `local_config` returned.
            inventory: the cards of this machine.
        """
        return select_devices(config.hardware, inventory, need_bytes)

    def check(self, config: Config, strategy: Strategy | None, selection: Selection) -> list[str]:
        """Return why the ranks cannot run this configuration.

        Args:
            strategy: `None` if it cannot be built, which its own check reports.
            selection: what `select` returned.
        """
        return []

    def adapt(self, config: Config, raw: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
        """Return both forms of the configuration without the features that these ranks lack."""
        return config, raw

    @abstractmethod
    def measure(self, plan: Plan, spec: RunSpec, console: Console) -> dict[str, Any]:
        """Let the ranks of a plan measure their devices, and return the result of rank 0.

        Raises:
            ConfigError, SetupError, RunFailedError: as `launch`.
        """

    @abstractmethod
    def launch(self, plan: Plan, spec: RunSpec, console: Console) -> dict[str, Any]:
        """Train with the ranks of a plan, and return the summary.

        Raises:
            ConfigError, SetupError: the run could not start.
            RunFailedError: it did not finish.
        """


class LauncherRanks(RankSource):
    """The launcher starts one process for each device of this machine."""

    def measure(self, plan: Plan, spec: RunSpec, console: Console) -> dict[str, Any]:
        return measure(plan, spec, console)

    def launch(self, plan: Plan, spec: RunSpec, console: Console) -> dict[str, Any]:
        return launch(plan, spec, console)
