"""The launcher of a machine that does not lead: it starts and ends ranks as the leader says."""

from __future__ import annotations

import base64
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hetexp.cluster.files import receive_folder
from hetexp.cluster.forward import Forward
from hetexp.cluster.host import BEATS
from hetexp.cluster.meeting import HostInfo, connect_for, join
from hetexp.cluster.wire import Channel, WireError
from hetexp.core.errors import HetexpError, RunFailedError
from hetexp.core.plan import Plan
from hetexp.hardware.detection.lease import Leases
from hetexp.launch.processes.failure import RankFailure, failure_path, log_path, stack_path, write_failure
from hetexp.launch.processes.hosts import reachable
from hetexp.launch.processes.members import Member, end_all, environment_of
from hetexp.launch.processes.process import Start, signal_group, signal_rank, start_rank

POLL_SECONDS = 0.05
PIECE = 2**16
"""Most bytes of a rank's file in one message."""
_FOLDER = "member"
"""Folder of this machine's files, below what Hydra made for the run; no run's own."""


def serve(
    own: HostInfo, run_dir: Path, working_dir: Path, share_devices: bool, console: Console
) -> dict[str, Any]:
    """Join the leader, and do what it says until it says that the run is over.

    Args:
        run_dir: folder for this machine's own files.

    Returns:
        `{"status": "completed"}` and the leader's last line.

    Raises:
        SetupError: the leader was not found, or a card is held by another run.
        RunFailedError: the run failed, or the leader is gone.
    """
    with Leases([] if share_devices else list(own.facts.devices), str(run_dir)):
        channel, address = join(own, console)
        with ExitStack() as stack:
            stack.callback(channel.close)
            stack.enter_context(reachable({}, own.interface))
            servant = _Servant(own, channel, address, run_dir / _FOLDER, working_dir)
            stack.enter_context(servant.serving())
            code, text = servant.follow()
    if code != 0:
        raise RunFailedError(text, exit_code=1)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return {"status": "completed", "told": text}


@dataclass
class _Rank:
    """A rank that was started here."""

    key: int
    member: Member
    sent: dict[str, int] = field(default_factory=dict)
    """Kind of file → bytes of it that the leader has got."""
    done: bool = False


