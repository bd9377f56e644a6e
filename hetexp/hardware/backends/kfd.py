"""Reads KFD, the compute part of AMD's kernel driver: the cards, their order, and who computes on them.

Layout: drivers/gpu/drm/amd/amdkfd/kfd_topology.c and kfd_process.c of Linux. The order of nodes is that in
which ROCr counts, GPUs in processors included (BuildDeviceUuidList in ROCR-Runtime's amd_filter_device.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetexp.hardware.detection.detected import Process
from hetexp.hardware.detection.machine import Machine

NODES = "/sys/class/kfd/kfd/topology/nodes"
PROCESSES = "/sys/class/kfd/kfd/proc"


@dataclass(frozen=True)
class Node:
    """One GPU of ROCm's list."""

    index: int
    """ROCr's number of it, as in ROCR_VISIBLE_DEVICES."""
    gpu_id: int
    """KFD's own number, part of the names of processes' files."""
    address: str
    """On the PCI bus, as the kernel writes it."""
    architecture: str | None
    """`gfx1100`."""
    device_id: int | None
    """The PCI id of the chip."""
    uuid: str | None
    """`GPU-` and 16 hexadecimal digits; `None`: the chip has none, as most GPUs in processors."""


def nodes(machine: Machine) -> list[Node]:
    """Return the GPUs of ROCm's list in ROCr's order.

    Like ROCr, it leaves out nodes that this process may not read (another container's), and nodes without a
    device file.
    """
    listed: list[Node] = []
    for folder in _numbered(machine.path(NODES)):
        gpu_id = machine.number(folder / "gpu_id")
        facts = _facts(machine.text(folder / "properties"))
        if not gpu_id or not facts.get("simd_count"):  # a processor, or nothing for this process
            continue
        minor = facts.get("drm_render_minor")
        if minor and not machine.path(f"/dev/dri/renderD{minor}").exists():
            continue
        unique = facts.get("unique_id")
        listed.append(
            Node(
                index=len(listed),
                gpu_id=gpu_id,
                address=_address(facts.get("domain", 0), facts.get("location_id", 0)),
                architecture=_architecture(facts.get("gfx_target_version")),
                device_id=facts.get("device_id"),
                uuid=f"GPU-{unique:016x}" if unique else None,
            )
        )
    return listed


def computing(machine: Machine, gpu_ids: Sequence[int]) -> dict[int, tuple[Process, ...]]:
    """Return the processes that compute on each GPU; empty if the kernel lists no processes.

    The kernel lists every process of ROCm under every GPU. A process computes on a GPU if it holds memory
    there or has a queue.
    """
    folders = _numbered(machine.path(PROCESSES)) if machine.path(PROCESSES).is_dir() else None
    if folders is None:
        return {}
    holders: dict[int, list[Process]] = {gpu_id: [] for gpu_id in gpu_ids}
    for folder in folders:
        queues = {machine.number(queue / "gpuid") for queue in _numbered(folder / "queues")}
        for gpu_id in gpu_ids:
            memory = machine.number(folder / f"vram_{gpu_id}") or None
            if memory is not None or gpu_id in queues:
                holders[gpu_id].append(Process(int(folder.name), memory))
    return {gpu_id: tuple(processes) for gpu_id, processes in holders.items()}


def _facts(text: str | None) -> dict[str, int]:
    """Return the lines `name number` of a properties file."""
    facts = {}
    for line in (text or "").splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            facts[name] = int(value)
    return facts


def _address(domain: int, location: int) -> str:
    """Return an address from KFD's numbers; the upper half of a location numbers the parts of one card."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _architecture(version: int | None) -> str | None:
    """Return `gfx90a` for 90010: two decimal digits each for minor and stepping, written in hexadecimal."""
    if not version:
        return None
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _numbered(folder: Path) -> list[Path]:
    """Return the entries of a folder that are named by numbers, in the numbers' order."""
    try:
        entries = [entry for entry in folder.iterdir() if entry.name.isdecimal()]
    except OSError:
        return []
    return sorted(entries, key=lambda entry: int(entry.name))
