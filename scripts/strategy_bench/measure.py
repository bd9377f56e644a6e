"""Runs the entrants and keeps what the table shows; results are plain types, for the JSON file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from balance_bench.measure import kept
from balance_bench.mixes import Mix
from benchlib.runs import Run, lines_of, start

from hetexp.core.cost.pipeline import StageTimes, order_of, play
from strategy_bench.entrants import TASK, Entrant

WARM_STEPS = 10
"""Left out of the speed: a policy that follows has settled by then."""
REHEARSED = ("ddp", "pipeline", "local_sgd")
"""Strategies whose time scales are asked for: what computes and what is exchanged differ."""


@dataclass
class Scene:
    """A mix, and how slow this machine must let its cards be."""

    mix: Mix
    folder: Path
    time_scale: float

    def words(self, entrant: Entrant, steps: int) -> list[str]:
        """Return an entrant's overrides; a strategy for one device gets the first, which is the fastest."""
        task = self.mix.overrides(self.folder, entrant.strategy == "single", TASK)
        return [*task, *entrant.words(), f"trainer.max_steps={steps}"]


def prepare(mix: Mix, folder: Path, time_scale: float | None) -> Scene:
    """Find a time scale at which this machine keeps every strategy's pace, or take the given one."""
    folder.mkdir(parents=True, exist_ok=True)
    scene = Scene(mix, folder, time_scale or 0.0)
    if time_scale is None:
        for strategy in REHEARSED:
            words = [f"strategy={strategy}", "balancing=tflops", "trainer.max_steps=2"]
            words += ["trainer.eval_every=0", *(["strategy.sync_every=2"] if strategy == "local_sgd" else [])]
            trial = start(folder, [*mix.overrides(folder, task=TASK), *words]).summary
            needed = mix.step_seconds / (trial["measured_step_s"] / trial["time_scale"])
            scene.time_scale = max(
                scene.time_scale, trial["time_scale"], needed if strategy == "ddp" else 0.0
            )
        runs = [scene.words(Entrant(strategy, "tflops"), 10) for strategy in REHEARSED[:2]]
        scene.time_scale = kept(folder, runs, scene.time_scale)
    return scene


def measure(inputs: Scene, entrant: Entrant, steps: int) -> dict[str, Any]:
    """Train an entrant for so many steps of the same samples, and return what it reached."""
    words = [*inputs.words(entrant, steps), f"hardware.time_scale={inputs.time_scale!r}"]
    run = start(inputs.folder, words)
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
    seconds, before, found = 0.0, 0, []
    for row in lines_of(run.folder / "metrics.jsonl"):
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
