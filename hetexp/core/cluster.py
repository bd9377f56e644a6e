"""The machines of a run (config group `cluster`), and what can be said of them without asking any."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, field_validator

from hetexp.core.errors import must_be
from hetexp.core.section import Section

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62})")
DEFAULT_PORT = 29411
"""Of the leading machine, where nothing else is said."""


class HostEntry(Section):
    """One machine."""

    name: str
    """What `hostname` says there, or any other name, which `node=NAME` then gives to that machine."""
    address: str
    """By which the other machines reach it: an address, or a name that leads to one."""
    devices: str | list[str | dict[str, Any]] | None = None
    """As `hardware.devices`, on this machine; `None`: what `hardware` says, there as here."""
    pythons: list[str] = []
    """Interpreters of this machine that drive its cards, beside those that `hetexp env` recorded there."""
    interface: str | None = None
    """Network interface of the address; by default the one that has it."""

    @field_validator("name", mode="before")
    @classmethod
    def _numbers_are_names(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value


class ClusterConfig(Section):
    """Several machines that train one model; without hosts there is one."""

    hosts: list[HostEntry] = []
    """The first one leads: the run's folder is there."""
    port: Annotated[int, Field(ge=1, le=65535)] = DEFAULT_PORT
    """Of the leader, at its address, by which the others join and reach the store."""
    token_file: str | None = None
    """File with the secret that all machines share. `None`: the variable `HETEXP_CLUSTER_TOKEN`, then
    `cluster.token` in hetexp's own folder (`$HETEXP_HOME`)."""
    join_seconds: PositiveFloat = 120.0
    """Longest wait for the leader, and for all machines to have joined."""
    answer_seconds: PositiveFloat = 10.0
    """Longest that a machine may take to answer while it joins."""
    silence_seconds: PositiveFloat = 10.0
    """Longest silence of a machine that has joined, before it counts as lost."""
    clock_skew_seconds: PositiveFloat = 5.0
    """Most that a machine's clock may differ from the leader's."""

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
