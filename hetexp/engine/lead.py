"""Rank 0 of ranks that another engine started: it decides for all, and tells each of them.

What the launcher does with processes of its own (`hetexp/launch/launcher.py`) is done here with ranks that
are there already, and the same code plans, measures and trains.
"""

from __future__ import annotations

import json
import time
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
from hetexp.engine.local import gathered, own_device, threads_of
from hetexp.engine.meeting import POLL_SECONDS, Meeting, hosted
from hetexp.engine.part import FAILED, take_part_of
from hetexp.engine.probe import slowest
from hetexp.hardware.detection.inventory import Inventory
from hetexp.hardware.link_probe import in_words
from hetexp.hardware.selection.pool import Selection
from hetexp.launch.launcher import CALIBRATION
from hetexp.launch.rank_source import NeedBytes, RankSource
from hetexp.launch.terminal.diagrams import diagrams
from hetexp.launch.terminal.display import show_plan, show_summary
from hetexp.plan.run_spec import RunSpec
from hetexp.plan.strategy import Strategy
from hetexp.worker import keep_from_ending

CAUSE_SECONDS = 1.0
"""How long the others get to say why one of them is gone."""
STOPPED = "stopped by SIGTERM"
NEEDS_LAUNCHER = (
    "fault.survive and fault.respawn, the monitor, hetexp control, devices that are added or dropped, and "
    "interpreters of single devices need hetexp's own launcher and are off"
)


class Lead(RankSource):
    """Plans, measures and trains with the ranks that are there, in the launcher's place."""

    running = True

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.seat = meeting, meeting.seat
        self._selection: Selection | None = None
        self._cores: dict[str, int] = {}
        self._stores: list[Any] = []

    def select(self, config: Config, inventory: Inventory, need_bytes: NeedBytes | None) -> Selection:
        """Return the devices of all ranks, the same at each call; every rank tells its own once."""
        if self._selection is None:
            mine = own_device(super().select(config, inventory, need_bytes), self.seat, self.meeting.address)
            self.meeting.tell("device", mine)
            facts = self.meeting.gather("device")
            self._selection = gathered(facts, self.seat.engine)
            self._measure_network(self._selection, facts)
            devices = self._selection.devices
            if len(devices) == len(facts):
                self._cores = {device.id: one["cores"] for device, one in zip(devices, facts, strict=True)}
        found = self._selection
        # Whoever checks a configuration adds reasons of its own to what it is given.
        return replace(
            found, devices=list(found.devices), reasons=list(found.reasons), problems=list(found.problems)
        )

    def _measure_network(self, selection: Selection, facts: list[dict[str, Any]]) -> None:
        """Measure the network between the hosts; that of emulated devices is the catalogue's."""
        if selection.problems or any(device.backend == "emulated" for device in selection.devices):
            return
        try:
            link = slowest(facts)
        except OSError as error:
            selection.problems.append(f"The hosts must reach each other, but do not: {error}.")
            return
        if link is not None:
            selection.network = link
            selection.reasons.append(in_words(link))

    def check(self, config: Config, strategy: Strategy | None, selection: Selection) -> list[str]:
        problems, engine = [], self.seat.engine
        if config.cluster.hosts:
            fix = "Use the one or the other."
            problems.append(f"`cluster.hosts` must be empty where another launcher starts the ranks. {fix}")
        if config.fallback is not None:
            accepted = f"null where {engine} starts the ranks"
            problems.append(must_be("strategy.fallback", accepted, config.fallback))
        if strategy is not None:
            problems += strategy.check_external_ranks(engine, self.seat.world_size)
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
        measured: dict[str, Any] = json.loads((Path(plan.run_dir) / CALIBRATION).read_text(encoding="utf-8"))
        return measured

    def launch(self, plan: Plan, spec: RunSpec, console: Console) -> dict[str, Any]:
        show_plan(plan, console)
        console.print(f"Started by {self.seat.engine}: {NEEDS_LAUNCHER}.", highlight=False, soft_wrap=True)
        path = Path(plan.run_dir) / "summary.json"
        try:
            with diagrams(plan, spec.config, console):
                self._run(plan, spec.config)
        except (Exception, SystemExit) as error:
            keep_from_ending()  # the engine ends all ranks as soon as one has failed
            cause = self._cause(error)
            console.print(cause, style="red", markup=False, highlight=False, soft_wrap=True)
            last = cause.strip().splitlines()[-1]
            status = "interrupted" if cause == STOPPED else "failed"
            write_json(path, blank_summary(plan, status) | {"error": last})
            raise RunFailedError(last, 143 if cause == STOPPED else 1, cause) from error
        if not path.exists():
            console.print(f"The summary is at {path} on the host of {plan.devices[0].id}.", highlight=False)
            return blank_summary(plan, "completed")
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        show_summary(summary, Path(plan.run_dir), console)
        return summary

    def _run(self, plan: Plan, config: Config) -> None:
        """Let every rank do its part in a plan, this one included."""
        run_dir = Path(plan.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        store, port = hosted(self.meeting.address, config.launch.port)
        self._stores.append(store)  # it ends with this object
        threads = threads_of(plan, self._cores, config.hardware.threads_per_rank)
        plan = replace(plan, store_host=self.meeting.address, store_port=port, threads=threads)
        plan.write(run_dir / "plan.json")
        assert self._selection is not None
        seats = [device.id for device in self._selection.devices]
        self.meeting.order({"plan": plan.to_dict(), "seats": seats})
        take_part_of(plan, seats, self.meeting)
        self.meeting.gather(f"done/{port}")

    def _cause(self, error: BaseException) -> str:
        """Return why the run failed: another rank's reason if this one only lost it or is to end."""
        mine = str(error) if isinstance(error, HetexpError) else f"{type(error).__name__}: {error}"
        deadline = time.monotonic() + CAUSE_SECONDS
        while isinstance(error, SystemExit) or is_peer_lost(error):
            failures = [one for one in self.meeting.reported(FAILED).values() if not one["peer_lost"]]
            if failures:
                first = min(failures, key=lambda one: float(one["time"]))
                return f"rank {first['rank']}, {first['device']}, failed:\n{first['message']}"
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        if isinstance(error, SystemExit):
            return STOPPED
        return f"rank {self.seat.rank} failed: {mine}"

    def end(self, problem: str | None = None) -> None:
        """Tell the others that nothing more comes, and why."""
        self.meeting.order({"end": problem})
        self.meeting.part()
