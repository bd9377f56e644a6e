"""Machines that meet on loopback addresses: each error is one line on every side, soon."""

from __future__ import annotations

import io
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hetexp.core.cluster import ClusterConfig, HostEntry
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import RunFailedError, SetupError
from hetexp.hosts.channel import PLAIN, Channel, handshake_as_member
from hetexp.hosts.host_facts import HostFacts
from hetexp.hosts.leader import all_joined
from hetexp.hosts.leader_server import LOG, MAX_OF_ADDRESS, MAX_UNPROVED, LeaderServer
from hetexp.hosts.member import join_leader
from hetexp.hosts.this_host import HostInfo
from hetexp.launch.processes.hosts import all_there

TOKEN = b"t" * 64
CPU = DeviceSpec(id="cpu:0", backend="cpu", index=0, name="CPU", vendor="cpu")
CONFIG = {"trainer": {"max_steps": 10, "seed": 0}, "node": "whoever"}
ADDRESSES = {"a": "127.0.0.2", "b": "127.0.0.3", "c": "127.0.0.4"}


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.2", 0)) as server:
        found: int = server.getsockname()[1]
    return found


def host_info(name: str, port: int, names: str = "ab", seconds: float = 20.0, **changes: Any) -> HostInfo:
    """Return a machine's part of a cluster, which it joins within so many seconds."""
    hosts = [HostEntry(name=name, address=ADDRESSES[name]) for name in names]
    cluster = ClusterConfig(hosts=hosts, port=port, join_seconds=seconds, answer_seconds=2.0)
    host = next((host for host in cluster.hosts if host.name == name), hosts[1])
    devices = [replace(CPU, id=f"cpu:0@{name}", host=name)]
    facts = HostFacts.of_this_machine(name, devices, [1], changes.pop("config", CONFIG))
    token, clock = changes.pop("token", TOKEN), changes.pop("clock", time.time)
    return HostInfo(cluster, host, ADDRESSES[host.name], "lo", token, replace(facts, **changes), clock)


class Side:
    """A machine in a thread of its own: what it said, and how it ended."""

    def __init__(self, act: Callable[[Console], Any]) -> None:
        self._screen = io.StringIO()
        self.error: BaseException | None = None
        self.result: Any = None

        def run() -> None:
            try:
                self.result = act(Console(file=self._screen, width=400))
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def wait(self, seconds: float = 15.0) -> Side:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), self.said
        return self

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def said(self) -> str:
        return self._screen.getvalue()

    @property
    def message(self) -> str:
        """The error, one line."""
        text = str(self.error)
        assert isinstance(self.error, (SetupError, RunFailedError)), repr(self.error)
        assert "\n" not in text
        return text


