"""Restart of a run that cannot go on in its processes: on the devices left, from its newest checkpoint."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetexp.checkpoint.manifest import find_checkpoint, step_of
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import HetexpError
from hetexp.core.files import write_text
from hetexp.core.plan import Plan
from hetexp.hardware.catalogue import Link
from hetexp.hardware.selection.pool import Selection
from hetexp.launch.prepare.preparation import Measure, prepare
from hetexp.launch.processes.failure import failure_path, log_path
from hetexp.plan.planner import check_plan, make_plan
from hetexp.plan.run_spec import RunSpec


@dataclass(frozen=True)
class Restart:
    """How a run starts again."""

    plan: Plan
    spec: RunSpec
    step: int
    """Steps of the checkpoint; 0 without one."""
    pause_seconds: float
    """Pause before the start, if a lost device is used again."""


class Restarts:
    """Decides whether a run starts again, and counts the attempts of each device.

    Args:
        first: the plan of the run's start.
        measure: lets the ranks of a plan measure their devices.
    """

    def __init__(self, first: Plan, spec: RunSpec, measure: Measure) -> None:
        self._first, self._spec, self._measure = first, spec, measure
        self._tries: dict[str, int] = {}

    def after(self, plan: Plan, lost: Sequence[DeviceSpec]) -> Restart | str:
        """Return how the run starts again after it has lost devices of a plan, or why it does not.

        It starts without these devices if the strategy can. Otherwise it tries them again, at most
        `fault.respawn` times.
        """
        fault, strategy = self._spec.config.fault, self._spec.strategy
        if why := strategy.refuses_restart():
            return why
        gone = {device.id for device in lost}
        # A rank that drives several cards is lost with all of them: the lost card is not known.
        groups = [plan.devices_of(rank) for rank in range(plan.world_size)]
        left = [group[0] for group in groups if gone.isdisjoint(device.id for device in group)]
        spare = [device for device in plan.left_out if device.id not in gone]
        why = "None of its devices is left."
        if left:
            why = f"{len(left)} of its devices are left, and `fault.min_devices` is {fault.min_devices}."
        if left and len(left) >= fault.min_devices:
            planned = self._planned([*left, *spare], gone)
            if isinstance(planned, Plan):
                return self._from_newest_checkpoint(planned, 0.0)
            why = planned
        tries = max(self._tries.get(device, 0) for device in gone)
        if tries >= fault.respawn:
            return why
        self._tries |= {device: self._tries.get(device, 0) + 1 for device in gone}
        return self._from_newest_checkpoint(plan, fault.respawn_seconds * 2**tries)

    def _planned(self, devices: list[DeviceSpec], gone: Collection[str]) -> Plan | str:
        """Return the plan of some devices, made like the first one, or the problems with it."""
        first, config = self._first, self._spec.config
        network = Link.model_validate(first.network) if first.network is not None else None
        selection = Selection(devices, [f"Without {', '.join(sorted(gone))}: lost."], network=network)
        spec = self._spec.replaced(selection=selection)
        # Faults of a lost device do not happen.
        without_faults = config.model_copy(update={"fault": config.fault.model_copy(update={"events": []})})
        problems = check_plan(spec.replaced(config=without_faults))
        if problems:
            return " ".join(problems)
        try:
            plan = make_plan(spec)
            plan = plan if first.script is not None else prepare(plan, spec, self._measure)
        except HetexpError as error:
            return str(error)
        return replace(plan, run_id=first.run_id, name=first.name, import_paths=first.import_paths)

    def _from_newest_checkpoint(self, plan: Plan, pause_seconds: float) -> Restart:
        run_dir = Path(plan.run_dir)
        folder = newest_checkpoint(run_dir)
        resume = folder if folder is not None else self._spec.config.resume
        step = step_of(Path(folder)) if folder is not None else 0
        drop_lines_after(run_dir / "metrics.jsonl", step)
        for member in range(self._first.world_size):
            failure_path(log_path(run_dir, member)).unlink(missing_ok=True)
        plan = replace(plan, config={**plan.config, "resume": resume})
        return Restart(plan, self._spec.with_values(resume=resume), step, pause_seconds)


def newest_checkpoint(run_dir: Path) -> str | None:
    """Return the newest complete checkpoint of a run; `None` if there is none."""
    try:
        return str(find_checkpoint(run_dir))
    except HetexpError:
        return None


def drop_lines_after(path: Path, step: int) -> None:
    """Remove the lines of later steps from a metrics file, because those steps are done again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row: Mapping[str, Any] = json.loads(line)
        except ValueError:  # cut off where its writer was killed
            continue
        if row.get("step", 0) <= step:
            kept.append(line)
    write_text(path, "".join(f"{line}\n" for line in kept), durable=False)


def keep_faults(events: int, before: Any, after: Any) -> None:
    """Copy from one store to another which injected faults have happened, because each happens once."""
    for position in range(events):
        key = f"fault/{position}"
        if before.check([key]):
            after.add(key, 1)
