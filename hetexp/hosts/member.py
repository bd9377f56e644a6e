"""The launcher of a machine that does not lead: it starts and ends ranks when the leader says so."""

from __future__ import annotations

import base64
import queue
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hetexp.core.compose.conf_folders import import_paths
from hetexp.core.errors import HetexpError, RunFailedError, SetupError
from hetexp.core.plan import Plan
from hetexp.hardware.detection.lease import Leases
from hetexp.hardware.link_probe import answer as answer_probe
from hetexp.hosts.channel import (
    Channel,
    RefusedError,
    WireError,
    explain,
    handshake_as_member,
    retried,
)
from hetexp.hosts.checkpoint_transfer import receive_folder
from hetexp.hosts.joined_host import rank_files
from hetexp.hosts.port_forward import PortForward
from hetexp.hosts.this_host import HostInfo, resolve
from hetexp.launch.processes.failure import RankFailure, log_path, write_failure
from hetexp.launch.processes.hosts import reachable
from hetexp.launch.processes.members import Member, end_all, start_member
from hetexp.launch.processes.process import signal_group, signal_rank
from hetexp.launch.terminal.lines import print_line

POLL_SECONDS = 0.05
CHUNK_BYTES = 2**16
"""Most bytes of a rank's file in one message."""
FOLDER = "member"
"""Folder for the files of this machine, below the one that Hydra made for the run."""


def run_member(
    info: HostInfo, run_dir: Path, working_dir: Path, share_devices: bool, console: Console
) -> dict[str, Any]:
    """Join the leader, and execute its commands until it says that the run is over.

    Args:
        run_dir: folder for this machine's own files.

    Returns:
        `{"status": "completed"}` and the leader's last message.

    Raises:
        SetupError: the leader was not found, or another run holds a card.
        RunFailedError: the run failed, or the leader is gone.
    """
    with Leases([] if share_devices else list(info.facts.devices), str(run_dir)):
        channel, address = join_leader(info, console)
        with ExitStack() as stack:
            stack.callback(channel.close)
            stack.enter_context(reachable({}, info.interface))
            launcher = _MemberLauncher(info, channel, address, run_dir / FOLDER, working_dir)
            stack.enter_context(launcher.listening())
            code, text = launcher.follow()
    if code != 0:
        raise RunFailedError(text, exit_code=1)
    print_line(console, text)
    return {"status": "completed", "message": text}


def join_leader(info: HostInfo, console: Console) -> tuple[Channel, str]:
    """Look for the leader, and join it.

    Returns:
        The connection to its launcher, and its address.

    Raises:
        SetupError: it was not found in time, or refuses this machine; says why.
        RunFailedError: the run does not start, for a reason that the leader has given.
    """
    cluster, leader, name = info.cluster, info.cluster.leader, info.host.name
    address = resolve(leader, cluster)
    where, limit = f"{leader.name} at {address}:{cluster.port}", cluster.join_seconds

    def waits(error: OSError) -> None:
        text = f"{name} waits for {where}, up to {limit:g} s (cluster.join_seconds): {explain(error)}."
        print_line(console, text)

    try:
        channel = connect(info, address, "member", limit, waits)
    except RefusedError as error:
        raise SetupError(f"{where} does not let {name} join: {error}.") from None
    except WireError as error:
        raise SetupError(f"{where} is no leader of this cluster: {error}.") from None
    except OSError as error:
        crowd = " Others may crowd there: see cluster.log in the run's folder."
        raise SetupError(
            f"{where}, which leads, did not answer within {limit:g} s (cluster.join_seconds): "
            f"{explain(error)}.{crowd if isinstance(error, ConnectionResetError) else ''}"
        ) from None
    try:
        channel.send(info.facts.to_dict() | {"time": info.clock()})
        # All others may still be on their way.
        answer = channel.receive(time.monotonic() + limit + cluster.answer_seconds)
        if answer.get("op") == "probe":
            with suppress(OSError), connect(info, address, "probe").connection as probed:
                answer_probe(probed)  # the leader reports what goes wrong
            answer = channel.receive(time.monotonic() + limit + cluster.answer_seconds)
    except (WireError, OSError) as error:
        channel.close()
        reason = explain(error) if isinstance(error, OSError) else str(error)
        raise SetupError(f"{where} has ended before the run began: {reason}.") from None
    if answer.get("op") != "welcome":
        channel.close()
        raise RunFailedError(str(answer.get("text", "the leader has ended")))
    devices = ", ".join(device.id for device in info.facts.devices)
    print_line(console, f"{name} has joined {where} with {devices}, and does what it says.")
    return channel, address


def connect(
    info: HostInfo,
    address: str,
    purpose: str,
    seconds: float | None = None,
    waits: Callable[[OSError], None] = lambda _: None,
) -> Channel:
    """Return a connection to the leader after the handshake, which is tried again when it breaks.

    Args:
        seconds: for all attempts; `None`: `cluster.answer_seconds`.
        waits: gets the reason of the first failure.

    Raises:
        WireError, OSError: it refuses this machine, or does not answer in time.
    """
    cluster = info.cluster

    def attempt(seconds: float) -> Channel:
        connection = socket.create_connection((address, cluster.port), seconds, (info.address, 0))
        try:
            return handshake_as_member(
                connection, info.token, purpose, info.facts.name, cluster.answer_seconds
            )
        except BaseException:
            connection.close()
            raise

    return retried(attempt, cluster.answer_seconds if seconds is None else seconds, waits)


@dataclass
class _Rank:
    """A rank that was started here."""

    key: int
    member: Member
    sent: dict[str, int] = field(default_factory=dict)
    """Kind of file → bytes of it that the leader has."""
    done: bool = False