@pytest.fixture
def lead(tmp_path: Path) -> Iterator[Callable[[HostInfo], Side]]:
    """Let a machine lead: its run is over as soon as all have joined."""
    sides = []

    def start(info: HostInfo) -> Side:
        def act(console: Console) -> Any:
            with all_joined(info, tmp_path, console) as joined:
                return joined

        sides.append(Side(act))
        return sides[-1]

    yield start
    for side in sides:
        side.wait()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine here answers when the network is measured; that is waited for no longer than a moment."""
    monkeypatch.setattr("hetexp.hosts.leader.LIMIT_SECONDS", 0.1)


def until_said(side: Side, text: str) -> None:
    """Return when a machine has said something."""
    deadline = time.monotonic() + 10
    while text not in side.said:
        assert time.monotonic() < deadline, side.said
        threading.Event().wait(0.01)


def follow(info: HostInfo) -> Side:
    """Let a machine join, and hear how the run ends."""

    def act(console: Console) -> Any:
        channel, _ = join_leader(info, console)
        try:
            while (order := channel.receive(time.monotonic() + 10))["op"] != "end":
                pass
            return order
        finally:
            channel.close()

    return Side(act)


def test_they_meet_in_any_order(lead: Callable[[HostInfo], Side], port: int) -> None:
    late = follow(host_info("c", port, "abc"))
    leader = lead(host_info("a", port, "abc"))
    other = follow(host_info("b", port, "abc"))
    assert [device.id for device in leader.wait().result.devices] == ["cpu:0@b", "cpu:0@c"]
    assert "a leads and waits at 127.0.0.2" in leader.said
    assert "b (127.0.0.3) has joined with cpu:0@b." in leader.said
    for side in (late.wait(), other.wait()):
        assert side.error is None
        assert side.result["code"] == 0
    assert "has joined a at 127.0.0.2" in other.said
    network = leader.result.network  # to the slower one, as measured over loopback
    assert network.gb_per_second > 0.01
    assert network.latency_seconds < 1


def test_emulated_devices_are_not_measured(lead: Callable[[HostInfo], Side], port: int) -> None:
    other = follow(host_info("b", port, devices=(replace(CPU, backend="emulated"),)))
    assert lead(host_info("a", port)).wait().result.network is None
    assert other.wait().error is None


@pytest.mark.usefixtures("soon")
def test_a_machine_that_cannot_be_measured_trains_all_the_same(
    lead: Callable[[HostInfo], Side], port: int
) -> None:
    leader, b = lead(host_info("a", port)), host_info("b", port)
    until_said(leader, "leads and waits")
    with socket.create_connection(("127.0.0.2", port), source_address=("127.0.0.3", 0)) as connection:
        channel = handshake_as_member(connection, TOKEN, "member", "b", 2.0)
        channel.send(b.facts.to_dict() | {"time": time.time()})
        assert channel.receive(time.monotonic() + 10) == {"op": "probe"}  # and nothing is done for it
        assert channel.receive(time.monotonic() + 10) == {"op": "welcome"}
        assert channel.receive(time.monotonic() + 10)["op"] == "end"
    assert leader.wait().result.network is None
    assert "The network to b (127.0.0.3) could not be measured: nothing answers" in leader.said


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hetexp": "9.9"}, "and 9.9 on b: install the same version on both."),
        ({"torch": "1.0.0"}, "and 1.0.0 on b: both need the same release"),
        ({"config": {"trainer": {"max_steps": 20, "seed": 0}}}, "`trainer.max_steps` is 10 on a and 20 on b"),
        ({"config": {"trainer": {"max_steps": 10}}}, "`trainer.seed` is 0 on a and absent on b"),
    ],
)
def test_what_differs_is_reported_on_both_sides(
    changes: dict[str, Any], expected: str, lead: Callable[[HostInfo], Side], port: int
) -> None:
    leader, member = lead(host_info("a", port)), follow(host_info("b", port, **changes))
    assert expected in leader.wait().message
    assert expected in member.wait().message


def test_a_clock_that_is_wrong_is_reported_on_both_sides(lead: Callable[[HostInfo], Side], port: int) -> None:
    leader, member = lead(host_info("a", port)), follow(host_info("b", port, clock=lambda: time.time() - 100))
    expected = "The clock of b is 100 s behind that of a, and 5 s are the most (cluster.clock_skew_seconds)"
    assert expected in leader.wait().message
    assert expected in member.wait().message


def test_all_that_came_are_reported_when_one_does_not_fit(
    lead: Callable[[HostInfo], Side], port: int
) -> None:
    leader = lead(host_info("a", port, "abc"))
    good = follow(host_info("b", port, "abc"))
    until_said(leader, "b (127.0.0.3) has joined")
    bad = follow(host_info("c", port, "abc", hetexp="9.9"))
    for side in (leader, good, bad):
        assert "9.9 on c: install the same version" in side.wait().message


def test_who_does_not_come_is_named_on_every_side(lead: Callable[[HostInfo], Side], port: int) -> None:
    started = time.monotonic()
    leader, member = lead(host_info("a", port, "abc", 1.5)), follow(host_info("b", port, "abc", 5))
    for side in (leader, member):
        assert "c (127.0.0.4) did not join at 127.0.0.2:" in side.wait().message
        assert "within 1.5 s (cluster.join_seconds)" in side.message
    assert time.monotonic() - started < 10


def test_a_wrong_token_is_reported_on_both_sides_and_written_down(
    lead: Callable[[HostInfo], Side], port: int, tmp_path: Path
) -> None:
    leader, member = lead(host_info("a", port, seconds=2)), follow(host_info("b", port, token=b"u" * 64))
    why = "its token is not this cluster's"
    assert why in member.wait().message
    assert f"Refused meanwhile: 127.0.0.3: {why}" in leader.wait().message
    assert f"refused 127.0.0.3: {why}" in (tmp_path / LOG).read_text()


def test_two_machines_cannot_be_the_same_one(lead: Callable[[HostInfo], Side], port: int) -> None:
    leader = lead(host_info("a", port, "abc"))
    first = follow(host_info("b", port, "abc"))
    until_said(leader, "b (127.0.0.3) has joined")
    second = follow(host_info("b", port, "abc"))
    assert "b has joined already, from 127.0.0.3: is node=… right?" in second.wait().message
    third = follow(host_info("c", port, "abc"))
    for side in (leader, first, third):
        assert side.wait().error is None


def test_a_name_that_is_not_in_the_file_may_not_join(lead: Callable[[HostInfo], Side], port: int) -> None:
    leader = lead(host_info("a", port))
    stranger = follow(host_info("d", port))
    assert "d is none of the machines that may join here (b)." in stranger.wait().message
    follow(host_info("b", port)).wait()
    assert leader.wait().error is None


def test_a_closed_port_is_reported_within_the_bound(port: int) -> None:
    started = time.monotonic()
    member = follow(host_info("b", port, seconds=1.0)).wait()
    assert f"a at 127.0.0.2:{port}, which leads, did not answer within 1 s" in member.message
    assert "nothing listens there" in member.message
    assert "b waits for a at 127.0.0.2" in member.said
    assert time.monotonic() - started < 5


def test_a_firewall_that_drops_is_reported_within_the_bound(port: int) -> None:
    """A full queue of connections drops new ones without a word, as such a firewall does."""
    with socket.create_server(("127.0.0.2", port), backlog=0) as server:
        waiting = []
        for _ in range(8):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(server.getsockname())
            waiting.append(one)
        started = time.monotonic()
        member = follow(host_info("b", port, seconds=1.5)).wait()
        assert "nothing answers (a firewall that drops, or a wrong address)" in member.message
        assert time.monotonic() - started < 6
        for one in waiting:
            one.close()


def test_a_service_that_is_not_hetexp_is_reported_within_the_bound(port: int) -> None:
    with socket.create_server(("127.0.0.2", port)):  # it takes connections, and says nothing
        member = follow(host_info("b", port, seconds=1.0)).wait()
    assert f"a at 127.0.0.2:{port}, which leads, did not answer within 1 s" in member.message
    assert "nothing answers" in member.message


def test_another_service_is_no_leader(port: int) -> None:
    with socket.create_server(("127.0.0.2", port)) as server:
        member = follow(host_info("b", port))
        with server.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            assert "is no leader of this cluster: a message of" in member.wait().message


def test_a_port_that_is_taken_is_reported(lead: Callable[[HostInfo], Side], port: int) -> None:
    with socket.create_server(("127.0.0.2", port)):
        message = lead(host_info("a", port)).wait().message
    assert f"`cluster.port` must be a port that this process may open at 127.0.0.2, but is {port}" in message


def strangers(port: int, number: int, address: str) -> list[socket.socket]:
    """Return connections that the leader serves, and that say nothing."""
    opened = [socket.create_connection(("127.0.0.2", port), 20, (address, 0)) for _ in range(number)]
    for one in opened:
        assert one.recv(2**12)
    return opened


def is_open(stranger: socket.socket) -> bool:
    """Return whether the leader holds a connection whose greeting has been read."""
    stranger.settimeout(0)
    try:
        return stranger.recv(1) != b""
    except BlockingIOError:
        return True


def test_strangers_neither_join_nor_disturb(
    lead: Callable[[HostInfo], Side], port: int, tmp_path: Path
) -> None:
    """All that the leader serves are there, and silent, while a machine joins."""
    leader = lead(host_info("a", port))
    until_said(leader, "leads and waits")
    silent = [one for number in (7, 8) for one in strangers(port, MAX_UNPROVED // 2, f"127.0.0.{number}")]
    for body in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x80\x04\x95"):
        with socket.create_connection(("127.0.0.2", port)) as one:
            one.sendall(body)
    member = follow(host_info("b", port))
    assert member.wait().error is None
    assert leader.wait().error is None
    for one in silent:
        one.close()
    log = (tmp_path / LOG).read_text()
    assert "refused 127.0.0.7: it had not proved itself when newer connections came" in log
    assert "where 4096 are the most" in log


@pytest.fixture
def patient(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LeaderServer]:
    """A leader's port that lets no stranger go for being silent."""
    monkeypatch.setattr("hetexp.hosts.leader_server.IDLE_SECONDS", 1000.0)
    server = LeaderServer("127.0.0.2", port, TOKEN, 1000.0, tmp_path)
    yield server
    server.close()


