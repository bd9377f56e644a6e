"""Fidelity of the emulation: what was paced against the cost model, and what a proportional split gains.

    python scripts/bench_emulation.py [--steps 31] [--output table.md] [--only gpt/nvidia_arc]

Each row is one run. Compute and link times are medians over its passes on the worst device, samples/s the
median over its steps; the model is the catalogue's figures through `hetexp.core.cost.step`.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from hetexp.app import compose_config, run
from hetexp.plan.run_spec import Request

MODELS = {
    "mlp": ["model=mlp", "model.hidden_sizes=[256,256]", "data=digits"],
    "convnet": ["model=convnet", "data=digits"],
    "gpt": [
        "model=gpt",
        "model.num_layers=2",
        "model.num_heads=2",
        "model.embedding_size=64",
        "data=text",
        "data.sequence_length=32",
    ],
}
MIXES = {
    "2: nvidia_arc": (["hardware=nvidia_arc"], 0.8, 64),
    "3: nvidia_amd_arc": (["hardware=nvidia_amd_arc"], 1.6, 96),
    "8: eight_mixed": (["hardware=eight_mixed"], 2.5, 256),
}
"""Name → overrides, seconds that a step should take at least, global batch."""
COMMON = [
    "trainer.max_epochs=null",
    "trainer.log_every=1",
    "hardware.threads_per_rank=1",
    "launch.start_method=forkserver",
    "logger=none",
]


def start(folder: Path, overrides: list[str]) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Run once; return the summary, what the emulation says of itself, and the seconds of each step."""
    cfg = compose_config([*COMMON, *overrides])
    summary = run(cfg, Request(folder, Path.cwd(), overrides=tuple(overrides)), Console(file=io.StringIO()))
    emulation = json.loads((folder / "emulation.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return summary, emulation, [row["step_seconds"] for row in rows if "step_seconds" in row]


def scale_for(folder: Path, overrides: list[str], step_seconds: float) -> float:
    """Return the time scale at which a step takes at least so long and no pace is outrun."""
    _, emulation, _ = start(folder, [*overrides, "trainer.max_steps=2"])
    found, predicted = emulation["time_scale"], emulation["predicted_step_s"]
    return float(max(found, step_seconds / (predicted / found)))


def fidelity(folder: Path, name: str, mix: str, steps: int) -> str:
    """Measure one model on one mix; return a row of the table."""
    hardware, target, batch = MIXES[mix]
    overrides = [*MODELS[name], *hardware, f"trainer.global_batch_size={batch}"]
    scale = scale_for(folder / "scale", overrides, target)
    timed = [*overrides, f"hardware.time_scale={scale}", f"trainer.max_steps={steps}"]
    summary, emulation, seconds = start(folder / "run", timed)
    step = statistics.median(seconds[1:])

    def worst(*phases: str) -> float:
        """Real ÷ modelled seconds of these phases together, on the device where it is furthest from 1."""
        ratios: list[float] = []
        for device in emulation["devices"]:
            found = [device["phases"][phase] for phase in phases]
            ratios.append(sum(p["real"] for p in found) / sum(p["modelled"] for p in found))
        return max(ratios, key=lambda ratio: abs(ratio - 1.0))

    predicted = summary["predicted_step_s"]
    return (
        f"| {name} | {mix} | {scale:,.0f} | {worst('forward', 'backward') - 1:+.2%} | "
        f"{worst('exchange') - 1:+.2%} | {batch / predicted:,.1f} | {batch / step:,.1f} | "
        f"{predicted / step - 1:+.2%} | {step:.2f} | {'yes' if summary['valid'] else 'NO'} |"
    )


def gain(folder: Path, steps: int) -> str:
    """Measure the gain of a proportional split over the equal one, against what the model allows."""
    hardware = ["hardware.devices=[emulated:rtx_3090,emulated:arc_a770]", *MODELS["gpt"]]
    overrides = [*hardware, "trainer.global_batch_size=256"]
    scale = scale_for(folder / "scale", overrides, 0.8)
    timed = [*overrides, f"hardware.time_scale={scale}", f"trainer.max_steps={steps}"]
    equal, emulation, equal_seconds = start(folder / "equal", timed)
    speeds = [1.0 / (sum(d["work"]["forward"]) + sum(d["work"]["backward"])) for d in emulation["devices"]]
    split = [*timed, "balancing=manual", f"balancing.weights={speeds}"]
    weighted, _, weighted_seconds = start(folder / "weighted", split)
    measured = statistics.median(equal_seconds[1:]) / statistics.median(weighted_seconds[1:])
    allowed = equal["predicted_step_s"] / weighted["predicted_step_s"]
    shares = " / ".join(str(device["local_batch"]) for device in weighted["devices"])
    return (
        f"Proportional split {shares} against equal: {measured:.3f}× measured, {allowed:.3f}× allowed by the "
        f"model ({(measured - 1) / (allowed - 1):.3f} of the possible gain)."
    )


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=31)
    parser.add_argument("--only", default="", help="model/mix, parts of their names")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    model, _, wanted = arguments.only.partition("/")
    lines = [
        "| model | cards | time × | compute | links | samples/s, model | measured | off | step, s | valid |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        for mix in MIXES:
            for name in MODELS:
                if model in name and wanted in mix:
                    folder = Path(temporary, f"{name}-{mix[0]}")
                    lines.append(fidelity(folder, name, mix, arguments.steps))
                    print(lines[-1], flush=True)
        if not arguments.only:
            lines += ["", gain(Path(temporary, "gain"), arguments.steps)]
    table = "\n".join(lines)
    print(table)
    if arguments.output is not None:
        arguments.output.write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
