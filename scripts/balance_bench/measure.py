"""Measures what the tables of the balancing benchmark show; results are plain types, for its JSON file."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchlib.runs import Run, planned, start, start_ranks

from balance_bench.mixes import Mix
from balance_bench.truth import Best, Truth
from hetexp.core.cost.calibration import DeviceCalibration, Exchange, joint_seconds
from hetexp.core.plan import Plan
from hetexp.hardware.links import links_of

RIVALS = {"plain DDP": "plain_ddp.py", "Accelerate": "accelerate_loop.py"}
MEASURES, FOLLOWS = ("profiled", "auto"), ("adaptive", "auto")
"""Policies that measure the devices first, and that follow them during the run."""
ADAPTS_WITHIN = 10
"""Steps after which a policy that follows is measured."""
MEASURED_SECONDS = 3.0
"""Of each run, about; at least one step."""
SLOW_STEP_SECONDS = 4.0
"""Steps that take longer are neither warmed up for nor repeated much: they are all pace."""
MOST_TRIALS, SCALE_STEP = 5, 1.25
"""How often the time scale is raised by which factor until this machine keeps it; then the tables say (!)."""
BALANCED = 0.05
"""A split counts as re-balanced when its step is within this of the best one's, by the cards' true times."""


@dataclass
class Stage:
    """A mix made ready: what its cards really take, and how slow this machine must let them be."""

    name: str
    mix: Mix
    folder: Path
    overrides: list[str]
    plan: Plan
    truth: Truth
    best: Best
    time_scale: float

    @property
    def timed(self) -> list[str]:
        return [*self.overrides, f"hardware.time_scale={self.time_scale!r}"]

    def facts(self) -> dict[str, Any]:
        """Return what a page says of the mix; throughputs in real samples a second."""
        truth, scale = self.truth, self.time_scale
        solo = [one / scale for one in truth.solo_throughputs()]
        fixed, rounding = truth.losses()
        return {
            "title": self.mix.title,
            "devices": [str(device) for device in self.plan.devices],
            "global_batch_size": truth.total,
            "time_scale": scale,
            "best_split": list(self.best.counts),
            "exhaustive": self.best.exhaustive,
            "ceiling_samples_per_s": truth.total / self.best.seconds / scale,
            "best_step_s": self.best.seconds * scale,
            "solo_samples_per_s": solo,
            "closed_form": truth.closed_form(),
            "lost_to_fixed": fixed,
            "lost_to_rounding": rounding,
            "jitter": truth.jitter(self.best),
        }


def prepare(name: str, mix: Mix, folder: Path, time_scale: float | None = None) -> Stage:
    """Rehearse a mix on this machine and work out its best split.

    Args:
        time_scale: instead of the rehearsal's, where a quick look is enough.
    """
    folder.mkdir(parents=True, exist_ok=True)
    overrides = mix.overrides(folder)
    pace = [] if time_scale is None else [f"hardware.time_scale={time_scale}"]
    trial = start(folder, [*overrides, *pace, "balancing=tflops", "trainer.max_steps=2"])
    truth = Truth(trial.plan, trial.emulation["buckets"])
    best = truth.best()
    scale = trial.emulation["time_scale"]
    if time_scale is None:
        steps = ["balancing=tflops", "trainer.max_steps=8", "trainer.log_every=4"]
        scale = kept(folder, [[*overrides, *steps]], max(scale, mix.step_seconds / best.seconds))
    return Stage(name, mix, folder, overrides, trial.plan, truth, best, scale)


def kept(folder: Path, runs: Sequence[Sequence[str]], scale: float) -> float:
    """Return the smallest of growing time scales that this machine keeps for a few steps in a row.

    The rehearsal takes medians of six steps; a median of which half the steps are late is no promise.

    Args:
        runs: overrides of runs that must all keep their pace.
    """
    for _ in range(MOST_TRIALS):
        if all(start(folder, [*run, f"hardware.time_scale={scale!r}"]).summary["valid"] for run in runs):
            break
        scale *= SCALE_STEP
    return scale


def num_steps(step_seconds: float) -> tuple[int, int]:
    """Return how many steps are left out and how many are measured, for steps of so many real seconds."""
    if step_seconds > SLOW_STEP_SECONDS:
        return 1, 1
    return 3, min(max(round(MEASURED_SECONDS / step_seconds), 3), 12)


def policy_overrides(policy: str) -> list[str]:
    """Return the configuration of a policy.

    `profiled` measures in every run and `adaptive` never; `auto` begins with what is there, as in a
    person's second run.
    """
    recalibrate = ["balancing.recalibrate=true"] if policy in ("profiled", "adaptive") else []
    return [f"balancing={policy}", *recalibrate]


def run_policy(stage: Stage, policy: str) -> dict[str, Any]:
    """Train with a policy and return its speed once it has settled."""
    overrides = [*stage.timed, *policy_overrides(policy)]
    first = planned([*overrides, "trainer.max_steps=1"])[0].local_batch_sizes
    expected = stage.best.seconds if policy in MEASURES else stage.truth.step_seconds(first)
    warm, measured = num_steps(expected * stage.time_scale)
    if policy in FOLLOWS:
        warm, measured = ADAPTS_WITHIN, max(num_steps(stage.best.seconds * stage.time_scale)[1], 5)
    steps = [f"trainer.max_steps={warm + measured}", f"trainer.log_every={min(warm, 5)}"]
    return speed_of(stage, start(stage.folder, [*overrides, *steps]), warm)


def speed_of(stage: Stage, run: Run, warm: int) -> dict[str, Any]:
    """Return what a page says of a run."""
    seconds = run.step_seconds(warm)
    held = dict(zip([device.id for device in run.plan.devices], run.last_split(), strict=True))
    counts = [held.get(device.id, 0) for device in stage.plan.devices]
    left_out = [reason for reason in run.plan.reasons if "is left out" in reason]
    predicted = run.summary["predicted_step_s"]
    return {
        "samples_per_s": stage.truth.total / seconds,
        "step_s": seconds,
        "predicted_step_s": predicted,
        "split": counts,
        "left_out": left_out,
        "valid": run.summary["valid"],
        "invalid_reason": run.summary["invalid_reason"],
    }


def run_rival(stage: Stage, rival: str) -> dict[str, Any]:
    """Train with another framework's loop on the same emulated cards."""
    world, total = stage.plan.world_size, stage.truth.total
    split = [total // world] * world
    warm, measured = num_steps(stage.truth.step_seconds(split) * stage.time_scale)
    output = start_ranks(
        [
            *("-m", f"rivals.{RIVALS[rival].removesuffix('.py')}"),
            *("--global-batch-size", str(total)),
            *("--steps", str(warm + measured), "--warm-steps", str(warm)),
        ],
        world,
        {"BENCH_PLAN": str(plan_path(stage)), "BENCH_TIME_SCALE": repr(stage.time_scale)},
    )
    found = re.search(r"step_seconds=(\S+) valid=(\w+)", output)
    assert found is not None, output
    seconds = float(found.group(1))
    return {
        "samples_per_s": sum(split) / seconds,
        "step_s": seconds,
        "split": split,
        "valid": found.group(2) == "True",
    }


def plan_path(stage: Stage) -> Path:
    """Write the mix's plan, at its time scale, for ranks that hetexp does not start; return its path."""
    path = stage.folder / "plan.json"
    config = {
        **stage.plan.config,
        "hardware": {**stage.plan.config["hardware"], "time_scale": stage.time_scale},
    }
    Plan(**{**vars(stage.plan), "config": config}).write(path)
    return path


def run_solo(stage: Stage) -> dict[str, Any]:
    """Train on the mix's first device alone, at the same pace; it keeps its number and hidden deviation."""
    alone = stage.mix.overrides(stage.folder, alone=True)
    expected = stage.truth.own_seconds(0, stage.truth.total) * stage.time_scale
    warm, measured = num_steps(expected)
    steps = [f"trainer.max_steps={warm + measured}", f"trainer.log_every={warm}"]
    run = start(stage.folder, [*alone, f"hardware.time_scale={stage.time_scale!r}", *steps])
    seconds = run.step_seconds(warm)
    return {"samples_per_s": stage.truth.total / seconds, "step_s": seconds, "valid": run.summary["valid"]}


def run_splits(
    stage: Stage, splits: Sequence[Sequence[int]], steps: int, warm_steps: int = 1
) -> tuple[list[float], bool]:
    """Train with one split after the other; return the modelled seconds of a step of each, and validity."""
    job = stage.folder / "job.json"
    content = {"plan": str(plan_path(stage)), "splits": splits, "warm_steps": warm_steps, "steps": steps}
    job.write_text(json.dumps(content), encoding="utf-8")
    timed = json.loads(start_ranks(["-m", "balance_bench.session", str(job)], stage.plan.world_size, {}))
    return timed["seconds"], timed["valid"]


def calibration_of(stage: Stage) -> tuple[list[DeviceCalibration], Exchange, tuple[int, ...]]:
    """Let hetexp measure the mix as `profiled` does; return what it found, and the split it takes."""
    profiled = [*policy_overrides("profiled"), "balancing.drop_slower=false"]
    overrides = [*stage.timed, *profiled, "trainer.max_steps=1"]
    plan = start(stage.folder, overrides).plan
    assert plan.calibration is not None
    devices = [DeviceCalibration.from_dict(one) for one in plan.calibration["devices"]]
    return devices, Exchange.from_dict(plan.calibration["exchange"]), plan.local_batch_sizes


def random_splits(stage: Stage, count: int, seed: int) -> list[tuple[int, ...]]:
    """Return splits around the best one, none of which takes more than twice its time."""
    draw = random.Random(seed)
    splits: list[tuple[int, ...]] = []
    while len(splits) < count:
        weights = [max(n, 1) * draw.lognormvariate(0.0, 0.5) for n in stage.best.counts]
        counts = [round(stage.truth.total * weight / sum(weights)) for weight in weights]
        counts[0] += stage.truth.total - sum(counts)
        fits = min(counts) > 0 and tuple(counts) not in splits
        if fits and stage.truth.step_seconds(counts) < 2 * stage.best.seconds:
            splits.append(tuple(counts))
    return splits


def predict(stage: Stage, count: int, steps: int, repeats: int) -> dict[str, Any]:
    """Compare predicted and measured steps of splits that were not profiled, and the chosen with the best."""
    devices, exchange, chosen = calibration_of(stage)
    links = links_of(stage.plan)
    others = random_splits(stage, count, seed=count)
    pair = [chosen, stage.best.counts]
    measured, valid = run_splits(stage, [*others, *(pair * repeats)], steps)
    rows = [
        {"split": list(split), "predicted_s": joint_seconds(devices, split, links, exchange), "measured_s": s}
        for split, s in zip(others, measured, strict=False)
    ]
    pairs = measured[len(others) :]
    of_chosen, of_best = statistics.median(pairs[0::2]), statistics.median(pairs[1::2])
    return {
        "rows": rows,
        "chosen": list(chosen),
        "best": list(stage.best.counts),
        "regret_in_the_model": stage.truth.step_seconds(chosen) / stage.best.seconds - 1,
        "regret_measured": of_chosen / of_best - 1,
        "valid": valid,
    }


def slow_down(stage: Stage, repeats: int, last_step: int = 120) -> list[dict[str, Any]]:
    """Slow the first device 2 times at step 50, let it recover at 100, and follow the split; repeat."""
    common = [
        *stage.timed,
        *policy_overrides("adaptive"),
        "trainer.precision=float64",
        f"trainer.max_steps={last_step}",
        "trainer.log_every=1",
    ]
    quiet = start(stage.folder, common)
    truths = {1.0: stage.truth, 2.0: Truth(stage.plan, stage.truth.buckets, slower={0: 2.0})}
    limits = {factor: truth.best().seconds * (1 + BALANCED) for factor, truth in truths.items()}
    total, ids = stage.truth.total, [device.id for device in stage.plan.devices]
    found = []
    for _ in range(repeats):
        slowed = start(stage.folder, [*common, "fault=slowdown"])
        balanced = []
        for row in slowed.rows:
            counts = [round(row[f"device/{device}/share"] * total) for device in ids]
            factor = 2.0 if 50 <= row["step"] - 1 < 100 else 1.0
            balanced.append(truths[factor].step_seconds(counts) <= limits[factor])
        losses = zip(*([row["train/loss"] for row in run.rows] for run in (quiet, slowed)), strict=True)
        found.append(
            {
                "steps_to_rebalance": [steps_until(balanced[50:100]), steps_until(balanced[100:])],
                "balanced_before": balanced[49],
                "largest_difference_of_losses": max(abs(a - b) / abs(a) for a, b in losses),
                "valid": quiet.summary["valid"] and slowed.summary["valid"],
            }
        )
    return found


def steps_until(balanced: Sequence[bool]) -> int | None:
    """Return the steps before the first balanced one after which most stay so; `None` if none does."""
    for step, fine in enumerate(balanced):
        rest = balanced[step : step + 10]
        if fine and sum(rest) >= 0.8 * len(rest):
            return step
    return None
