"""Rank 0 of the ranks that another engine started: it plans for all, and sends each plan to the others.

It does with these ranks what the launcher (`hetexp/launch/launcher.py`) does with processes of its own, and
the same code plans, measures and trains.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hetexp.comm.connections.lost import is_peer_lost
from hetexp.core.config import Config
from hetexp.core.errors import HetexpError, RunFailedError, must_be
from hetexp.core.files import write_json
from hetexp.core.plan import Plan
from hetexp.core.summary import blank_summary
from hetexp.hardware.detection.inventory import Inventory
from hetexp.hardware.link_probe import LIMIT_SECONDS, in_words, measured, slowest
from hetexp.hardware.selection.pool import Selection
from hetexp.hosts.channel import PLAIN, WireError, handshake_as_leader
from hetexp.hosts.engine_devices import device_report, gather_devices, threads_of
from hetexp.hosts.engine_follower import FAILED, run_rank_of
from hetexp.hosts.engine_store import POLL_SECONDS, EngineStore
from hetexp.hosts.token import new_token
from hetexp.launch.launcher import CALIBRATION
from hetexp.launch.processes.failure import RankFailure, first_cause
from hetexp.launch.processes.store import bind, host_store
from hetexp.launch.rank_source import NeedBytes, RankSource
from hetexp.launch.terminal.diagrams import diagrams
from hetexp.launch.terminal.display import show_plan, show_summary
from hetexp.launch.terminal.lines import print_line
from hetexp.plan.run_spec import RunSpec
from hetexp.plan.strategy import Strategy
from hetexp.worker import keep_from_ending

CAUSE_SECONDS = 1.0
"""How long the others get to report why one of them is gone."""
STOPPED = "stopped by SIGTERM"
NEEDS_LAUNCHER = (
    "fault.survive and fault.respawn, the monitor, hetexp control, devices that are added or dropped, and "
    "interpreters of single devices need hetexp's own launcher and are off"
)


class EngineRanks(RankSource):
    """Plans, measures and trains with the ranks of another engine."""

    running = True

    def __init__(self, store: EngineStore) -> None:
        self.store, self.rank_env = store, store.rank_env
        self._selection: Selection | None = None
        self._cores: dict[str, int] = {}
        self._stores: list[Any] = []

    def select(self, config: Config, inventory: Inventory, need_bytes: NeedBytes | None) -> Selection:
        """Return the devices of all ranks, the same at each call; every rank reports its own once."""
        if self._selection is None:
            selection = super().select(config, inventory, need_bytes)
            self.store.report("device", device_report(selection, self.rank_env, self.store.address))
            reports = self.store.gather("device")
            self._selection = gather_devices(reports, self.rank_env.engine)
            self._measure_network(self._selection, reports)
            devices = self._selection.devices
            if len(devices) == len(reports):
                self._cores = {
                    device.id: report["cores"] for device, report in zip(devices, reports, strict=True)
                }
        return deepcopy(self._selection)  # the check of a configuration adds reasons of its own

    def _measure_network(self, selection: Selection, reports: Sequence[dict[str, Any]]) -> None:
        """Measure the network between the hosts; that of emulated devices is the catalogue's."""
        if selection.problems or any(device.backend == "emulated" for device in selection.devices):
            return
        first_ranks = {report["node"]: rank for rank, report in reversed(list(enumerate(reports)))}
        token, address, links = new_token(), self.store.address, []
        try:
            with socket.create_server((address, 0)) as server:
                server.settimeout(LIMIT_SECONDS)
                probe = {"address": address, "port": server.getsockname()[1], "token": token}
                for rank in sorted(set(first_ranks.values()) - {0}):
                    self.store.send_command({"probe": rank} | probe)
                    with server.accept()[0] as connection:
                        handshake_as_leader(connection, token.encode(), LIMIT_SECONDS)
                        links.append(measured(connection))
        except (OSError, WireError) as error:
            selection.problems.append(f"The hosts must reach each other, but do not: {error}.")
            return
        if (link := slowest(links)) is not None:
            selection.network = link
            selection.reasons.append(in_words(link))

    def check(self, config: Config, strategy: Strategy | None, selection: Selection) -> list[str]:
        problems, engine = [], self.rank_env.engine
        if config.cluster.hosts:
            fix = "Use the one or the other."
            problems.append(f"`cluster.hosts` must be empty where another launcher starts the ranks. {fix}")
        if config.fallback is not None:
            accepted = f"null where {engine} starts the ranks"
            problems.append(must_be("strategy.fallback", accepted, config.fallback))
        if strategy is not None:
            problems += strategy.check_external_ranks(engine, self.rank_env.world_size)
        return problems

    def adapt(self, config: Config, raw: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
        fault = config.fault.model_copy(update={"survive": False})
        return (
            config.model_copy(update={"fault": fault, "fallback": None}),  # `check` refuses a fallback
            {**raw, "fault": {**raw.get("fault", {}), "survive": False}},
        )

    def measure(self, plan: Plan, spec: RunSpec, console: Console) -> dict[str, Any]:
        plan = replace(plan, run_dir=str(Path(plan.run_dir) / "calibration"), measuring=True)
        console.print(f"Measuring {', '.join(d.id for d in plan.devices)} before the run …", highlight=False)
        self._run(plan, spec.config)
        result: dict[str, Any] = json.loads((Path(plan.run_dir) / CALIBRATION).read_text(encoding="utf-8"))
        return result

    def launch(self, plan: Plan, spec: RunSpec, console: Console) -> dict[str, Any]:
        show_plan(plan, console)
        started = f"Started by {self.rank_env.engine} ({self.rank_env.variables}): {NEEDS_LAUNCHER}."
        console.print(started, highlight=False, soft_wrap=True)
        if len({device.host for device in plan.devices}) > 1:
            print_line(console, PLAIN)
        path = Path(plan.run_dir) / "summary.json"
        try:
            with diagrams(plan, spec.config, console):
                self._run(plan, spec.config)
        except (Exception, SystemExit) as error:
            keep_from_ending()  # the engine ends all ranks as soon as one has failed
            cause, reason = self._cause(error, plan)
            print_line(console, cause, "red")
            status = "interrupted" if cause == STOPPED else "failed"
            write_json(path, blank_summary(plan, status) | {"error": reason})
            raise RunFailedError(reason, 143 if cause == STOPPED else 1, cause) from error
        if not path.exists():
            console.print(f"The summary is at {path} on the host of {plan.devices[0].id}.", highlight=False)
            return blank_summary(plan, "completed")
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        show_summary(summary, Path(plan.run_dir), console)
        return summary

    def _run(self, plan: Plan, config: Config) -> None:
        """Let every rank execute a plan, this one included."""
        run_dir = Path(plan.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        listener = bind(self.store.address, config.launch.port)
        port: int = listener.getsockname()[1]
        self._stores.append(host_store(listener))  # it ends with this object
        loaders = config.trainer.num_workers
        threads = threads_of(plan, self._cores, config.hardware.threads_per_rank, loaders)
        plan = replace(plan, store_host=self.store.address, store_port=port, threads=threads)
        plan.write(run_dir / "plan.json")
        assert self._selection is not None
        device_ids = [device.id for device in self._selection.devices]
        self.store.send_command({"plan": plan.to_dict(), "device_ids": device_ids})
        run_rank_of(plan, device_ids, self.store)
        self.store.gather(f"done/{port}")

    def _cause(self, error: BaseException, plan: Plan) -> tuple[str, str]:
        """Return why the run failed, in full and in one line.

        It is another rank's reason if this one only lost it or is to end.
        """
        deadline = time.monotonic() + CAUSE_SECONDS
        while isinstance(error, SystemExit) or is_peer_lost(error):
            failures = [RankFailure(**failure) for failure in self.store.reported(FAILED).values()]
            if failures and not (cause := first_cause(failures)).peer_lost:
                device = plan.devices[cause.rank].id
                return f"rank {cause.rank}, {device}, failed:\n{cause.message}", cause.reason
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        if isinstance(error, SystemExit):
            return STOPPED, STOPPED
        own = isinstance(error, HetexpError)
        text = f"rank {self.rank_env.rank} failed: {error if own else f'{type(error).__name__}: {error}'}"
        return text, text.strip().splitlines()[-1 if own else 0]

    def end(self, problem: str | None = None) -> None:
        """Send the last command to the others, with the reason of the end."""
        self.store.send_command({"end": problem})
        self.store.leave()
