"""The device of this process: the one of its host's chosen devices that LOCAL_RANK counts to."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from hetexp.core.config import variables
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.rank_env import RankEnv
from hetexp.engine.probe import ProbeServer
from hetexp.hardware.backend import VISIBILITY, environment_together
from hetexp.hardware.backends.cpu import CpuBackend, cpu_count
from hetexp.hardware.catalogue import Link
from hetexp.hardware.selection.devices import threads_for
from hetexp.hardware.selection.pool import Selection
from hetexp.launch.environments.interpreter import is_own


def own_device(
    selection: Selection, seat: RankEnv, address: str, probe: ProbeServer | None = None
) -> dict[str, Any]:
    """Return what this process tells rank 0 of its device.

    A host that is to compute on its CPU has as many CPU ranks as processes.

    Args:
        selection: what the configuration chooses of this host's devices.
        address: of this host.
        probe: what rank 0 measures the network with, on one rank of each host.
    """
    devices, problems = list(selection.devices), list(selection.problems)
    place = seat.local_rank
    if devices and len(devices) <= place and all(device.backend == "cpu" for device in devices):
        devices += [CpuBackend.describe(index) for index in range(len(devices), place + 1)]
    if not problems and len(devices) <= place:
        names = ", ".join(str(device) for device in devices) or "none"
        problems.append(
            f"`hardware` must choose a device for each process of a host, but of {seat.host} it chooses "
            f"{len(devices)} ({names}), and this is process {place + 1} there. Start fewer on it "
            "(--nproc-per-node), or choose more devices."
        )
    device = devices[place] if place < len(devices) else None
    if device is not None and device.python is not None and not is_own(device.python):
        problems.append(
            f"`hardware.devices` must name no interpreter where {seat.engine} starts the ranks, but "
            f"{device.id} asks for {device.python} instead of {sys.executable}."
        )
    return {
        "node": seat.node,
        "host": seat.host,
        "address": address,
        "local_rank": place,
        "device": asdict(device) if device is not None else None,
        "rest": [str(one) for one in devices[place + 1 :]],
        "reasons": selection.reasons,
        "problems": problems,
        "network": selection.network.model_dump() if selection.network is not None else None,
        "cores": cpu_count(),
        "probe": [probe.port, probe.token] if probe is not None else None,
    }


def gathered(facts: Sequence[dict[str, Any]], engine: str) -> Selection:
    """Return the devices of all ranks in rank order, under ids that are each one's own.

    Args:
        facts: of each rank's device (`own_device`).
    """
    selection = Selection()
    labels = _labels(facts)
    several = len(set(labels)) > 1
    for rank, one in enumerate(facts):
        selection.problems += one["problems"]
        if one["device"] is not None:
            device = DeviceSpec.from_dict(one["device"])
            if several:
                host = device.host or labels[rank]
                device = replace(device, id=f"{device.id}@{labels[rank]}", host=host)
            selection.devices.append(device)
        if one["local_rank"] == 0:
            selection.reasons += [
                f"{labels[rank]}: {reason}" if several else reason for reason in one["reasons"]
            ]
    selection.problems = list(dict.fromkeys(selection.problems))
    idle = _idle(facts, labels)
    selection.reasons += [f"{name} of {label} has no process, and stays idle." for label, name in idle]
    hosts = f" on {len(set(labels))} hosts ({', '.join(dict.fromkeys(labels))})" if several else ""
    selection.reasons.append(
        f"{engine} has started {len(facts)} ranks{hosts}; LOCAL_RANK counts to each device."
    )
    network = next((one["network"] for one in facts if one["network"] is not None), None)
    selection.network = Link.model_validate(network) if network is not None else None
    _tell_doubles(selection)
    return selection


def _labels(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return each rank's host by a name that no other host has: hosts may be called alike."""
    nodes: dict[str, set[str]] = {}
    for one in facts:
        nodes.setdefault(one["host"], set()).add(one["node"])
    return [one["host"] if len(nodes[one["host"]]) == 1 else f"{one['host']}-{one['node']}" for one in facts]


def _idle(facts: Sequence[dict[str, Any]], labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return the devices that no process drives, beside their host."""
    last: dict[str, dict[str, Any]] = {}
    for label, one in zip(labels, facts, strict=True):
        if label not in last or one["local_rank"] > last[label]["local_rank"]:
            last[label] = one
    return [(label, name) for label, one in last.items() for name in one["rest"]]


def _tell_doubles(selection: Selection) -> None:
    """Two ranks with one LOCAL_RANK on one host would drive the same device."""
    ids = [device.id for device in selection.devices]
    doubles = dict.fromkeys(one for one in ids if ids.count(one) > 1)
    if doubles and not selection.problems:
        selection.problems.append(
            f"`LOCAL_RANK` must differ between the processes of a host, but several of them drive "
            f"{', '.join(doubles)}."
        )


def threads_of(plan: Plan, cores: dict[str, int], wanted: int | None) -> tuple[int, ...]:
    """Return the CPU threads of each rank: as wanted, else its part of its host's cores.

    Args:
        cores: of the host of each device, by the device's id.
    """
    threads: dict[str, int] = {}
    for host in {device.host for device in plan.devices}:
        here = [device for device in plan.devices if device.host == host]
        of_each = threads_for(here, wanted, cores[here[0].id])
        threads |= {device.id: count for device, count in zip(here, of_each, strict=True)}
    return tuple(threads[device.id] for device in plan.devices)


def take_environment(plan: Plan, rank: int) -> None:
    """Make this process see its own device only, and set what `comm.env` wants; before it touches a card."""
    wanted = variables(plan.config.get("comm", {}).get("env"))
    visible = environment_together([plan.devices[rank]])
    for name in VISIBILITY:
        if name not in visible:
            os.environ.pop(name, None)
    os.environ.update({**wanted, **visible})
