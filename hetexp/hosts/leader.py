"""How the leader gathers the machines of a run, and admits a lost machine again."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from hetexp.core.errors import HetexpError, SetupError
from hetexp.hardware.catalogue import Link
from hetexp.hardware.link_probe import LIMIT_SECONDS, measured, slowest
from hetexp.hosts.channel import PLAIN, Channel, explain
from hetexp.hosts.cluster_ranks import JoinedCluster
from hetexp.hosts.host_facts import differences
from hetexp.hosts.joined_host import JoinedHost
from hetexp.hosts.leader_server import JoinRequest, LeaderServer
from hetexp.hosts.this_host import HostInfo
from hetexp.launch.processes.hosts import reachable
from hetexp.launch.terminal.lines import print_line


@contextmanager
def all_joined(info: HostInfo, folder: Path, console: Console) -> Iterator[JoinedCluster]:
    """Wait for the other machines, reach them while the context lasts, and send them the reason of its end.

    Args:
        folder: of the run.

    Raises:
        SetupError: the port cannot be opened, a machine did not come in time, or one does not fit. All that
            came show the same line.
    """
    cluster = info.cluster
    leader = _Leader(
        info, LeaderServer(info.address, cluster.port, info.token, cluster.answer_seconds, folder), console
    )
    hosts: dict[str, JoinedHost] = {}
    with ExitStack() as stack:
        stack.callback(leader.server.close)
        requests = leader.gather()
        joined = leader.joined_cluster(requests)
        for name, request in requests.items():
            request.channel.send({"op": "welcome"})
            rejoin = partial(leader.gather_again, request)
            hosts[name] = JoinedHost(
                request, cluster.silence_seconds, leader.show, leader.server.allow, rejoin
            )
        code, text = 1, "the leader was interrupted"
        try:
            with reachable(hosts, info.interface):
                yield joined
            code, text = 0, f"The run is over; its folder is on {info.host.name}: {folder}"
        except HetexpError as error:
            code, text = 1, f"{info.host.name}: {error}"
            raise
        finally:
            for host in hosts.values():
                host.end(code, text)


class _Leader:
    """Decides which machines may join."""

    def __init__(self, info: HostInfo, server: LeaderServer, console: Console) -> None:
        self.info, self.server = info, server
        self.show = partial(print_line, console)

    def gather(self) -> dict[str, JoinRequest]:
        """Return the requests of all other machines, in the order of `cluster.hosts`.

        Raises:
            SetupError: a machine did not come in time, or one does not fit.
        """
        cluster, name, requests = self.info.cluster, self.info.host.name, dict[str, JoinRequest]()
        expected, limit = cluster.names[1:], cluster.join_seconds
        deadline = time.monotonic() + limit
        where = f"{self.info.address}:{cluster.port}"
        rest = ", ".join(f"{host.name} ({host.address})" for host in cluster.hosts[1:])
        self.show(f"{name} leads and waits at {where} for {rest}, up to {limit:g} s (cluster.join_seconds).")
        self.show(PLAIN)
        try:
            while missing := [name for name in expected if name not in requests]:
                request = self.server.next_request(deadline)
                if request is None:
                    raise SetupError(self._missing(missing))
                self._admit(request, expected, requests)
        except BaseException as error:
            text = str(error) or type(error).__name__
            for request in [*requests.values(), *self.server.close_early()]:
                _send_end(request.channel, f"The run does not start. {text}")
            raise
        return {name: requests[name] for name in expected}

    def _admit(self, request: JoinRequest, expected: Sequence[str], requests: dict[str, JoinRequest]) -> None:
        """Add a request to those that were admitted, or refuse it.

        Raises:
            SetupError: the machine is expected, but does not fit.
        """
        name = request.facts.name
        if name not in expected:
            self._refuse(
                request, f"{name} is none of the machines that may join here ({', '.join(expected)})."
            )
        elif name in requests:
            self._refuse(
                request, f"{name} has joined already, from {requests[name].address}: is node=… right?"
            )
        elif problems := self._differences(request):
            _send_end(request.channel, " ".join(problems))
            raise SetupError(" ".join(problems))
        else:
            requests[name] = request
            devices = ", ".join(device.id for device in request.facts.devices)
            self.show(f"{name} ({request.address}) has joined with {devices}.")

    def gather_again(self, before: JoinRequest, wakes: Callable[[], bool]) -> Channel | None:
        """Wait for a lost machine to join again; return its new connection, `None`: it did not come."""
        name, limit = before.facts.name, self.info.cluster.join_seconds
        self.show(
            f"{self.info.host.name} waits for {name} ({before.address}) to join again, up to {limit:g} s "
            "(cluster.join_seconds): start the same command there once more."
        )
        devices = [(device.id, device.name) for device in before.facts.devices]
        deadline = time.monotonic() + limit
        while (request := self.server.next_request(deadline, wakes)) is not None:
            problems = self._differences(request)
            if request.facts.name != name:
                problems = [
                    f"{self.info.host.name} waits for {name} alone, and not for {request.facts.name}."
                ]
            elif [(device.id, device.name) for device in request.facts.devices] != devices:
                problems.append(f"{name} must bring the devices that it had before.")
            if not problems:
                self.show(f"{name} ({request.address}) has joined again.")
                request.channel.send({"op": "welcome"})
                return request.channel
            self._refuse(request, " ".join(problems))
        return None

    def joined_cluster(self, requests: dict[str, JoinRequest]) -> JoinedCluster:
        """Return the devices of the machines; without emulated ones also the speed of the network."""
        joined = JoinedCluster(names=list(requests))
        for request in requests.values():
            joined.devices += request.facts.devices
            joined.threads += request.facts.threads
        if not any(device.backend == "emulated" for device in (*self.info.facts.devices, *joined.devices)):
            joined.network = self._measure_network(requests)
        return joined

    def _measure_network(self, requests: dict[str, JoinRequest]) -> Link | None:
        """Measure the link to each machine, in turn, because links may share a part of the way."""
        links = []
        for name, request in requests.items():
            try:
                request.channel.send({"op": "probe"})
                with self.server.next_probe(name, LIMIT_SECONDS) as connection:
                    links.append(measured(connection))
            except OSError as error:
                reason = explain(error)
                self.show(f"The network to {name} ({request.address}) could not be measured: {reason}.")
                return None
        return slowest(links)

    def _differences(self, request: JoinRequest) -> list[str]:
        limit = self.info.cluster.clock_skew_seconds
        return differences(self.info.facts, request.facts, request.clock, limit)

    def _refuse(self, request: JoinRequest, problem: str) -> None:
        self.show(f"{request.address} may not join: {problem}")
        _send_end(request.channel, f"{self.info.host.name}: {problem}")

    def _missing(self, names: Sequence[str]) -> str:
        """Return the error about machines that did not come."""
        cluster = self.info.cluster
        addresses = {host.name: host.address for host in cluster.hosts}
        who = " and ".join(f"{name} ({addresses[name]})" for name in names)
        problem = (
            f"{who} did not join at {self.info.address}:{cluster.port} within {cluster.join_seconds:g} s "
            "(cluster.join_seconds). Was the same command started there, and may it reach this port "
            "(firewall)?"
        )
        refused = "; ".join(list(self.server.refusals)[:3])
        return f"{problem} Refused meanwhile: {refused}." if refused else problem


def _send_end(channel: Channel, text: str) -> None:
    try:
        channel.send({"op": "end", "code": 1, "text": text})
        channel.connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    finally:
        channel.connection.close()
