"""Which of the cluster's machines this one is, and where it listens."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from hetexp.core.cluster import ClusterConfig, HostEntry, is_loopback
from hetexp.core.errors import ConfigError, SetupError, must_be


def own_addresses() -> dict[str, str]:
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
        one.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET
    }


def resolve(host: HostEntry, cluster: ClusterConfig) -> str:
    """Return the IPv4 address that a machine is reached by.

    Raises:
        SetupError: its name leads to none, or to the loopback, where it would lead each machine to itself.
    """
    key = f"cluster.hosts[{cluster.hosts.index(host)}].address"
    try:
        found = socket.getaddrinfo(host.address, None, socket.AF_INET, socket.SOCK_STREAM)
        address = str(found[0][4][0])
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


def own_role(
    cluster: ClusterConfig,
    node: str | None,
    hostname: str | None = None,
    addresses: Mapping[str, str] | None = None,
) -> HostEntry:
    """Return which machine this is: by `node`, its name, or an address that it has.

    Args:
        hostname, addresses: of this machine, where they are known.

    Raises:
        ConfigError: none or several of the machines can be this one.
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
    addresses = own_addresses() if addresses is None else addresses
    there = [host for host in cluster.hosts if _leads_to(host.address) & addresses.keys()]
    if len(there) == 1:
        return there[0]
    names = ", ".join(cluster.names)
    several = f"fits {' and '.join(host.name for host in there)}" if there else "fits none of them"
    own = ", ".join(sorted(one for one in addresses if not is_loopback(one))) or "none but the loopback"
    fix = f"This machine ({short}; its addresses: {own}) {several}."
    raise ConfigError(must_be("node", f"given here, one of {names}", node, fix))


def own_place(
    host: HostEntry, cluster: ClusterConfig, addresses: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Return the address of this machine in the cluster and the interface that has it.

    Raises:
        SetupError: it has no such address, or has it on another interface.
    """
    address = resolve(host, cluster)
    addresses = own_addresses() if addresses is None else addresses
    key = f"cluster.hosts[{cluster.hosts.index(host)}]"
    if is_loopback(address):  # the whole network 127.0.0.0/8 is on it
        interface = addresses.get("127.0.0.1", "lo")
    elif address in addresses:
        interface = addresses[address]
    else:
        own = ", ".join(sorted(one for one in addresses if not is_loopback(one))) or "only the loopback"
        raise SetupError(
            f"`{key}.address` must be one of this machine's ({own}), but is '{host.address}' instead. "
            f"Correct it, or say with node=… which machine this is."
        )
    if host.interface is not None and host.interface != interface:
        raise SetupError(
            f"`{key}.interface` must be the one with {address}, {interface}, but is '{host.interface}' "
            "instead."
        )
    return address, interface


def _leads_to(address: str) -> set[str]:
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(one[4][0]) for one in found}
