"""Starting again what cannot go on in process: on what is left, from the newest checkpoint of the run."""

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
class Again:
    """How a run starts again."""

    plan: Plan
    spec: RunSpec
    step: int
    """Steps that are done by then: those of the checkpoint, or none."""
    pause_seconds: float
    """Before a device that was lost is used again."""


class Restarts:
    """Decides whether a run starts again, and counts how often a device has been tried.

    Args:
        first: the plan that it began with.
        measure: lets the ranks of a plan measure their devices.
    """

    def __init__(self, first: Plan, spec: RunSpec, measure: Measure) -> None:
        self._first, self._spec, self._measure = first, spec, measure
        self._tries: dict[str, int] = {}

    def after(self, plan: Plan, lost: Sequence[DeviceSpec]) -> Again | str:
        """Return how the run starts again after it has lost devices of a plan, or why it does not.

        Without them where the strategy can do without; else with them, as often as `fault.respawn` says.
        """
        fault, strategy = self._spec.config.fault, self._spec.strategy
        if why := strategy.refuses_restart():
            return why
        gone = {device.id for device in lost}
        # If one process drives several cards, which of them was lost is not known.
        groups = [plan.devices_of(rank) for rank in range(plan.world_size)]
        rest = [group[0] for group in groups if gone.isdisjoint(device.id for device in group)]
        spare = [device for device in plan.left_out if device.id not in gone]
        why = "None of its devices is left."
        if rest:
            why = f"{len(rest)} of its devices are left, and `fault.min_devices` is {fault.min_devices}."
        if rest and len(rest) >= fault.min_devices:
            found = self._planned([*rest, *spare], gone)
            if isinstance(found, Plan):
                return self._again(found, 0.0)
            why = found
        tries = max(self._tries.get(device, 0) for device in gone)
        if tries >= fault.respawn:
            return why
        self._tries |= {device: self._tries.get(device, 0) + 1 for device in gone}
        return self._again(plan, fault.respawn_seconds * 2**tries)

    def _planned(self, devices: list[DeviceSpec], gone: Collection[str]) -> Plan | str:
        """Return the plan of some devices, made as the first one was, or what speaks against it."""
        first, config = self._first, self._spec.config
        network = Link.model_validate(first.network) if first.network is not None else None
        selection = Selection(devices, [f"Without {', '.join(sorted(gone))}: lost."], network=network)
        spec = self._spec.replaced(selection=selection)
        # Faults that are ordered for a lost device do not happen.
        quiet = config.model_copy(update={"fault": config.fault.model_copy(update={"events": []})})
        problems = check_plan(spec.replaced(config=quiet))
        if problems:
            return " ".join(problems)
        try:
            made = make_plan(spec)
            made = made if first.script is not None else prepare(made, spec, self._measure)
        except HetexpError as error:
            return str(error)
        return replace(made, run_id=first.run_id, name=first.name, import_paths=first.import_paths)

    def _again(self, plan: Plan, pause_seconds: float) -> Again:
        run_dir = Path(plan.run_dir)
        try:
            folder: Path | None = find_checkpoint(run_dir)
        except HetexpError:
            folder = None
        resume = str(folder) if folder is not None else self._spec.config.resume
        step = step_of(folder) if folder is not None else 0
        drop_lines_after(run_dir / "metrics.jsonl", step)
        for member in range(self._first.world_size):
            failure_path(log_path(run_dir, member)).unlink(missing_ok=True)
        plan = replace(plan, config={**plan.config, "resume": resume})
        return Again(plan, self._spec.with_values(resume=resume), step, pause_seconds)


def drop_lines_after(path: Path, step: int) -> None:
    """Take the lines of later steps out of a metrics file: those steps are done again."""
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
    """Carry over which of the ordered faults have happened, from one store to another: each happens once."""
    for position in range(events):
        key = f"fault/{position}"
        if before.check([key]):
            after.add(key, 1)