@pytest.mark.usefixtures("patient")
def test_the_oldest_strangers_make_room(port: int) -> None:
    first, second = strangers(port, 8, "127.0.0.7"), strangers(port, 8, "127.0.0.8")
    newest = strangers(port, 3, "127.0.0.9")
    for one in first[:3]:
        assert one.recv(1) == b""
    assert all(map(is_open, [*first[3:], *second, *newest]))
    for one in (*first, *second, *newest):
        one.close()


@pytest.mark.usefixtures("patient")
def test_an_address_with_many_connections_loses_its_own(port: int) -> None:
    older, many = strangers(port, 1, "127.0.0.7"), strangers(port, MAX_OF_ADDRESS + 2, "127.0.0.8")
    for one in many[:2]:
        assert one.recv(1) == b""
    assert all(map(is_open, [*older, *many[2:]]))
    for one in (*older, *many):
        one.close()


def test_a_silent_stranger_has_less_time_than_a_machine(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetexp.hosts.leader_server.IDLE_SECONDS", 0.1)
    server = LeaderServer("127.0.0.2", port, TOKEN, 1000.0, tmp_path)
    (one,) = strangers(port, 1, "127.0.0.7")
    assert one.recv(1) == b""
    one.close()
    server.close()


def test_a_machine_whose_connection_is_closed_tries_again(
    lead: Callable[[HostInfo], Side], port: int
) -> None:
    with socket.create_server(("127.0.0.2", port)) as crowded:
        member = follow(host_info("b", port))
        for ends in (b"", b"\0\0"):  # before the greeting, and within it
            connection, _ = crowded.accept()
            connection.sendall(ends)
            connection.close()
    assert lead(host_info("a", port)).wait().error is None
    assert member.wait().error is None
    assert "b waits for a at 127.0.0.2" in member.said


def test_a_machine_that_is_always_turned_away_says_so(port: int) -> None:
    with socket.create_server(("127.0.0.2", port)) as crowded:
        member = follow(host_info("b", port, seconds=1.0))
        crowded.settimeout(0.1)
        while member.running:
            with suppress(TimeoutError):
                crowded.accept()[0].close()
    assert "which leads, did not answer within 1 s" in member.wait().message
    assert "Others may crowd there: see cluster.log" in member.message


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"devices": None}, "facts that cannot be read (devices: "),
        ({"devices": [None]}, "facts that cannot be read (devices.0: "),
        ({"devices": []}, "facts without devices"),
        ({"threads": [1, 1]}, "facts without devices"),
        ({"threads": [math.inf]}, "facts that cannot be read (threads.0: "),
        ({"config": []}, "facts that cannot be read (config: "),
        ({"time": "now"}, "facts that cannot be read (time: "),
        ({"hetexp": "\ud800"}, "facts that are no Unicode text"),
        ({"name": "c"}, "two names"),
        ({"name": {}}, "facts that cannot be read (name: "),
    ],
)
def test_odd_facts_of_a_machine_are_refused(
    changes: dict[str, Any], why: str, lead: Callable[[HostInfo], Side], port: int, tmp_path: Path
) -> None:
    leader = lead(host_info("a", port))
    until_said(leader, "leads and waits")
    with introduced(port, "b") as channel:
        channel.send(host_info("b", port).facts.to_dict() | changes)
        with pytest.raises(ConnectionResetError):
            channel.receive(time.monotonic() + 10)
    member = follow(host_info("b", port))
    assert member.wait().error is None
    assert leader.wait().error is None
    assert f"refused 127.0.0.3: it does not speak as hetexp does ({why}" in (tmp_path / LOG).read_text()


