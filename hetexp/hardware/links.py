"""From emulated cards to the channels between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetexp.core.cost import Channel, Links
from hetexp.core.device import DeviceSpec
from hetexp.hardware.catalogue import Link, card_of

HOST_EXCHANGE = Channel(latency_seconds=1e-4, bytes_per_second=1.7e9)
"""gloo between processes of one host: 1.6–1.8 GB/s at 16–256 MiB between two ranks, measured with torch 2.11
on a machine with 16 cores; the latency is assumed. The same for every mix, whatever this machine reaches."""
UNPACED = Channel()
"""A real device's own link is as it is."""


def build_links(
    devices: Sequence[DeviceSpec],
    network: Mapping[str, Any] | None = None,
    measured: Channel | None = None,
) -> Links:
    """Return the channels of a group of ranks of which some are emulated.

    Within one vendor the ring runs over the cards' own links; across vendors buckets go through the host.
    Between hosts (`DeviceSpec.host`) they travel over the network as well.

    Args:
        network: figures of the link between hosts; needed where there are several.
        measured: the all-reduce between real devices; without it that is taken for free.
    """
    if measured is not None:
        return Links(device=(UNPACED,) * len(devices), exchange=(measured,), staged=False)
    emulated = [device for device in devices if device.backend == "emulated"]
    one_vendor = (
        len(emulated) == len(devices) and len({d.vendor for d in devices}) == 1 and devices[0].vendor != "cpu"
    )
    own = tuple(channel(card_of(d).host_link) if d in emulated else UNPACED for d in devices)
    if one_vendor:
        slowest = min(own, key=lambda c: c.bytes_per_second)
        inside = Channel(max(c.latency_seconds for c in own), slowest.bytes_per_second)
    else:
        inside = HOST_EXCHANGE
    hosts = {device.host for device in devices}
    between = (channel(Link.model_validate(network)),) if len(hosts) > 1 else ()
    return Links(device=own, exchange=(inside, *between), staged=not one_vendor)


def channel(link: Link) -> Channel:
    """Return what a catalogue's link carries in one direction."""
    return Channel(link.latency_seconds, link.gb_per_second * 1e9 * link.efficiency)
