"""A machine's own devices in a cluster: what the file says of them, and how all others know them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from hetexp.core.cluster import HostEntry
from hetexp.core.config import Config, HardwareConfig
from hetexp.core.device import DeviceSpec
from hetexp.plan.strategy import Strategy


def own_hardware(config: Config, host: HostEntry) -> HardwareConfig:
    """Return the section `hardware` as it is on one machine."""
    hardware = config.hardware
    if host.devices is None:
        return hardware
    wanted = HardwareConfig.model_validate_json(json.dumps({"devices": host.devices}), strict=True)
    return hardware.model_copy(update={"devices": wanted.devices, "cards": None, "gpu_ids": None})


def of_host(devices: Sequence[DeviceSpec], name: str) -> list[DeviceSpec]:
    """Return a machine's devices with its name: `cuda:0@desktop`."""
    return [replace(device, id=f"{device.id}@{name}", host=name) for device in devices]


def problems_over_hosts(
    config: Config, strategy: Strategy | None, devices: Sequence[DeviceSpec]
) -> list[str]:
    """Return why devices of several machines cannot train together.

    Args:
        strategy: `None` if it cannot be built, which its own check reports.
    """
    problems = strategy.check_hosts() if strategy is not None else []
    emulated = [device.id for device in devices if device.backend == "emulated"]
    if emulated and not config.cluster.on_one_machine:
        problems.append(
            f"`cluster.hosts` must have no emulated devices ({', '.join(emulated)}): machines have no clock "
            "in common by which they could be paced. Emulate on one machine, with `host` beside the devices."
        )
    return problems
