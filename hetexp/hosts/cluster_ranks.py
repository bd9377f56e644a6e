"""The ranks of a cluster: those of this machine, and on the leader those of all machines that joined."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

from hetexp.core.config import Config, HardwareConfig
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.hardware.catalogue import Link
from hetexp.hardware.detection.inventory import Inventory
from hetexp.hardware.link_probe import in_words
from hetexp.hardware.selection.devices import network_between, threads_for
from hetexp.hardware.selection.pool import Selection
from hetexp.hosts.this_host import this_host
from hetexp.launch.rank_source import LauncherRanks, NeedBytes
from hetexp.plan.strategy import Strategy


class ClusterRanks(LauncherRanks):
    """The ranks of this machine, before the machines have met."""

    complete = False

    def local_config(self, config: Config) -> Config:
        host = this_host(config.cluster, config.node)
        if host.devices is None:
            return config
        wanted = HardwareConfig.model_validate_json(json.dumps({"devices": host.devices}), strict=True)
        changes = {"devices": wanted.devices, "cards": None, "gpu_ids": None}
        return config.model_copy(update={"hardware": config.hardware.model_copy(update=changes)})

    def has_run_folder(self, config: Config) -> bool:
        try:
            return this_host(config.cluster, config.node) is config.cluster.leader
        except ConfigError:  # `local_config` reports it
            return False

    def select(self, config: Config, inventory: Inventory, need_bytes: NeedBytes | None) -> Selection:
        selection = super().select(config, inventory, need_bytes)
        try:
            name = this_host(config.cluster, config.node).name
        except ConfigError:  # `local_config` reports it
            return selection
        wanted, loaders = config.hardware.threads_per_rank, config.trainer.num_workers
        selection.threads = threads_for(selection.devices, wanted, loaders=loaders)
        selection.devices = [
            replace(device, id=f"{device.id}@{name}", host=name) for device in selection.devices
        ]
        self._add_joined(selection, name)
        network_between(config.hardware, selection)
        return selection

    def _add_joined(self, selection: Selection, name: str) -> None:
        """Add the devices of the machines that joined this one."""

    def check(self, config: Config, strategy: Strategy | None, selection: Selection) -> list[str]:
        problems = strategy.check_hosts() if strategy is not None else []
        emulated = [device.id for device in selection.devices if device.backend == "emulated"]
        if emulated and not config.cluster.on_one_machine:
            problems.append(
                f"`cluster.hosts` must have no emulated devices ({', '.join(emulated)}): machines have no "
                "clock in common by which they could be paced. Emulate on one machine, with `host` beside "
                "the devices."
            )
        return problems


@dataclass
class JoinedCluster(ClusterRanks):
    """The ranks of all machines, for the leader.

    Its fields describe the other machines, in the order of `cluster.hosts`.
    """

    devices: list[DeviceSpec] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    network: Link | None = None
    """The slowest link from the leader to another machine; `None`: it was not measured."""

    complete = True

    def _add_joined(self, selection: Selection, name: str) -> None:
        selection.devices += self.devices
        selection.threads += tuple(self.threads)
        selection.reasons.append(f"{name} leads; {', '.join(self.names)} joined it.")
        selection.network = self.network
        if self.network is not None:
            selection.reasons.append(in_words(self.network))
