"""How the machines of a run meet: the leader waits for all, the others look for the leader."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from hetexp.cluster.facts import HostFacts, differences
from hetexp.cluster.gate import Arrival, Gate
from hetexp.cluster.host import JoinedHost
from hetexp.cluster.ranks import JoinedCluster
from hetexp.cluster.role import own_place, own_role, resolve
from hetexp.cluster.token import read_token
from hetexp.cluster.wire import Channel, RefusedError, WireError, introduce
from hetexp.core.cluster import ClusterConfig, HostEntry
from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import HetexpError, RunFailedError, SetupError
from hetexp.hardware.catalogue import Link
from hetexp.hardware.link_probe import LIMIT_SECONDS, measured, slowest
from hetexp.hardware.link_probe import answer as answer_probe
from hetexp.launch.processes.hosts import reachable

TRY_SECONDS = 5.0
"""Longest that one try to connect may take: a firewall that drops without a word lets it wait."""
PAUSE_SECONDS = 0.2


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
        raw: the whole configuration, which all machines must have the same.
        devices: of this machine, as the plan will name them.

    Raises:
        ConfigError, SetupError: its role, its address or the token cannot be determined.
    """
    cluster = config.cluster
    host = own_role(cluster, config.node)
    address, interface = own_place(host, cluster)
    token = read_token(cluster, working_dir)
    facts = HostFacts.of_this_machine(host.name, devices, threads, raw)
    return HostInfo(cluster, host, address, interface, token, facts)


@contextmanager
def all_joined(own: HostInfo, folder: Path, console: Console) -> Iterator[JoinedCluster]:
    """Lead: wait for the other machines, reach them for as long as the context lasts, and tell them its end.

    Args:
        folder: of the run.

    Raises:
        SetupError: the port cannot be opened, not all came in time, or one does not fit. All that came get
            the same line.
    """
    cluster, tell = own.cluster, _teller(console)
    gate = Gate(own.address, cluster.port, own.token, cluster.answer_seconds, folder)
    hosts: dict[str, JoinedHost] = {}
    with ExitStack() as stack:
        stack.callback(gate.close)
        arrivals = _gather(own, gate, tell)
        met = _met(own, gate, arrivals, tell)
        for name in cluster.names[1:]:
            one = arrivals[name]
            one.channel.send({"op": "welcome"})
            back = partial(_back, own, gate, one, tell)
            hosts[name] = JoinedHost(
                name, one.address, one.channel, cluster.silence_seconds, tell, gate.serve, back
            )
        code, text = 1, "the leader was interrupted"
        try:
            with reachable(hosts, own.interface):
                yield met
            code, text = 0, f"The run is over; its folder is on {own.host.name}: {folder}"
        except HetexpError as error:
            code, text = 1, f"{own.host.name}: {error}"
            raise
        finally:
            for joined in hosts.values():
                joined.end(code, text)


def _met(
    own: HostInfo, gate: Gate, arrivals: dict[str, Arrival], tell: Callable[[str], None]
) -> JoinedCluster:
    """Return what the machines bring, and how fast the network is where no device is emulated."""
    met = JoinedCluster(names=own.cluster.names[1:])
    for name in met.names:
        met.devices += arrivals[name].facts.devices
        met.threads += arrivals[name].facts.threads
    if not any(device.backend == "emulated" for device in (*own.facts.devices, *met.devices)):
        met.network = _measured(gate, arrivals, tell)
    return met


def _measured(gate: Gate, arrivals: dict[str, Arrival], tell: Callable[[str], None]) -> Link | None:
    """Measure the way to each machine, one after the other: they may share a part of it."""
    links = []
    for name, one in arrivals.items():
        try:
            one.channel.send({"op": "probe"})
            with gate.next_probe(name, LIMIT_SECONDS) as connection:
                links.append(measured(connection))
        except OSError as error:
            tell(f"The network to {name} ({one.address}) could not be measured: {explain(error)}.")
            return None
    return slowest(links)


def _gather(own: HostInfo, gate: Gate, tell: Callable[[str], None]) -> dict[str, Arrival]:
    """Return what the other machines brought, by name, once all have come.

    Raises:
        SetupError: not all came in time, or one does not fit.
    """
    cluster = own.cluster
    wanted, limit = cluster.names[1:], cluster.join_seconds
    deadline = time.monotonic() + limit
    where = f"{own.address}:{cluster.port}"
    rest = ", ".join(f"{host.name} ({host.address})" for host in cluster.hosts[1:])
    tell(f"{own.host.name} leads and waits at {where} for {rest}, up to {limit:g} s (cluster.join_seconds).")
    arrivals: dict[str, Arrival] = {}
    try:
        while missing := [name for name in wanted if name not in arrivals]:
            one = gate.next_arrival(deadline)
            if one is None:
                raise SetupError(_did_not_come(missing, own, gate))
            name, facts = one.facts.name, one.facts
            problem = None
            if name not in wanted:
                problem = f"{name} is none of the machines that may join here ({', '.join(wanted)})."
            elif name in arrivals:
                problem = f"{name} has joined already, from {arrivals[name].address}: is node=… right?"
            if problem is not None:
                tell(f"{one.address} may not join: {problem}")
                _say_end(one.channel, f"{own.host.name}: {problem}")
                continue
            found = differences(own.facts, facts, one.clock, cluster.clock_skew_seconds)
            if found:
                _say_end(one.channel, " ".join(found))
                raise SetupError(" ".join(found))
            arrivals[name] = one
            devices = ", ".join(device.id for device in facts.devices)
            tell(f"{name} ({one.address}) has joined with {devices}.")
    except BaseException as error:
        text = str(error) or type(error).__name__
        for one in [*arrivals.values(), *gate.shut_out()]:
            _say_end(one.channel, f"The run does not start. {text}")
        raise
    return arrivals


