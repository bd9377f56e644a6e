"""Which machine of the cluster this one is, and where it listens."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetexp.core.cluster import ClusterConfig, HostEntry, is_loopback
from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, SetupError, must_be
from hetexp.hosts.host_facts import HostFacts
from hetexp.hosts.token import read_token


@dataclass
class HostInfo:
    """This machine's part of a cluster."""

    cluster: ClusterConfig
    host: HostEntry
    address: str
    interface: str
    token: bytes
    facts: HostFacts
    clock: Callable[[], float] = time.time
    """Of this machine, in seconds since the epoch."""

    @property
    def leads(self) -> bool:
        return self.host is self.cluster.leader


def host_info(
    config: Config,
    raw: dict[str, Any],
    devices: Sequence[DeviceSpec],
    threads: Sequence[int],
    working_dir: Path,
) -> HostInfo:
    """Return this machine's part of its cluster.

    Args:
        raw: the whole configuration, which must be the same on all machines.
        devices: of this machine, as the plan will name them.

    Raises:
        ConfigError, SetupError: its role, its address or the token cannot be determined.
    """
    cluster = config.cluster
    host = this_host(cluster, config.node)
    address, interface = this_address(host, cluster)
    token = read_token(cluster, working_dir)
    facts = HostFacts.of_this_machine(host.name, devices, threads, raw)
    return HostInfo(cluster, host, address, interface, token, facts)


def this_host(
    cluster: ClusterConfig,
    node: str | None,
    hostname: str | None = None,
    addresses: Mapping[str, str] | None = None,
) -> HostEntry:
    """Return this machine's entry: the one with the name `node`, with its host name, or with its address.

    Raises:
        ConfigError: no machine, or more than one, can be this one.
    """
    if node is not None:
        if node not in cluster.names:
            raise ConfigError(must_be("node", f"one of {', '.join(cluster.names)}", node))
        return cluster.hosts[cluster.names.index(node)]
    hostname = hostname if hostname is not None else socket.gethostname()
    short = hostname.partition(".")[0].lower()
    named = [host for host in cluster.hosts if host.name.lower() in (hostname.lower(), short)]
    if len(named) == 1:
        return named[0]
    addresses = local_addresses() if addresses is None else addresses
    matching = []
    for host in cluster.hosts:
        with suppress(OSError):
            matching += [host] if addresses.keys() & _resolved(host.address) else []
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(cluster.names)
    fits = " and ".join(host.name for host in matching) or "none of them"
    local = _without_loopback(addresses) or "none but the loopback"
    fix = f"This machine ({short}; its addresses: {local}) fits {fits}."
    raise ConfigError(must_be("node", f"given here, one of {names}", node, fix))


def this_address(
    host: HostEntry, cluster: ClusterConfig, addresses: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Return the address of this machine in the cluster and the interface that has it.

    Raises:
        SetupError: it has no such address, or has it on another interface.
    """
    address = resolve(host, cluster)
    addresses = local_addresses() if addresses is None else addresses
    key = f"cluster.hosts[{cluster.hosts.index(host)}]"
    if is_loopback(address):  # the whole network 127.0.0.0/8 is on it
        interface = addresses.get("127.0.0.1", "lo")
    elif address in addresses:
        interface = addresses[address]
    else:
        local = _without_loopback(addresses) or "only the loopback"
        raise SetupError(
            f"`{key}.address` must be one of this machine's ({local}), but is '{host.address}' instead. "
            f"Correct it, or say with node=… which machine this is."
        )
    if host.interface is not None and host.interface != interface:
        raise SetupError(
            f"`{key}.interface` must be the one with {address}, {interface}, but is '{host.interface}' "
            "instead."
        )
    return address, interface


def resolve(host: HostEntry, cluster: ClusterConfig) -> str:
    """Return the IPv4 address of a machine.

    Raises:
        SetupError: its name has no address, or that of the loopback, which each machine has.
    """
    key = f"cluster.hosts[{cluster.hosts.index(host)}].address"
    try:
        address = _resolved(host.address)[0]
    except OSError as error:
        reason = error.strerror or str(error)
        raise SetupError(
            f"`{key}` must be an address, or a name that leads to one, but is '{host.address}' instead: "
            f"{reason}. Write {host.name}'s IPv4 address."
        ) from None
    if is_loopback(address) and not cluster.on_one_machine:
        raise SetupError(
            f"`{key}` must lead to an address that the other machines reach, but '{host.address}' leads to "
            f"{address} on this one (a line of /etc/hosts). Write {host.name}'s address in the network."
        )
    return address


def local_addresses() -> dict[str, str]:
    """Return the IPv4 addresses of this machine, and the interface of each.

    Raises:
        SetupError: the extra `cluster` is not installed.
    """
    try:
        import psutil
    except ImportError:
        raise SetupError(
            "A run over several machines needs psutil on each of them: pip install 'hetexp[cluster]'"
        ) from None
    return {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }


def _resolved(address: str) -> list[str]:
    found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _without_loopback(addresses: Mapping[str, str]) -> str:
    return ", ".join(sorted(address for address in addresses if not is_loopback(address)))