def test_a_clock_that_is_no_number_is_wrong(lead: Callable[[HostInfo], Side], port: int) -> None:
    leader, member = lead(host_info("a", port)), follow(host_info("b", port, clock=lambda: math.nan))
    for side in (leader, member):
        assert "The clock of b is nan s" in side.wait().message


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "message", [{"op": "exit", "key": math.inf}, {"op": "exit", "key": []}, {"key": 1}, {}]
)
def test_a_machine_that_sends_odd_messages_is_lost(
    message: dict[str, Any], tmp_path: Path, port: int
) -> None:
    over = threading.Event()

    def act(console: Console) -> Any:
        with all_joined(host_info("a", port), tmp_path, console):
            over.wait(10)

    leader = Side(act)
    with member_of(port, "b") as channel:
        channel.send(message)
        until_said(leader, "b (127.0.0.3) sent what it should not (")
    over.set()
    assert leader.wait().error is None


def test_a_run_over_machines_says_what_travels_plain(lead: Callable[[HostInfo], Side], port: int) -> None:
    leader, member = lead(host_info("a", port)), follow(host_info("b", port))
    assert member.wait().error is None
    assert leader.wait().said.count(PLAIN) == 1


def test_a_member_cannot_reach_any_port_of_the_leader(tmp_path: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as secret:
        info = host_info("a", port)

        def act(console: Console) -> Any:
            with all_joined(info, tmp_path, console):
                over.wait(10)

        over = threading.Event()
        leader = Side(act)
        member = follow(host_info("b", port))
        until_said(leader, "has joined")
        asked: list[tuple[str, dict[str, Any]]] = [("store", {"port": secret.getsockname()[1]})]
        odd: list[Any] = [None, [], {}, "1", 1e400, 10**400, str(tmp_path)]
        asked += [("store", {"port": one}) for one in odd] + [("files", {"folder": one}) for one in odd]
        for purpose, question in asked:  # neither ports nor folders, and nothing that is none
            with introduced(port, "b", purpose) as channel:
                channel.send(question)
                with pytest.raises(ConnectionResetError):
                    channel.receive(time.monotonic() + 5)
        over.set()
        leader.wait()
        member.wait()
        secret.settimeout(0)
        with pytest.raises(BlockingIOError):
            secret.accept()


@pytest.mark.usefixtures("soon")
def test_a_machine_that_was_lost_joins_again(tmp_path: Path, port: int) -> None:
    """With the devices that it had before; others get the reason."""
    info = host_info("a", port)

    def act(console: Console) -> Any:
        with all_joined(info, tmp_path, console) as joined:
            lost.wait(10)
            until_said(leader, "closed its connection")
            return all_there(joined.devices, lambda: False)

    lost = threading.Event()
    leader = Side(act)
    with member_of(port, "b"):
        lost.set()
    until_said(leader, "a waits for b (127.0.0.3) to join again, up to 20 s")
    other = host_info("b", port, devices=(replace(CPU, id="cpu:7@b", host="b"),))
    assert "b must bring the devices that it had before." in str(follow(other).wait().error)
    back = follow(host_info("b", port)).wait()
    assert back.error is None
    assert leader.wait().result is True
    assert "b (127.0.0.3) has joined again." in leader.said


@pytest.mark.usefixtures("soon")
def test_a_machine_that_stays_away_is_waited_for_until_a_signal_comes(tmp_path: Path, port: int) -> None:
    info, asked = host_info("a", port), iter([False, True, True])

    def act(console: Console) -> Any:
        with all_joined(info, tmp_path, console) as joined:
            lost.wait(10)
            until_said(leader, "closed its connection")
            return all_there(joined.devices, lambda: next(asked))

    lost = threading.Event()
    leader = Side(act)
    with member_of(port, "b"):
        lost.set()
    assert leader.wait().result is False


@contextmanager
def introduced(port: int, name: str, purpose: str = "member") -> Iterator[Channel]:
    """Connect as a machine that knows the token, as soon as the leader listens."""
    deadline = time.monotonic() + 10
    while True:
        with suppress(ConnectionRefusedError):
            connection = socket.create_connection(("127.0.0.2", port), source_address=(ADDRESSES[name], 0))
            break
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    with connection:
        yield handshake_as_member(connection, TOKEN, purpose, name, 2.0)


@contextmanager
def member_of(port: int, name: str) -> Iterator[Channel]:
    """Join as a machine that is lost as soon as the block ends."""
    with introduced(port, name) as channel:
        facts = host_info(name, port).facts
        channel.send(facts.to_dict() | {"time": time.time()})
        while channel.receive(time.monotonic() + 10) != {"op": "welcome"}:
            pass
        yield channel
