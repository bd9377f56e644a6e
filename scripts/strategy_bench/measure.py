"""Runs the entrants and keeps what the table shows; results are plain types, for the JSON file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from balance_bench.mixes import Mix
from balance_bench.runs import Run, start

from hetexp.core.cost.pipeline import StageTimes, order_of, play
from strategy_bench.entrants import Entrant, task_on

WARM_STEPS = 10
"""Left out of the speed: a policy that follows has settled by then."""
REHEARSED = ("ddp", "pipeline", "local_sgd")
"""Strategies whose time scales are asked for: what computes and what is exchanged differ."""
MOST_TRIALS, SCALE_STEP = 4, 1.3


@dataclass
class Scene:
    """A mix, and how slow this machine must let its cards be."""

    mix: Mix
    folder: Path
    time_scale: float

    def run(self, entrant: Entrant, steps: int, seed: int = 0) -> Run:
        """Train an entrant; what needs one device gets the first, which is the fastest."""
        alone = 0 if entrant.strategy == "single" else None
        return start(
            self.folder,
            [
                *task_on(self.mix, self.folder, alone),
                *entrant.words(),
                f"trainer.max_steps={steps}",
                f"trainer.seed={seed}",
                f"hardware.time_scale={self.time_scale!r}",
            ],
        )


def prepare(mix: Mix, folder: Path, time_scale: float | None) -> Scene:
    """Find a time scale at which this machine keeps every strategy's pace, or take the one given."""
    folder.mkdir(parents=True, exist_ok=True)
    if time_scale is not None:
        return Scene(mix, folder, time_scale)
    scale = 0.0
    for strategy in REHEARSED:
        words = [f"strategy={strategy}", "balancing=tflops", "trainer.max_steps=2", "trainer.eval_every=0"]
        words += ["strategy.sync_every=2"] if strategy == "local_sgd" else []
        trial = start(folder, [*task_on(mix, folder), *words])
        needed = mix.step_seconds / (trial.summary["measured_step_s"] / trial.summary["time_scale"])
        scale = max(scale, trial.summary["time_scale"], needed if strategy == "ddp" else 0.0)
    inputs = Scene(mix, folder, scale)
    for _ in range(MOST_TRIALS):
        if all(inputs.run(Entrant(strategy, "tflops"), 10).summary["valid"] for strategy in REHEARSED[:2]):
            break
        inputs.time_scale *= SCALE_STEP
    return inputs


def measure(inputs: Scene, entrant: Entrant, steps: int) -> dict[str, Any]:
    """Train an entrant for so many steps of the same samples, and return what it reached."""
    run = inputs.run(entrant, steps)
    summary, seconds = run.summary, run.step_seconds(WARM_STEPS)
    solo = summary["solo_samples_per_s"]
    return {
        "samples_per_s": inputs.mix.global_batch_size / seconds,
        "step_s": seconds,
        "predicted_step_s": summary["predicted_step_s"],
        "solo_samples_per_s": solo if summary["solo_source"] == "calibration" else None,
        "bytes_per_step": summary["comm"]["bytes_per_step"],
        "chosen": summary["strategy"],
        "split": [device["local_batch"] for device in summary["devices"]],
        "curve": curve(run),
        "bubble": bubble(run),
        "merge": summary.get("merge"),
        "final_loss": (summary["final"]["eval"] or {}).get("loss"),
        "valid": summary["valid"],
        "invalid_reason": summary["invalid_reason"],
    }


def curve(run: Run) -> list[tuple[float, float]]:
    """Return seconds of training and evaluation loss, at each evaluation."""
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds, before, found = 0.0, 0, []
    for row in map(json.loads, lines):
        if "step_seconds" in row:
            seconds += row["step_seconds"] * (row["step"] - before)
            before = row["step"]
        if "eval/loss" in row:
            found.append((seconds, row["eval/loss"]))
    return found


def loss_at(curve: list[tuple[float, float]], seconds: float) -> float | None:
    """Return the loss after so many seconds, on the straight line between two evaluations.

    `None` where the first evaluation came later; the last one where there is none after it.
    """
    before = [point for point in curve if point[0] <= seconds]
    after = [point for point in curve if point[0] > seconds]
    if not before:
        return None
    if not after:
        return before[-1][1]
    (start, first), (end, second) = before[-1], after[0]
    return first + (second - first) * (seconds - start) / (end - start)


def bubble(run: Run) -> dict[str, Any] | None:
    """Return a pipeline's measured bubble beside that of its schedule played with the measured passes.

    `None` where the run has no stages, or several pipelines, whose steps wait for each other.
    """
    pipelines = run.summary["pipeline"]
    if pipelines is None or len(pipelines) > 1:
        return None
    (found,) = pipelines
    schedule, count = run.plan.config["strategy"]["schedule"], found["microbatches"]
    ranks = len(found["devices"])
    stages = [
        StageTimes((one["forward_s"],) * count, (one["backward_s"],) * count) for one in found["stages"]
    ]
    played = play(order_of(schedule, ranks, count, len(stages) // ranks), stages)
    return {
        "schedule": schedule,
        "microbatches": count,
        "layers": [one["layers"] for one in found["stages"]],
        "measured": found["bubble"],
        "simulated": played.bubble,
        "step_ratio": found["step_s"] / played.step_seconds,
    }
