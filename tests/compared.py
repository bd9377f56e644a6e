"""Runs and comparisons as a report reads them, made without training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.summary import LOST_TO
from hetexp.report.comparison import compare
from hetexp.report.intervals import interval
from hetexp.report.results import Comparison, CurvePoint, DeviceProfile, WeightsCurve
from hetexp.report.runs import METRICS, RunRecord

CARDS = ("RTX 3090", "Arc A770")
POLICIES = ("equal", "tflops", "vram", "profiled", "adaptive", "auto", "manual")


def record(
    folder: Path,
    choices: dict[str, str],
    *,
    speed: float,
    seed: int = 0,
    emulated: bool = True,
    status: str = "completed",
    error: str | None = None,
    overrides: tuple[str, ...] = (),
    shares: tuple[float, ...] = (0.5, 0.5),
    later: tuple[float, ...] | None = None,
    steps: int = 60,
    parts: tuple[float, ...] | None = (0.12, 0.1, 0.01, 0.02, 0.05),
    predicted: float = 0.95,
    energy: tuple[float, ...] | None = None,
    outrun: str | None = None,
    **summary: Any,
) -> RunRecord:
    """Write a run's log to its folder, and return the run.

    Args:
        speed: samples a second, in modelled time.
        later: shares of the second half of the run.
        parts: what was lost, in the order of `LOST_TO`; None where nothing was accounted for.
        predicted: step time, of the measured one.
        outrun: why the run is not valid.
        summary: what else differs in it.
    """
    scale = 100.0 if emulated else 1.0
    loss = _loss(steps, seed, choices)
    batch, step_seconds = 64, 64 * scale / speed
    ids = [f"{'emulated' if emulated else 'cuda'}:{place}" for place in range(len(shares))]
    names = [CARDS[place % len(CARDS)] + (" (emulated)" if emulated else "") for place in range(len(shares))]
    _write_log(folder, ids, shares, later or shares, steps, step_seconds, seed, choices)
    devices = tuple(
        DeviceSpec(id_, "emulated" if emulated else "cuda", place, name, "nvidia")
        for place, (id_, name) in enumerate(zip(ids, names, strict=True))
    )
    plan = Plan(
        run_id=folder.name,
        run_dir=str(folder),
        name=folder.name,
        group=None,
        config={"trainer": {"global_batch_size": batch, "seed": seed}},
        devices=devices,
        strategy=choices["strategy"],
        shares=shares,
        local_batch_sizes=(batch // len(shares),) * len(shares),
        collective_backend="gloo",
        threads=(1,) * len(shares),
        choices=choices,
        overrides=overrides,
    )
    known: dict[str, Any] = {
        "run_id": folder.name,
        "status": status,
        "error": error,
        "emulated": emulated,
        "valid": outrun is None,
        "exact": choices["strategy"] not in ("local_sgd", "independent"),
        "time_scale": scale if emulated else None,
        "invalid_reason": outrun,
        "strategy": choices["strategy"],
        "fallback": None,
        "seed": seed,
        "world_size": len(shares),
        "global_batch": batch,
        "steps": steps,
        "samples": batch * steps,
        "samples_per_s": speed / scale,
        "ceiling": 0.93,
        "efficiency": None if parts is None else 1 - sum(parts),
        "lost_to": dict(zip(LOST_TO, parts, strict=True)) if parts else dict.fromkeys(LOST_TO),
        "predicted_step_s": predicted * step_seconds,
        "measured_step_s": step_seconds,
        "comm": {"bytes_per_step": 263_336 if len(shares) > 1 else 0},
        "devices": [
            {
                "id": id_,
                "name": name,
                "share": share,
                "solo_samples_per_s": 0.8 * speed / scale / (1 + place),
                "energy_j": None if energy is None else energy[place],
                "energy_source": None if energy is None else "modelled from power limits",
                "local_batch": round(batch * share),
                "steps": steps,
            }
            for place, (id_, name, share) in enumerate(zip(ids, names, later or shares, strict=True))
        ],
        "final": {"train_loss": loss, "eval": {"loss": 1.1 * loss}},
    }
    return RunRecord(folder, known | summary, plan, overrides)


def _loss(step: int, seed: int, choices: dict[str, str]) -> float:
    slower = 30.0 if choices["strategy"] in ("local_sgd", "independent") else 15.0
    return 2.3 / (1.0 + step / slower) + 0.01 * (seed % 3) + 0.03 * ((step * 7 + seed) % 5) / 5


def _write_log(
    folder: Path,
    ids: list[str],
    shares: tuple[float, ...],
    later: tuple[float, ...],
    steps: int,
    step_seconds: float,
    seed: int,
    choices: dict[str, str],
) -> None:
    folder.mkdir(parents=True)
    every = max(1, steps // 20)
    lines: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        loss = _loss(step, seed, choices)
        line: dict[str, Any] = {
            "step": step,
            "train/loss": loss,
            "train/samples": 64 * step,
            "step_seconds": step_seconds,
            "samples_per_second": 64 / step_seconds,
        }
        for id_, share in zip(ids, shares if 2 * step <= steps else later, strict=True):
            line[f"device/{id_}/share"] = share
        lines.append(line)
        if step == steps or step % (5 * every) == 0:
            lines.append({"step": step, "eval/loss": 1.1 * loss})
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def rich(folder: Path, emulated: bool = True, failed: bool = True) -> Comparison:
    """Return a comparison that has something in every section."""
    runs = []
    table = (
        ("ddp", "equal", 61_000.0, (0.5, 0.5), None, (0.22, 0.14, 0.0, 0.02, 0.05)),
        ("ddp", "profiled", 88_000.0, (0.67, 0.33), None, (0.01, 0.13, 0.01, 0.02, 0.04)),
        ("ddp", "adaptive", 84_500.0, (0.5, 0.5), (0.66, 0.34), (0.04, 0.13, 0.01, 0.02, 0.03)),
        ("local_sgd", "equal", 74_000.0, (0.5, 0.5), None, (0.2, 0.02, 0.0, 0.02, -0.04)),
        ("local_sgd", "profiled", 104_000.0, (0.67, 0.33), None, (0.01, 0.03, 0.01, 0.02, -0.09)),
        ("local_sgd", "adaptive", 99_000.0, (0.55, 0.45), (0.68, 0.32), (0.02, 0.03, 0.01, 0.02, -0.03)),
        ("pipeline", "equal", 42_000.0, (0.6, 0.4), None, None),
        ("single", "equal", 69_000.0, (1.0,), None, (0.0, 0.0, 0.0, 0.02, 0.03)),
    )
    outrun = "emulated:0: this machine's real work took 5% longer; raise `hardware.time_scale` above 602"
    for strategy, policy, speed, shares, later, parts in table:
        for seed in (0, 1, 2):
            runs.append(
                record(
                    folder / f"{strategy}-{policy}-{seed}",
                    {"strategy": strategy, "balancing": policy, "model": "convnet", "data": "digits"},
                    speed=speed * (1 + 0.012 * (seed - 1) * (1 if policy == "profiled" else -1)),
                    seed=seed,
                    emulated=emulated,
                    shares=shares,
                    later=later,
                    parts=parts,
                    predicted=0.9 + 0.04 * len(policy) / 2,
                    energy=tuple(9.0 * share for share in shares),
                    outrun=outrun if strategy == "pipeline" else None,
                )
            )
    if failed:
        runs.append(
            record(
                folder / "broken",
                {"strategy": "ddp", "balancing": "manual", "model": "convnet", "data": "digits"},
                speed=1.0,
                emulated=emulated,
                status="failed",
                error="rank 1 (Arc A770): RuntimeError: <b>out of memory</b>",
                overrides=("strategy=ddp", "balancing=manual", "balancing.weights=[0.99,0.01]"),
            )
        )
    found = compare(runs, "compare_strategies")
    return replace(found, curve=weights(emulated), profiles=profiles(emulated))


def weights(emulated: bool = True) -> WeightsCurve:
    """Return a curve whose optimum lies beside the equal split."""
    points = []
    for share in (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        speed = 1.0 / max(share / 62_000.0, (1 - share) / 31_000.0)
        measured = interval([speed * 0.93, speed * 0.95, speed * 0.96])
        assert measured is not None
        points.append(CurvePoint(share, measured, f"[{share:g},{1 - share:.2g}]"))
    model = [(s / 50, 1.0 / max(s / 50 / 62_000.0, (1 - s / 50) / 31_000.0)) for s in range(1, 50)]
    name = "emulated:0 · RTX 3090 (emulated)" if emulated else "cuda:0 · RTX 3090"
    best = max(points, key=lambda point: point.samples_per_second.mean)
    return WeightsCurve(name, tuple(points), best.share, best.samples_per_second.mean, tuple(model), 0.667)


def profiles(emulated: bool = True) -> tuple[DeviceProfile, ...]:
    """Return what a calibration measured of two cards."""
    sizes = (4, 8, 16, 32, 64)
    found = []
    for place, (fixed, each) in enumerate(((20e-6, 16e-6), (35e-6, 32e-6))):
        name = (
            f"emulated:{place} · {CARDS[place]} (emulated)" if emulated else f"cuda:{place} · {CARDS[place]}"
        )
        measured = tuple(fixed + each * n * (1 + 0.02 * (-1) ** n) for n in sizes)
        found.append(DeviceProfile(name, emulated, sizes, measured, fixed, each, 1.0 / (1 + place)))
    return tuple(found)


def many(folder: Path, count: int = 100, seeds: int = 2, steps: int = 1000) -> Comparison:
    """Return the comparison of so many variants, as a search over weights and batch sizes leaves them."""
    runs = [
        record(
            folder / f"{place}-{seed}",
            {"strategy": "ddp", "balancing": "manual", "model": "convnet", "data": "digits"},
            speed=50_000.0 + 400 * ((place * 37) % count) + 100 * seed,
            seed=seed,
            steps=steps,
            shares=(0.2 + 0.6 * place / count, 0.8 - 0.6 * place / count),
            overrides=(
                f"balancing.weights=[{0.2 + 0.6 * place / count:.4f},{0.8 - 0.6 * place / count:.4f}]",
                f"trainer.global_batch_size={64 + place}",
            ),
        )
        for place in range(count)
        for seed in range(seeds)
    ]
    return compare(runs, "weights_search")
