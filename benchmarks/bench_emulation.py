"""Fidelity of the emulation: what was paced against the cost model, and what a proportional split gains.

    python benchmarks/bench_emulation.py [--steps 31] [--output table.md] [--only gpt/nvidia_arc]

Each row is one run. Compute and link times are medians over its passes on the worst device, samples/s the
median over its steps; the model is the catalogue's figures through `hetexp.core.cost.step`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

from benchlib.options import parser_of
from benchlib.runs import Run
from benchlib.runs import start as start_run
from benchlib.tables import row, table

HEAD = [
    "model",
    "cards",
    "time ×",
    "compute",
    "links",
    "samples/s, model",
    "measured",
    "off",
    "step, s",
    "valid",
]
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
    "strategy=ddp",
    "balancing=equal",
    "trainer.max_epochs=null",
    "trainer.log_every=1",
    "hardware.threads_per_rank=1",
    "launch.start_method=forkserver",
    "logger=none",
]


def start(folder: Path, overrides: list[str]) -> Run:
    """Run once."""
    return start_run(folder, [*COMMON, *overrides])


def median_step(run: Run) -> float:
    """Return the median seconds of the steps after the first."""
    return float(statistics.median(row["step_seconds"] for row in run.rows[1:]))


def scale_for(folder: Path, overrides: list[str], step_seconds: float) -> float:
    """Return the time scale at which a step takes at least so long and this machine keeps each pace."""
    emulation = start(folder, [*overrides, "trainer.max_steps=2"]).emulation
    found, predicted = emulation["time_scale"], emulation["predicted_step_s"]
    return float(max(found, step_seconds / (predicted / found)))


def fidelity(folder: Path, name: str, mix: str, steps: int) -> list[str]:
    """Measure one model on one mix; return a row of the table."""
    hardware, target, batch = MIXES[mix]
    overrides = [*MODELS[name], *hardware, f"trainer.global_batch_size={batch}"]
    scale = scale_for(folder, overrides, target)
    run = start(folder, [*overrides, f"hardware.time_scale={scale}", f"trainer.max_steps={steps}"])
    step, predicted = median_step(run), run.summary["predicted_step_s"]

    def worst(*phases: str) -> float:
        """Real ÷ modelled seconds of these phases together, on the device on which it is furthest from 1."""
        ratios: list[float] = []
        for device in run.emulation["devices"]:
            found = [device["phases"][phase] for phase in phases]
            ratios.append(sum(p["real"] for p in found) / sum(p["modelled"] for p in found))
        return max(ratios, key=lambda ratio: abs(ratio - 1.0))

    off = [f"{worst('forward', 'backward') - 1:+.2%}", f"{worst('exchange') - 1:+.2%}"]
    speeds = [f"{batch / predicted:,.1f}", f"{batch / step:,.1f}", f"{predicted / step - 1:+.2%}"]
    return [name, mix, f"{scale:,.0f}", *off, *speeds, f"{step:.2f}", "yes" if run.summary["valid"] else "NO"]


def gain(folder: Path, steps: int) -> str:
    """Measure the gain of a proportional split over the equal one, against what the model allows."""
    hardware = ["hardware.devices=[emulated:rtx_3090,emulated:arc_a770]", *MODELS["gpt"]]
    overrides = [*hardware, "trainer.global_batch_size=256"]
    scale = scale_for(folder, overrides, 0.8)
    timed = [*overrides, f"hardware.time_scale={scale}", f"trainer.max_steps={steps}"]
    equal = start(folder, timed)
    works = [device["work"] for device in equal.emulation["devices"]]
    speeds = [1.0 / (sum(work["forward"]) + sum(work["backward"])) for work in works]
    weighted = start(folder, [*timed, "balancing=manual", f"balancing.weights={speeds}"])
    measured = median_step(equal) / median_step(weighted)
    allowed = equal.summary["predicted_step_s"] / weighted.summary["predicted_step_s"]
    shares = " / ".join(str(device["local_batch"]) for device in weighted.summary["devices"])
    return (
        f"Proportional split {shares} against equal: {measured:.3f}× measured, {allowed:.3f}× allowed by the "
        f"model ({(measured - 1) / (allowed - 1):.3f} of the possible gain)."
    )


def main() -> None:
    """Measure and print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=31)
    parser.add_argument("--only", default="", help="model/mix, parts of their names")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    model, _, wanted = arguments.only.partition("/")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for mix in MIXES:
            for name in MODELS:
                if model in name and wanted in mix:
                    rows.append(fidelity(folder, name, mix, arguments.steps))
                    print(row(rows[-1]), flush=True)
        text = table(HEAD, rows)
        if not arguments.only:
            text += f"\n\n{gain(folder, arguments.steps)}"
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
