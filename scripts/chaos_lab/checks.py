"""What must hold after a run was killed, whatever was done to it."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchlib.runs import lines_of
from safetensors.numpy import load_file

from hetexp.comm.shared_memory.segment import PREFIX

EXACT = 1e-12
"""Relative difference of losses and parameters that counts as none, in float64."""
SHARED_MEMORY = Path("/dev/shm")
OURS = (PREFIX, "torch_", "sem.", "psm_")
"""How segments are named that a run may make: our own, torch's, Python's."""


@dataclass(frozen=True)
class Trajectory:
    """What a run's folder tells of it."""

    losses: dict[int, float]
    repeated: tuple[int, ...]
    """Steps that are logged more than once."""
    evaluations: dict[int, dict[str, float]]

    @classmethod
    def read(cls, folder: Path) -> Trajectory:
        losses: list[tuple[int, float]] = []
        evaluations = {}
        for row in lines_of(folder / "metrics.jsonl"):
            if "train/loss" in row:
                losses.append((row["step"], row["train/loss"]))
            if evaluated := {key: value for key, value in row.items() if key.startswith("eval/")}:
                evaluations[row["step"]] = evaluated
        counts = Counter(step for step, _ in losses)
        repeated = tuple(step for step, count in counts.items() if count > 1)
        return cls(dict(losses), repeated, evaluations)


@dataclass(frozen=True)
class Reference:
    """A run that nothing was done to."""

    seconds: float
    """From its start to its end."""
    trajectory: Trajectory
    parameters: dict[int, dict[str, np.ndarray[Any, Any]]]
    """By step, of its checkpoints."""
    samples: dict[int, Counter[int]]
    """By step, of all ranks."""

    @property
    def steps(self) -> int:
        return max(self.trajectory.losses)

    def until(self, steps: int) -> Reference:
        """Return what a run of so many steps would have done: nothing depends on how many follow."""
        whole = self.trajectory
        return Reference(
            self.seconds,
            Trajectory(
                {step: loss for step, loss in whole.losses.items() if step <= steps},
                whole.repeated,
                {step: values for step, values in whole.evaluations.items() if step <= steps},
            ),
            {step: tensors for step, tensors in self.parameters.items() if step <= steps},
            {step: drawn for step, drawn in self.samples.items() if step <= steps},
        )


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return a run's checkpoints by step, by their names.

    A save that was killed after its manifest and before its last rename counts: `resume` goes on from it.
    """
    found = {}
    parent = folder / "checkpoints"
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        match = re.fullmatch(r"step_(\d+)|\.step_(\d+)\.\d+\.(?:new|old)", path.name)
        if match is not None and (match[1] is not None or not damage(path)):
            found[int(match[1] or match[2])] = path  # hidden names come first: a whole one replaces them
    return found


def damage(folder: Path) -> str:
    """Say what is wrong with a checkpoint by its manifest; empty where nothing is."""
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            content = (folder / name).read_bytes()
            if len(content) != entry["bytes"] or hashlib.sha256(content).hexdigest() != entry["sha256"]:
                return f"{folder}/{name} is not what its manifest says"
    except (OSError, ValueError, KeyError) as error:
        return f"{folder} cannot be read: {error!r}"
    return ""


def difference(one: Mapping[str, np.ndarray[Any, Any]], other: Mapping[str, np.ndarray[Any, Any]]) -> float:
    """Return ‖Δθ‖₂ / ‖θ‖₂ over all parameters."""
    if one.keys() != other.keys():
        return float("inf")
    delta = sum(float(np.sum((one[name] - other[name]) ** 2)) for name in one)
    return float((delta / sum(float(np.sum(other[name] ** 2)) for name in one)) ** 0.5)


def wrong_checkpoints(folder: Path, reference: Reference, bound: float) -> list[str]:
    """Return what is wrong with any checkpoint of a run: unreadable, or of another trajectory."""
    problems = []
    for step, path in sorted(checkpoints(folder).items()):
        if problem := damage(path):
            problems.append(problem)
            continue
        off = difference(load_file(path / "model.safetensors"), reference.parameters[step])
        if not off <= bound:
            problems.append(f"the parameters of {path.name} are off by {off:.1e}")
    return problems


def wrong_trajectory(run: Trajectory, reference: Reference, bound: float, after: int = 0) -> list[str]:
    """Return which losses and evaluations are not the undisturbed run's.

    Args:
        after: the step that the run went on from.
    """
    problems = []
    if run.repeated:
        problems.append(f"steps logged twice: {_few(run.repeated)}")
    known = reference.trajectory
    for step, loss in sorted(run.losses.items()):
        off = abs(loss - known.losses[step]) / abs(known.losses[step]) if step in known.losses else np.inf
        if not off <= bound:
            problems.append(f"the loss of step {step} is off by {off:.1e}")
            break
    if run.losses and min(run.losses) <= after:
        problems.append(f"it went on from step {after}, and did step {min(run.losses)} again")
    for step, evaluated in run.evaluations.items():
        for key, value in evaluated.items():
            usual = known.evaluations.get(step, {}).get(key)
            if usual is None or not abs(value - usual) <= bound * abs(usual):
                problems.append(f"{key} at step {step} is {value!r} instead of {usual!r}")
    return problems


def missing_steps(runs: Iterable[Trajectory], reference: Reference) -> list[str]:
    """Return the steps that none of the runs tells of."""
    logged: set[int] = set().union(*(run.losses for run in runs))
    lacking = [step for step in reference.trajectory.losses if step not in logged]
    return [f"no loss of steps {_few(lacking)}"] if lacking else []


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what each process recorded of its steps, by the process's id (`parts.Watch`)."""
    files = sorted(folder.iterdir())
    return {path.stem: [row for row in lines_of(path) if row["indices"]] for path in files}


