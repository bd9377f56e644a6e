"""The machines of a run (config group `cluster`), and the problems that show without asking them."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any

from pydantic import Field, PositiveFloat

from hetexp.core.errors import must_be
from hetexp.core.section import Name, Section

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62})")
DEFAULT_PORT = 29411
"""Default port of the leading machine."""


class HostEntry(Section):
    """One machine."""

    name: Name
    """Name of the machine: what `hostname` prints there, or any name that `node=NAME` gives it."""
    address: str
    """Address by which the other machines reach it, or a name that resolves to the address."""
    devices: str | list[str | dict[str, Any]] | None = None
    """Devices of this machine, written as `hardware.devices`; `null`: as `hardware` says."""
    pythons: list[str] = []
    """Interpreters of this machine that drive its cards, besides those of `hetexp env`."""
    interface: str | None = None
    """Network interface of the address, such as `en0`; `null`: the one that has it."""


class ClusterConfig(Section):
    """Several machines that train one model; the group's option names them."""

    hosts: list[HostEntry] = []
    """Machines of the run: name, address, devices, pythons and interface of each. The first one leads, and
    the run's folder is there."""
    port: Annotated[int, Field(ge=1, le=65535)] = DEFAULT_PORT
    """Port of the leader, which its firewall must open for the other machines."""
    token_file: str | None = None
    """File with the secret that all machines share; `null`: `$HETEXP_CLUSTER_TOKEN`, else
    `$HETEXP_HOME/cluster.token`."""
    join_seconds: PositiveFloat = 120.0
    """Longest wait for the leader, and for all machines to join."""
    answer_seconds: PositiveFloat = 10.0
    """Longest time for a machine to answer while it joins."""
    silence_seconds: PositiveFloat = 10.0
    """Longest silence of a joined machine before it counts as lost."""
    clock_skew_seconds: PositiveFloat = 5.0
    """Largest difference between a machine's clock and the leader's."""

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    @property
    def leader(self) -> HostEntry:
        return self.hosts[0]

    @property
    def on_one_machine(self) -> bool:
        """Whether all hosts are loopback addresses: one machine that plays several."""
        return all(is_loopback(host.address) for host in self.hosts)


def is_loopback(address: str) -> bool:
    """Return whether this is an address of the loopback, or its usual name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() in ("localhost", "localhost.localdomain", "ip6-localhost")


def cluster_problems(cluster: ClusterConfig, node: str | None) -> list[str]:
    """Return what is wrong with the list of machines itself.

    Args:
        node: the name given to this machine.
    """
    if not cluster.hosts:
        fix = "Name the machines: cluster=<file of conf/cluster>."
        return [must_be("node", "null without `cluster.hosts`", node, fix)] if node is not None else []
    problems = []
    if len(cluster.hosts) < 2:
        problems.append(
            "`cluster.hosts` must name at least two machines, but names one. One needs no cluster."
        )
    seen: dict[str, dict[str, int]] = {"name": {}, "address": {}}
    for position, host in enumerate(cluster.hosts):
        key = f"cluster.hosts[{position}]"
        if not NAME.fullmatch(host.name):
            accepted = "1 to 63 letters, digits, `.`, `_` and `-`"
            problems.append(must_be(f"{key}.name", accepted, host.name))
        for what, value in (("name", host.name), ("address", host.address)):
            first = seen[what].setdefault(value.lower(), position)
            if first != position:
                accepted = f"another one than that of `cluster.hosts[{first}]`"
                problems.append(must_be(f"{key}.{what}", accepted, value))
        if not cluster.on_one_machine and is_loopback(host.address):
            fix = "Write the address by which the other machines reach it (`ip -br address` there)."
            problems.append(must_be(f"{key}.address", "no loopback address", host.address, fix))
    if node is not None and node not in cluster.names:
        problems.append(must_be("node", f"one of {', '.join(cluster.names)}", node))
    return problems