class _Servant:
    """What a member's launcher does while a run lasts."""

    def __init__(
        self, own: HostInfo, channel: Channel, address: str, folder: Path, working_dir: Path
    ) -> None:
        self._own, self._channel, self._address = own, channel, address
        self._folder, self._working_dir = folder, working_dir
        self._ranks: dict[int, _Rank] = {}
        self._resumed: str | None = None
        """The leader's checkpoint of which a copy is here."""
        self._forwards: dict[int, Forward] = {}
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._over = threading.Event()
        channel.connection.settimeout(own.cluster.silence_seconds)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Hear the leader and give it signs of life; at the end nothing of what was started is left."""
        threads = [
            threading.Thread(target=one, name="leader", daemon=True) for one in (self._hear, self._beat)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            end_all([rank.member for rank in self._ranks.values()], 0.0)
            self._channel.close()
            for forward in self._forwards.values():
                forward.close()
            for thread in threads:
                thread.join(5.0)
            shutil.rmtree(self._folder, ignore_errors=True)  # the leader has it all

    def follow(self) -> tuple[int, str]:
        """Do what the leader says; return the exit code and the reason of the end."""
        leader = self._own.cluster.leader.name
        while True:
            try:
                order = self._orders.get(timeout=POLL_SECONDS)
            except queue.Empty:
                order = {"op": "none"}
            try:
                if order["op"] == "end":
                    return int(order["code"]), str(order["text"])
                self._do(order)
                self._report()
            except OSError as error:
                if not self._orders.empty():
                    continue  # the reason of the end may be among them
                return 1, f"{leader} is gone ({error.strerror or error}): this machine's ranks were ended."

    def _hear(self) -> None:
        leader, silence = self._own.cluster.leader.name, self._own.cluster.silence_seconds
        try:
            while not self._over.is_set():
                message = self._channel.receive(time.monotonic() + silence)
                if message.get("op") != "beat":
                    self._orders.put(message)
        except TimeoutError:
            why = f"gave no sign of life for {silence:g} s (cluster.silence_seconds)"
        except OSError:
            why = "closed its connection"
        except WireError as error:
            why = f"sent what it should not ({error})"
        else:
            return
        self._orders.put(
            {"op": "end", "code": 1, "text": f"{leader} {why}: this machine's ranks were ended."}
        )

    def _beat(self) -> None:
        while not self._over.wait(self._own.cluster.silence_seconds / BEATS):
            try:
                self._channel.send({"op": "beat"})
            except OSError:
                return

    def _do(self, order: dict[str, Any]) -> None:
        operation = order["op"]
        if operation == "start":
            self._start(order)
        elif operation == "signal":
            rank = self._ranks.get(int(order["key"]))
            if rank is not None and not (rank.done and not order["group"]):
                number = signal.Signals(int(order["number"]))
                (signal_group if order["group"] else signal_rank)(rank.member.process, number)

    def _start(self, order: dict[str, Any]) -> None:
        key, rank, member = int(order["key"]), int(order["rank"]), order["member"]
        number = rank if member is None else int(member)
        folder = self._folder / str(key)
        log = log_path(folder, number)
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            plan = self._placed(Plan.from_json(order["plan"]), folder)
            path = folder / "plan.json"
            plan.write(path, durable=False)
            device = plan.devices[rank]
            start = Start(
                plan_path=path,
                rank=rank,
                interpreter=device.python or sys.executable,
                environment=environment_of(plan, rank),
                working_dir=plan.working_dir,
                log_path=log,
                member=None if member is None else number,
            )
            self._ranks[key] = _Rank(key, Member(number, device, start_rank(start, order["method"]), log))
        except (OSError, HetexpError, WireError, TypeError, ValueError) as error:
            problem = f"Rank {rank} cannot be started on {self._own.host.name}: {error}."
            write_failure(log, RankFailure(number, "StartError", problem, time=time.time()))
            self._ship(key, "failure", failure_path(log).read_bytes())
            self._channel.send({"op": "exit", "key": key, "code": 1})

    def _placed(self, plan: Plan, folder: Path) -> Plan:
        """Return the leader's plan with this machine's folders, and its way to the store."""
        port = plan.store_port
        if port not in self._forwards:
            self._forwards[port] = Forward(lambda: self._to_store(port))
        here, config, resume = str(self._working_dir), plan.config, plan.config.get("resume")
        if resume is not None and not plan.measuring:
            config = {**config, "resume": str(self._fetched(str(resume)))}
        paths = tuple(dict.fromkeys([here, str(Path(sys.path[0]).absolute())]))
        return replace(
            plan,
            config=config,
            run_dir=str(folder),
            working_dir=here,
            import_paths=paths,
            store_host="127.0.0.1",
            store_port=self._forwards[port].port,
        )

    def _fetched(self, checkpoint: str) -> Path:
        """Return this machine's copy of a checkpoint of the leader's, of which it keeps one.

        Raises:
            CheckpointError, OSError, WireError: it did not arrive as it was.
        """
        parent = self._folder / "resume"
        target = parent / Path(checkpoint).name
        if self._resumed != checkpoint:
            shutil.rmtree(parent, ignore_errors=True)  # older copies are not needed any more
            channel = connect_for("files", self._own, self._address)
            with channel.connection:
                channel.send({"folder": checkpoint})
                receive_folder(channel, target, self._own.cluster.silence_seconds)
            self._resumed = checkpoint
        return target

    def _to_store(self, port: int) -> Any:
        channel = connect_for("store", self._own, self._address)
        channel.send({"port": port})
        channel.receive(time.monotonic() + self._own.cluster.answer_seconds)
        return channel.connection

    def _report(self) -> None:
        """Send what ranks have written since the last time, and who has ended."""
        for rank in self._ranks.values():
            if rank.done:
                continue
            code = rank.member.process.poll()  # before its files are read: it writes no more then
            log = rank.member.log_path
            self._send_new(rank, "log", log)
            self._send_new(rank, "stack", stack_path(log))
            if code is not None:
                self._send_new(rank, "failure", failure_path(log))
                self._channel.send({"op": "exit", "key": rank.key, "code": code})
                rank.done = True

    def _send_new(self, rank: _Rank, kind: str, path: Path) -> None:
        try:
            with path.open("rb") as file:
                file.seek(rank.sent.get(kind, 0))
                while piece := file.read(PIECE):
                    self._ship(rank.key, kind, piece)
                    rank.sent[kind] = rank.sent.get(kind, 0) + len(piece)
        except FileNotFoundError:
            return

    def _ship(self, key: int, kind: str, data: bytes) -> None:
        text = base64.b64encode(data).decode()
        self._channel.send({"op": "file", "key": key, "kind": kind, "data": text})
