"""The devices of ranks that another engine started: LOCAL_RANK counts to the device of a process."""

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
from hetexp.hardware.backend import VISIBILITY, environment_together
from hetexp.hardware.backends.cpu import CpuBackend, cpu_count
from hetexp.hardware.catalogue import Link
from hetexp.hardware.selection.devices import threads_for
from hetexp.hardware.selection.pool import Selection
from hetexp.launch.environments.interpreter import is_own


def device_report(selection: Selection, rank_env: RankEnv, address: str) -> dict[str, Any]:
    """Return the report of this process's device to rank 0.

    A host that computes on its CPU has as many CPU ranks as processes.

    Args:
        selection: the devices of this host, as the configuration selects them.
        address: of this host.
    """
    devices, problems = list(selection.devices), list(selection.problems)
    index = rank_env.local_rank
    if devices and len(devices) <= index and all(device.backend == "cpu" for device in devices):
        devices += [CpuBackend.describe(number) for number in range(len(devices), index + 1)]
    if not problems and len(devices) <= index:
        names = ", ".join(str(device) for device in devices) or "none"
        problems.append(
            f"`hardware` must choose a device for each process of a host, but of {rank_env.host} it chooses "
            f"{len(devices)} ({names}), and this is process {index + 1} there. Start fewer on it "
            "(--nproc-per-node), or choose more devices."
        )
    device = devices[index] if index < len(devices) else None
    if device is not None and device.python is not None and not is_own(device.python):
        problems.append(
            f"`hardware.devices` must name no interpreter where {rank_env.engine} starts the ranks, but "
            f"{device.id} asks for {device.python} instead of {sys.executable}."
        )
    return {
        "node": rank_env.node,
        "host": rank_env.host,
        "address": address,
        "local_rank": index,
        "device": asdict(device) if device is not None else None,
        "rest": [str(device) for device in devices[index + 1 :]],
        "reasons": selection.reasons,
        "problems": problems,
        "network": selection.network.model_dump() if selection.network is not None else None,
        "cores": cpu_count(),
    }


def gather_devices(reports: Sequence[dict[str, Any]], engine: str) -> Selection:
    """Return the devices of all ranks in rank order, with unique ids.

    Args:
        reports: of each rank (`device_report`).
    """
    selection = Selection()
    labels = _labels(reports)
    several = len(set(labels)) > 1
    last: dict[str, dict[str, Any]] = {}
    for label, report in zip(labels, reports, strict=True):
        selection.problems += report["problems"]
        if report["device"] is not None:
            device = DeviceSpec.from_dict(report["device"])
            if several:
                device = replace(device, id=f"{device.id}@{label}", host=device.host or label)
            selection.devices.append(device)
        if report["local_rank"] == 0:
            selection.reasons += [f"{label}: {why}" if several else why for why in report["reasons"]]
        if label not in last or report["local_rank"] > last[label]["local_rank"]:
            last[label] = report
        if selection.network is None and report["network"] is not None:
            selection.network = Link.model_validate(report["network"])
    selection.problems = list(dict.fromkeys(selection.problems))
    selection.reasons += [
        f"{name} of {label} has no process, and stays idle."
        for label, report in last.items()
        for name in report["rest"]
    ]
    hosts = f" on {len(last)} hosts ({', '.join(last)})" if several else ""
    selection.reasons.append(
        f"{engine} has started {len(reports)} ranks{hosts}; LOCAL_RANK counts to each device."
    )
    ids = [device.id for device in selection.devices]
    doubles = dict.fromkeys(device_id for device_id in ids if ids.count(device_id) > 1)
    if doubles and not selection.problems:
        selection.problems.append(
            f"`LOCAL_RANK` must differ between the processes of a host, but several of them drive "
            f"{', '.join(doubles)}."
        )
    return selection


def _labels(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return a unique name for the host of each rank: several hosts may have the same name."""
    nodes: dict[str, set[str]] = {}
    for report in reports:
        nodes.setdefault(report["host"], set()).add(report["node"])
    return [
        report["host"] if len(nodes[report["host"]]) == 1 else f"{report['host']}-{report['node']}"
        for report in reports
    ]


def threads_of(plan: Plan, cores: dict[str, int], wanted: int | None, loaders: int = 0) -> tuple[int, ...]:
    """Return the CPU threads of each rank: the wanted number, or its part of the cores of its host.

    Args:
        cores: of the host of each device, by the device's id.
        loaders: `trainer.num_workers`, the loader processes of each rank.
    """
    threads: dict[str, int] = {}
    for host in {device.host for device in plan.devices}:
        devices = [device for device in plan.devices if device.host == host]
        counts = threads_for(devices, wanted, cores[devices[0].id], loaders)
        threads |= {device.id: count for device, count in zip(devices, counts, strict=True)}
    return tuple(threads[device.id] for device in plan.devices)


def set_environment(plan: Plan, rank: int) -> None:
    """Let this process see only its own device, and set `comm.env`; must run before it uses a card."""
    visible = environment_together([plan.devices[rank]])
    for name in VISIBILITY:
        os.environ.pop(name, None)
    os.environ.update({**variables(plan.config.get("comm", {}).get("env")), **visible})
