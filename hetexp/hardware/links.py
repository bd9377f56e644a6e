"""Builds the modelled channels between ranks of which some are emulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetexp.core.cost.step import WIRE_BYTES, Channel, Links
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.hardware.catalogue import Link, card_of

SHARED_EXCHANGE = Channel(latency_seconds=1e-4, bytes_per_second=9e9, shared=True)
"""The exchange through a host's shared memory between two ranks: 11 GB/s at 16–64 MiB with tensors on the
host, measured with torch 2.11 on a machine with 16 cores and nothing else to do; ranks that compute leave it
less. The latency is assumed. Every mix has these figures, on any machine."""
HOST_EXCHANGE = Channel(latency_seconds=1e-4, bytes_per_second=1.7e9)
"""gloo between processes of one host: 1.6–1.8 GB/s at 16–256 MiB between two ranks, measured with torch 2.11
on a machine with 16 cores; the latency is assumed. Every mix has these figures, on any machine."""
UNPACED = Channel()
"""A real device's own link, which is not paced."""


def build_links(
    devices: Sequence[DeviceSpec],
    network: Mapping[str, Any] | None = None,
    measured: Channel | None = None,
    shared_memory: bool = True,
    wire: float = 1.0,
) -> Links:
    """Return the channels of a group of ranks of which some are emulated.

    Within one vendor the ring runs over the cards' own links; across vendors buckets go through the host.
    Between hosts (`DeviceSpec.host`) they travel over the network as well: by gloo between one rank of each
    if the ranks of a host share memory, else in one ring of all.

    Args:
        network: figures of the link between hosts; needed for several hosts.
        measured: the all-reduce between real devices; without it, that counts as free.
        shared_memory: whether ranks of a host sum in shared memory; otherwise gloo sums.
        wire: bytes that travel ÷ bytes of the gradients.
    """
    if measured is not None:
        return Links(device=(UNPACED,) * len(devices), exchange=(measured,), staged=False, wire=wire)
    emulated = [device for device in devices if device.backend == "emulated"]
    one_vendor = (
        len(emulated) == len(devices) and len({d.vendor for d in devices}) == 1 and devices[0].vendor != "cpu"
    )
    device_links = tuple(channel(card_of(d).host_link) if d in emulated else UNPACED for d in devices)
    hosts = Counter(device.host for device in devices)
    between = (channel(Link.model_validate(network)),) if len(hosts) > 1 else ()
    if one_vendor:
        slowest = min(device_links, key=lambda c: c.bytes_per_second)
        inside = Channel(max(c.latency_seconds for c in device_links), slowest.bytes_per_second)
        return Links(device=device_links, exchange=(inside, *between), staged=False, wire=wire)
    if not shared_memory:
        return Links(device=device_links, exchange=(HOST_EXCHANGE, *between), wire=wire)
    if not between:
        return Links(device=device_links, exchange=(SHARED_EXCHANGE,), wire=wire)
    inside = replace(SHARED_EXCHANGE, ranks=max(hosts.values()))
    leaders = (replace(link, ranks=len(hosts)) for link in (HOST_EXCHANGE, *between))
    return Links(device=device_links, exchange=(inside, *leaders), wire=wire)


def links_of(
    plan: Plan, devices: Sequence[DeviceSpec] | None = None, measured: Channel | None = None
) -> Links:
    """Return the channels that a plan's ranks exchange through.

    Args:
        devices: some of the plan's devices, or others in their place; `None`: all devices.
        measured: the all-reduce between real devices.
    """
    comm = plan.config.get("comm", {})
    chosen, shared = plan.devices if devices is None else devices, comm.get("backend", "auto") != "gloo"
    return build_links(chosen, plan.network, measured, shared, wire_of(plan, comm.get("wire", "float32")))


def wire_of(plan: Plan, wire: str) -> float:
    """Return the bytes that travel ÷ the bytes of the numbers that a plan's ranks compute."""
    computed = 8.0 if "float64" in plan.precisions else 4.0
    return WIRE_BYTES.get(wire, computed) / computed


def channel(link: Link) -> Channel:
    """Return the channel of one direction of a catalogue's link."""
    return Channel(link.latency_seconds, link.gb_per_second * 1e9 * link.efficiency)
