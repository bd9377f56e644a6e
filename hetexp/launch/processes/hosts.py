"""Which machine a device is in, and who starts a rank there: a launcher's one seam to other machines.

A device whose `host` is not reached by anybody is in this machine, as the emulated hosts of a mix are.
What is known here is so for as long as the launcher that leads a cluster has joined the others
(`hetexp.hosts.leader`): one process leads one run at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
        """Return whether the machine is there; where it is gone it gets its time to join again.

        Args:
            wakes: asked now and then whether to stop waiting.
        """


_others: dict[str, Host] = {}
_interface: list[str] = []


@contextmanager
def reachable(others: Mapping[str, Any], interface: str) -> Iterator[None]:
    """Reach other machines, and let this one's ranks talk to theirs.

    Args:
        others: machine by the name that devices have in `host`.
        interface: of this machine, that the others' ranks reach.
    """
    _others.update(others)
    _interface.append(interface)
    try:
        yield
    finally:
        _others.clear()
        _interface.clear()


def host_of(device: DeviceSpec) -> Host | None:
    """Return the machine that a device is in, `None` for this one."""
    return _others.get(device.host) if device.host is not None else None


def all_there(devices: Iterable[DeviceSpec], wakes: Callable[[], bool]) -> bool:
    """Return whether the machines of some devices are there; one that is gone gets its time to join again.

    Args:
        wakes: asked now and then whether to stop waiting.
    """
    hosts = {id(host): host for device in devices if (host := host_of(device)) is not None}
    return all(host.comes_back(wakes) for host in hosts.values())


def is_here(device: DeviceSpec) -> bool:
    """Return whether a device is in this machine."""
    return host_of(device) is None


def network_environment() -> dict[str, str]:
    """Return the variables that bind ranks' own sockets to the cluster's interface; none on one machine."""
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _interface[0]) if _interface else {}