def samples(folder: Path) -> dict[int, Counter[int]]:
    """Return the samples of each step, of all processes together."""
    found: dict[int, Counter[int]] = {}
    for rows in records(folder).values():
        for row in rows:
            found.setdefault(row["step"], Counter()).update(row["indices"])
    return found


def wrong_samples(folder: Path, reference: Reference, dead: Sequence[int]) -> list[str]:
    """Return the steps that used other samples than the undisturbed run's.

    Args:
        dead: processes that were ended: the samples of their last step are missing if they ended between
            the exchange and the record. A process without a record may have ended in any step.
    """
    problems = []
    used = samples(folder)
    last = max(used, default=0)
    known = {int(pid): rows for pid, rows in records(folder).items() if rows}
    ends = {max(row["step"] for row in known[pid]) + 1 for pid in dead if pid in known}
    silent = sum(pid not in known for pid in dead)
    for step, found in sorted(used.items()):
        wanted = reference.samples.get(step, Counter())
        extra, lacking = found - wanted, wanted - found
        if lacking and not extra and step not in ends and step != last and silent > 0:
            silent -= 1
        elif extra or (lacking and step not in ends and step != last):
            problems.append(f"step {step} used {dict(extra)} more and {dict(lacking)} fewer samples")
    return problems[:3]


def step_ends(folder: Path) -> list[float]:
    """Return when each step was finished first, by the monotonic clock."""
    ends: dict[int, float] = {}
    for rows in records(folder).values():
        for row in rows:
            ends[row["step"]] = min(row["time"], ends.get(row["step"], row["time"]))
    return [ends[step] for step in sorted(ends)]


def pause(folder: Path, moment: float) -> float | None:
    """Return the longest time without a finished step that ended after a moment (of the monotonic clock)."""
    times = step_ends(folder)
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False) if later > moment]
    return max(gaps, default=None)


def answers(folder: Path) -> bool:
    """Tell whether anybody answers where the run's store was."""
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except OSError:
        return False
    with socket.socket() as client:
        return client.connect_ex((plan["store_host"], plan["store_port"])) == 0


def orphaned_segments(before: set[str]) -> list[str]:
    """Return segments of shared memory that are new and of no living process."""
    there = {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(OURS)}
    return sorted(
        name
        for name in there - before
        if not any(Path(f"/proc/{number}").exists() for number in re.findall(r"\d{2,}", name))
    )


def _few(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
