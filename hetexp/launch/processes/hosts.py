"""The interface through which the launcher starts ranks on other machines.

`hetexp.hosts.leader` registers the machines of a cluster here while a run lasts; a process leads one run at a
time. A device whose `host` is not registered is in this machine, such as the emulated hosts of a mix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from hetexp.core.device import DeviceSpec
from hetexp.launch.processes.process import RankProcess, Start


class Host(ABC):
    """Another machine, which starts processes for this launcher."""

    @abstractmethod
    def start(self, start: Start, method: str) -> RankProcess:
        """Start a rank there.

        Raises:
            OSError: the machine is gone.
        """

    @abstractmethod
    def comes_back(self, wakes: Callable[[], bool]) -> bool:
        """Return whether the machine is connected; a lost machine gets time to join again.

        Args:
            wakes: polled whether to stop waiting.
        """


_hosts: dict[str, Host] = {}
_interface: list[str] = []


@contextmanager
def reachable(hosts: Mapping[str, Host], interface: str) -> Iterator[None]:
    """Register other machines while the context lasts.

    Args:
        hosts: `DeviceSpec.host` → machine.
        interface: network interface of this machine for the exchange between ranks.
    """
    _hosts.update(hosts)
    _interface.append(interface)
    try:
        yield
    finally:
        _hosts.clear()
        _interface.clear()


def host_of(device: DeviceSpec) -> Host | None:
    """Return the machine of a device; `None` for this machine."""
    return _hosts.get(device.host) if device.host is not None else None


def all_there(devices: Iterable[DeviceSpec], wakes: Callable[[], bool]) -> bool:
    """Return whether the machines of some devices are connected; a lost machine gets time to join again.

    Args:
        wakes: polled whether to stop waiting.
    """
    hosts = {id(host): host for device in devices if (host := host_of(device)) is not None}
    return all(host.comes_back(wakes) for host in hosts.values())


def is_here(device: DeviceSpec) -> bool:
    """Return whether a device is in this machine."""
    return host_of(device) is None


def network_environment() -> dict[str, str]:
    """Return the variables that bind ranks' sockets to the cluster's interface; empty on one machine."""
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _interface[0]) if _interface else {}
