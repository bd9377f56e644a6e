"""One long run that is hurt again and again, and what its time went into."""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import load_file

from chaos_lab import checks
from chaos_lab.checks import EXACT, Trajectory
from chaos_lab.jobs import Job, kill, until
from chaos_lab.runs import overrides
from chaos_lab.schedule import SIGNALS, Fault, events

SAVED_EVERY = 200
PACE_STEPS = 30
SETTINGS = (f"trainer.checkpoint_every={SAVED_EVERY}", "trainer.eval_every=0")
STALL = 3.0
"""A step that took so many times longer than the median is one with a pause in it."""
SLACK_SECONDS = 120.0
AFTER_SECONDS = 5.0
"""A kill's pauses begin within it: the loss is noticed, and what takes the lost one's place joins. Faults of
other kinds follow later, and their pauses are not the kill's."""


@dataclass
class Account:
    """What the time of a long run went into."""

    name: str
    steps: int
    wall_seconds: float
    """From the first step's end to the last one's."""
    step_seconds: float
    """Median."""
    effective: float
    """Time in steps that count / all time: what a step with a pause took beyond the median counts as lost."""
    pauses: dict[float, float]
    """By a kill's moment: the longest time without a finished step around it or within `AFTER_SECONDS`."""
    problems: list[str]


def account(name: str, folder: Path, moments: Sequence[float], problems: Sequence[str] = ()) -> Account:
    """Make an account of what the processes of a run recorded.

    Args:
        folder: of their records (`parts.Watch`).
        moments: of the kills, by the monotonic clock.
    """
    times = checks.step_ends(folder)
    spans = list(zip(times, times[1:], strict=False))
    gaps = [max(0.0, later - earlier) for earlier, later in spans]
    median = statistics.median(gaps)
    lost = sum(gap - median for gap in gaps if gap > STALL * median)
    pauses = {}
    for moment in moments:
        near = [span for span in spans if span[1] > moment and span[0] < moment + AFTER_SECONDS]
        if near:
            pauses[moment] = max(later - earlier for earlier, later in near)
    wall = times[-1] - times[0]
    return Account(name, len(times), wall, median, 1.0 - lost / wall, pauses, list(problems))


def hurt(
    folder: Path, faults: Sequence[Fault], step_seconds: float, start_method: str
) -> tuple[Account, list[tuple[Fault, float, str]]]:
    """Run as long as the faults go on, and let them happen.

    Returns:
        The account, and of each fault that came from outside: what was done, when, to whom.
    """
    steps = round((faults[-1].seconds + 15.0) / step_seconds)
    reference, scale = _undisturbed(folder, steps), _scale(folder, step_seconds)
    more = (
        f"launch.start_method={start_method}",
        f"hardware.time_scale={scale:.6g}",
        *SETTINGS,
        "launch.timeout_seconds=120",
        "++fault.respawn=1000",
        "++fault.respawn_seconds=0.5",
        events(faults, step_seconds),
    )
    job = Job(folder / "run", (*overrides(steps), *more))
    done: list[tuple[Fault, float, str]] = []
    try:
        if (
            not until(lambda: job.training() or job.poll() is not None, SLACK_SECONDS)
            or job.poll() is not None
        ):
            raise RuntimeError(f"the run did not begin to train:\n{job.screen}")
        begun = time.monotonic()
        for fault in faults:
            if fault.kind not in SIGNALS:
                continue
            moment = begun + fault.seconds
            until(lambda moment=moment: time.monotonic() >= moment or job.poll() is not None, 1e9)  # type: ignore[misc]
            if job.poll() is not None:
                break
            living = sorted(job.ranks().items())
            rank, pid = living[fault.device % len(living)]
            kill(pid, signal.Signals[SIGNALS[fault.kind]])
            done.append((fault, time.monotonic(), f"rank {rank}, process {pid}"))
        problems = []
        if not job.wait(faults[-1].seconds + SLACK_SECONDS) or job.code != 0:
            problems.append(f"the run ended with {job.code}: {job.screen[-2000:]}")
    finally:
        job.close()
    if not problems:
        problems = _compare(job, reference, steps)
    kills = [moment for fault, moment, _ in done if fault.kind in ("kill", "segfault")]
    return account("hetexp", job.records, kills, problems), done


def _undisturbed(folder: Path, steps: int) -> Job:
    """Do the same steps without faults and as fast as they go."""
    return _done(Job(folder / "undisturbed", (*overrides(steps), *SETTINGS, "hardware.time_scale=1")))


def _scale(folder: Path, step_seconds: float) -> float:
    """Return the time scale at which a step takes so long."""
    fast = 100.0
    for turn in range(2):
        more = (*SETTINGS, f"hardware.time_scale={fast:.6g}")
        job = _done(Job(folder / f"pace_{turn}", (*overrides(PACE_STEPS), *more)))
        fast *= step_seconds / account("", job.records, []).step_seconds
    return fast


def _done(job: Job) -> Job:
    try:
        if not job.wait(3600.0) or job.code != 0:
            raise RuntimeError(f"a run without faults failed:\n{job.screen}")
    finally:
        job.close()
    return job


def _compare(job: Job, reference: Job, steps: int) -> list[str]:
    """Return what is not as in the undisturbed run: any step's loss, the last parameters, the evaluation."""
    ours, theirs = Trajectory.read(job.folder), Trajectory.read(reference.folder)
    problems = []
    if len(ours.losses) != steps or ours.repeated:
        problems.append(f"{len(ours.losses)} steps are logged instead of {steps}, {len(ours.repeated)} twice")
    off = [abs(loss - theirs.losses[step]) / theirs.losses[step] for step, loss in ours.losses.items()]
    if max(off) > EXACT:
        problems.append(f"a loss is off by {max(off):.1e}, the last one by {off[-1]:.1e}")
    last = [
        load_file(checks.checkpoints(one.folder)[steps] / "model.safetensors") for one in (job, reference)
    ]
    if not checks.difference(*last) <= EXACT:
        problems.append(f"the last parameters are off by {checks.difference(*last):.1e}")
    with contextlib.suppress(KeyError):
        if abs(ours.evaluations[steps]["eval/loss"] / theirs.evaluations[steps]["eval/loss"] - 1) > EXACT:
            problems.append("the evaluation is another one")
    return problems