def _back(
    own: HostInfo, gate: Gate, before: Arrival, tell: Callable[[str], None], wakes: Callable[[], bool]
) -> Channel | None:
    """Wait for a machine that was lost to join again; return its new connection, `None`: it did not come."""
    name, limit = before.facts.name, own.cluster.join_seconds
    tell(
        f"{own.host.name} waits for {name} ({before.address}) to join again, up to {limit:g} s "
        "(cluster.join_seconds): start the same command there once more."
    )
    devices = [(device.id, device.name) for device in before.facts.devices]
    deadline = time.monotonic() + limit
    while (one := gate.next_arrival(deadline, wakes)) is not None:
        problems = differences(own.facts, one.facts, one.clock, own.cluster.clock_skew_seconds)
        if one.facts.name != name:
            problems = [f"{own.host.name} waits for {name} alone, and not for {one.facts.name}."]
        elif [(device.id, device.name) for device in one.facts.devices] != devices:
            problems.append(f"{name} must bring the devices that it had before.")
        if not problems:
            tell(f"{name} ({one.address}) has joined again.")
            one.channel.send({"op": "welcome"})
            return one.channel
        tell(f"{one.address} may not join: {' '.join(problems)}")
        _say_end(one.channel, f"{own.host.name}: {' '.join(problems)}")
    return None


def _did_not_come(missing: Sequence[str], own: HostInfo, gate: Gate) -> str:
    hosts = {host.name: host.address for host in own.cluster.hosts}
    who = " and ".join(f"{name} ({hosts[name]})" for name in missing)
    problem = (
        f"{who} did not join at {own.address}:{own.cluster.port} within {own.cluster.join_seconds:g} s "
        "(cluster.join_seconds). Was the same command started there, and may it reach this port "
        "(firewall)?"
    )
    refused = "; ".join(list(gate.refusals)[:3])
    return f"{problem} Refused meanwhile: {refused}." if refused else problem


def _say_end(channel: Channel, text: str) -> None:
    try:
        channel.send({"op": "end", "code": 1, "text": text})
        channel.connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    finally:
        channel.connection.close()


def join(own: HostInfo, console: Console) -> tuple[Channel, str]:
    """Look for the leader, and join it.

    Returns:
        The connection to its launcher, and its address.

    Raises:
        SetupError: it was not found in time, or does not let this machine join; says why.
        RunFailedError: the run does not start, for a reason that the leader has given.
    """
    cluster, leader, tell = own.cluster, own.cluster.leader, _teller(console)
    address = resolve(leader, cluster)
    where, limit = f"{leader.name} at {address}:{cluster.port}", cluster.join_seconds
    deadline = time.monotonic() + limit
    said = False
    while True:
        left = deadline - time.monotonic()
        try:
            connection = connect(own, address, max(min(TRY_SECONDS, left), 0.05))
            break
        except OSError as error:
            reason = explain(error)
            if time.monotonic() + PAUSE_SECONDS >= deadline:
                raise SetupError(
                    f"{where}, which leads, did not answer within {limit:g} s "
                    f"(cluster.join_seconds): {reason}."
                ) from None
            if not said:
                tell(
                    f"{own.host.name} waits for {where}, up to {limit:g} s (cluster.join_seconds): {reason}."
                )
                said = True
            time.sleep(PAUSE_SECONDS)
    try:
        channel = introduce(connection, own.token, "member", own.facts.name, cluster.answer_seconds)
        channel.send(own.facts.to_dict() | {"time": own.clock()})
        # All others may still be on their way.
        answer = channel.receive(time.monotonic() + limit + cluster.answer_seconds)
        if answer.get("op") == "probe":
            with suppress(OSError), connect_for("probe", own, address).connection as probed:
                answer_probe(probed)  # the leader reports what goes wrong
            answer = channel.receive(time.monotonic() + limit + cluster.answer_seconds)
    except RefusedError as error:
        connection.close()
        raise SetupError(f"{where} does not let {own.host.name} join: {error}.") from None
    except (WireError, OSError) as error:
        connection.close()
        reason = explain(error) if isinstance(error, OSError) else str(error)
        raise SetupError(f"{where} is no leader of this cluster, or has ended: {reason}.") from None
    if answer.get("op") != "welcome":
        connection.close()
        raise RunFailedError(str(answer.get("text", "the leader has ended")))
    devices = ", ".join(device.id for device in own.facts.devices)
    tell(f"{own.host.name} has joined {where} with {devices}, and does what it says.")
    return channel, address


def connect_for(purpose: str, own: HostInfo, address: str) -> Channel:
    """Return another connection to the leader that this machine has joined, after the same proof.

    Raises:
        WireError, OSError: it does not answer as it did before.
    """
    seconds = own.cluster.answer_seconds
    return introduce(connect(own, address, seconds), own.token, purpose, own.facts.name, seconds)


def connect(own: HostInfo, address: str, seconds: float) -> socket.socket:
    """Return a connection to the leader's port, from this machine's address in the cluster."""
    return socket.create_connection((address, own.cluster.port), seconds, source_address=(own.address, 0))


def explain(error: OSError) -> str:
    """Return why a connection failed, with what may be the reason."""
    if isinstance(error, TimeoutError):
        return "nothing answers (a firewall that drops, or a wrong address)"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (is it started there, with the same cluster.port?)"
    return error.strerror or str(error)


def _teller(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