class _MemberLauncher:
    """Executes the leader's commands while a run lasts."""

    def __init__(
        self, info: HostInfo, channel: Channel, address: str, folder: Path, working_dir: Path
    ) -> None:
        self._info, self._channel, self._address = info, channel, address
        self._folder, self._working_dir = folder, working_dir
        self._ranks: dict[int, _Rank] = {}
        self._resumed: str | None = None
        """The leader's checkpoint of which a copy is here."""
        self._forwards: dict[int, PortForward] = {}
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._leader = info.cluster.leader.name

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive commands and send heartbeats; at the end remove all that was started."""
        self._channel.listen(self._info.cluster.silence_seconds, self._commands.put, self._lose)
        try:
            yield
        finally:
            end_all([rank.member for rank in self._ranks.values()], 0.0)
            self._channel.close()
            for forward in self._forwards.values():
                forward.close()
            shutil.rmtree(self._folder, ignore_errors=True)  # the leader has it all

    def follow(self) -> tuple[int, str]:
        """Execute the leader's commands; return the exit code and the reason of the end."""
        while True:
            try:
                command = self._commands.get(timeout=POLL_SECONDS)
            except queue.Empty:
                command = {"op": "none"}
            try:
                if command["op"] == "end":
                    return int(command["code"]), str(command["text"])
                self._execute(command)
                self._report()
            except OSError as error:
                if not self._commands.empty():
                    continue  # the reason of the end may be among them
                why = error.strerror or error
                return 1, f"{self._leader} closed its connection ({why}): this machine's ranks were ended."

    def _lose(self, why: str) -> None:
        text = f"{self._leader} {why}: this machine's ranks were ended."
        self._commands.put({"op": "end", "code": 1, "text": text})

    def _execute(self, command: dict[str, Any]) -> None:
        if command["op"] == "start":
            self._start(command)
        elif command["op"] == "signal":
            rank = self._ranks.get(int(command["key"]))
            if rank is not None and not (rank.done and not command["group"]):
                number = signal.Signals(int(command["number"]))
                (signal_group if command["group"] else signal_rank)(rank.member.process, number)

    def _start(self, command: dict[str, Any]) -> None:
        key, rank, member = int(command["key"]), int(command["rank"]), command["member"]
        number = rank if member is None else int(member)
        folder = self._folder / str(key)
        log = log_path(folder, number)
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            plan = self._placed(Plan.from_json(command["plan"]), folder)
            path = folder / "plan.json"
            plan.write(path, durable=False)
            secret, joins = self._channel.hidden(command["secret"], command["nonce"]), member is not None
            process = start_member(plan, path, rank, command["method"], secret, number, joins)
            self._ranks[key] = _Rank(key, process)
        except (OSError, HetexpError, WireError, TypeError, ValueError) as error:
            problem = f"Rank {rank} cannot be started on {self._info.host.name}: {error}."
            if isinstance(error, SetupError):
                problem = str(error)
            write_failure(log, RankFailure(number, "StartError", problem, time=time.time()))
            self._send_file(key, "failure", rank_files(log)["failure"].read_bytes())
            self._channel.send({"op": "exit", "key": key, "code": 1})

    def _placed(self, plan: Plan, folder: Path) -> Plan:
        """Return the leader's plan with the folders of this machine, and its port for the store."""
        port = plan.store_port
        if port not in self._forwards:
            self._forwards[port] = PortForward(lambda: self._connect_to_store(port))
        working_dir, config, resume = str(self._working_dir), plan.config, plan.config.get("resume")
        if resume is not None and not plan.measuring:
            config = {**config, "resume": str(self._fetch(str(resume)))}
        return replace(
            plan,
            config=config,
            run_dir=str(folder),
            working_dir=working_dir,
            import_paths=import_paths(Path(working_dir)),
            store_host="127.0.0.1",
            store_port=self._forwards[port].port,
        )

    def _fetch(self, checkpoint: str) -> Path:
        """Return this machine's copy of a checkpoint of the leader; only the newest copy is kept.

        Raises:
            CheckpointError, OSError, WireError: it arrived incomplete or damaged.
        """
        parent = self._folder / "resume"
        target = parent / Path(checkpoint).name
        if self._resumed != checkpoint:
            shutil.rmtree(parent, ignore_errors=True)
            channel = connect(self._info, self._address, "files")
            with channel.connection:
                channel.send({"folder": checkpoint})
                receive_folder(channel, target, self._info.cluster.silence_seconds)
            self._resumed = checkpoint
        return target

    def _connect_to_store(self, port: int) -> socket.socket:
        channel = connect(self._info, self._address, "store")
        channel.send({"port": port})
        channel.receive(time.monotonic() + self._info.cluster.answer_seconds)
        return channel.connection

    def _report(self) -> None:
        """Send what ranks have written since the last time, and the exit codes of those that ended."""
        for rank in self._ranks.values():
            if rank.done:
                continue
            code = rank.member.process.poll()  # before reading its files: afterwards it writes no more
            for kind, path in rank_files(rank.member.log_path).items():
                if kind != "failure" or code is not None:
                    self._send_new(rank, kind, path)
            if code is not None:
                self._channel.send({"op": "exit", "key": rank.key, "code": code})
                rank.done = True

    def _send_new(self, rank: _Rank, kind: str, path: Path) -> None:
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(rank.sent.get(kind, 0))
            while chunk := file.read(CHUNK_BYTES):
                self._send_file(rank.key, kind, chunk)
                rank.sent[kind] = rank.sent.get(kind, 0) + len(chunk)

    def _send_file(self, key: int, kind: str, data: bytes) -> None:
        text = base64.b64encode(data).decode()
        self._channel.send({"op": "file", "key": key, "kind": kind, "data": text})
