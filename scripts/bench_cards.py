"""All that is asked of equal cards of one host, in one call: scaling, unequal speeds, stages, a loss.

    python scripts/bench_cards.py --gpus 4 --out cards
    python scripts/bench_cards.py --gpus 2 --parts slowed,splits,equal,cpu
    python scripts/bench_cards.py --device cpu --gpus 4 --tiny --parts stages,loss

`scaling`: `bench_scaling.py` with both models and the plain script beside, on 1, 2, 4 … cards.
`slowed`: balancing with the last cards made slower by the factors of `--slow`; `splits`: splits of two such
cards that were not measured, predicted and measured; `equal`: all cards as they are; `cpu`: one card and the
CPU, alone and together.
`stages`: a GPT in float32 on one device, in a pipeline over all, and in two pipelines of half of them each:
losses against the one device's, and the bubble beside the one that the schedule has with the measured passes.
`loss`: one of the devices is killed in mid-run, once with the vendor's library and once with shared memory:
what that cost, and whether the losses are those of a run without it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bench_scaling
from balance_bench.cards import Bench
from benchlib.options import names_of, parser_of
from benchlib.runs import Run, keep, start
from benchlib.tables import figure, table
from ddp_bench.task import GPT_124M, TINY, words_of
from strategy_bench.measure import bubble

BALANCING = ("slowed", "splits", "equal", "cpu")
PARTS = ("scaling", *BALANCING, "stages", "loss")
USUAL = ("scaling", "slowed", "equal", "stages", "loss")
STEPS = 20
MICROBATCHES = 4
"""For each stage of a pipeline."""
LOSS_STEPS, DEATH_STEP = 60, 25


@dataclass(frozen=True)
class Cards:
    """What the parts run on."""

    count: int
    backend: str
    tiny: bool
    folder: Path

    def run(self, *overrides: str, steps: int, count: int | None = None) -> Run:
        """Train the GPT in float32 on the first so many devices."""
        count = self.count if count is None else count
        on_card = self.backend == "cuda"
        devices = ",".join(f"cuda:{index}" if on_card else "cpu" for index in range(count))
        task = replace(TINY, num_layers=self.count) if self.tiny else GPT_124M
        words = words_of(task, self.batch, steps, "float32")
        return start(
            self.folder,
            [
                *(word for word in words if not word.startswith("trainer.fast_dev_run")),
                "trainer.max_epochs=null",
                f"trainer.max_steps={steps}",
                "trainer.log_every=1",
                "trainer.checkpoint_every=10",
                "trainer.keep_last=1",
                "monitor=none",
                f"hardware.devices=[{devices}]",
                f"launch.start_method={'subprocess' if on_card else 'forkserver'}",
                *([] if on_card else ["hardware.threads_per_rank=1"]),
                "balancing=equal",
                *overrides,
            ],
        )

    @property
    def batch(self) -> int:
        """Samples of a step: whole microbatches of one sample or more for every layout."""
        return MICROBATCHES * self.count * (1 if self.tiny else 2)


def stages(cards: Cards) -> dict[str, Any]:
    """One device, a pipeline over all of them, and two pipelines over half of them each."""
    half = cards.count // 2
    groups = [list(range(half)), list(range(half, 2 * half))]
    layouts: dict[str, tuple[tuple[str, ...], int]] = {
        "one device": ((), 1),
        f"pipeline of {cards.count}": (
            ("strategy=pipeline", f"strategy.num_microbatches={MICROBATCHES * cards.count}"),
            cards.count,
        ),
    }
    if half > 1:
        hybrid = (
            "strategy=hybrid",
            f"strategy.groups={json.dumps(groups, separators=(',', ':'))}",
            f"strategy.num_microbatches={MICROBATCHES * half}",
        )
        layouts[f"2 pipelines of {half}"] = (hybrid, 2 * half)
    found: dict[str, Any] = {}
    for name, (words, count) in layouts.items():
        run = cards.run(*(words or ("strategy=single",)), steps=STEPS, count=count)
        found[name] = {
            "losses": losses(run),
            "step_s": run.step_seconds(STEPS // 4),
            "bubble": bubble(run),
            "bubbles": [one["bubble"] for one in run.summary["pipeline"] or []],
        }
        print(f"{name}: {1e3 * found[name]['step_s']:.1f} ms a step", flush=True)
    return found


def stages_page(found: dict[str, Any]) -> str:
    """Return the table of `stages`."""
    reference = found["one device"]["losses"]
    rows = []
    for name, layout in found.items():
        played = layout["bubble"] or {"simulated": None, "step_ratio": None}
        cells = [name, f"{1e3 * layout['step_s']:.1f}", f"{worst(layout['losses'], reference):.1e}"]
        cells.append(" / ".join(f"{share:.1%}" for share in layout["bubbles"]) or "–")
        rows.append([*cells, figure(played["simulated"], ".1%"), figure(played["step_ratio"], ".3f")])
    head = ["", "step, ms", "losses differ by", "bubble, measured", "bubble, simulated", "step ÷ simulated"]
    return table(head, rows)


def loss(cards: Cards) -> dict[str, Any]:
    """The last device is killed once; without it the same batch is done by the others, until it is back."""
    found: dict[str, Any] = {}
    event = f"{{kind: death, device: '{last_device(cards)}', at_step: {DEATH_STEP}}}"
    for exchange in ("native", "shm") if cards.backend == "cuda" else ("gloo", "shm"):
        words = ("strategy=ddp", f"comm={exchange}")
        undisturbed = cards.run(*words, steps=LOSS_STEPS)
        hurt = cards.run(*words, f"fault.events=[{event}]", steps=LOSS_STEPS)
        steps = [row["step_seconds"] for row in hurt.rows]
        found[exchange] = {
            "status": hurt.summary["status"],
            "failures": hurt.summary["failures"],
            "losses": losses(hurt),
            "undisturbed": losses(undisturbed),
            "step_s": undisturbed.step_seconds(LOSS_STEPS // 4),
            "longest_step_s": max(steps[DEATH_STEP - 2 :]),
        }
        print(f"{exchange}: {found[exchange]['failures']}", flush=True)
    return found


def loss_page(found: dict[str, Any]) -> str:
    """Return the table of `loss`."""
    rows = []
    for exchange, one in found.items():
        (failure, *others) = one["failures"] or [{"recovered_s": float("nan"), "steps_lost": -1}]
        cells = [f"`{exchange}`", one["status"], f"{failure['recovered_s']:.2f}", str(failure["steps_lost"])]
        off = f"{worst(one['losses'], one['undisturbed']):.1e}"
        rows.append([*cells, f"{1e3 * one['step_s']:.1f}", off, str(len(others))])
    head = ["exchange", "ended", "recovered, s", "steps lost", "step, ms", "losses differ by", "other losses"]
    return table(head, rows)


def last_device(cards: Cards) -> str:
    """Return the last device's name; the first CPU is `cpu`, more are numbered."""
    last = cards.count - 1
    return f"cuda:{last}" if cards.backend == "cuda" else f"cpu:{last}"


def losses(run: Run) -> dict[int, float]:
    """Return each step's loss; of a step that was logged twice, the last one."""
    return {row["step"]: row["train/loss"] for row in run.rows}


def worst(one: dict[int, float], other: dict[int, float]) -> float:
    """Return the largest relative difference; infinite where a step is missing."""
    if one.keys() != other.keys():
        return float("inf")
    return max(abs(one[step] - other[step]) / abs(other[step]) for step in one)


def counts(gpus: int) -> str:
    """Return 1, 2, 4 … up to all, as `--counts` has them."""
    powers = [2**power for power in range(gpus.bit_length()) if 2**power < gpus]
    return ",".join(map(str, [*powers, gpus]))


def main(given: list[str] | None = None) -> None:
    """Run the chosen parts, and print their tables."""
    arguments = arguments_of(given)

    def out(name: str) -> Path | None:
        return arguments.out / name if arguments.out is not None else None

    if "scaling" in arguments.parts:
        words = ["--gpus", str(arguments.gpus), "--counts", counts(arguments.gpus), "--models", "gpt,convnet"]
        words += ["--device", arguments.device, "--plain", "--rounds", str(arguments.rounds)]
        words += ["--tiny"] if arguments.tiny else ["--steps", str(arguments.steps), "--warm-steps", "10"]
        bench_scaling.main([*words, *(["--out", str(out("scaling.json"))] if arguments.out else [])])
    with tempfile.TemporaryDirectory(prefix="bench_cards_") as temporary:
        bench = Bench(Path(temporary), arguments.gpus, arguments.slow)
        balancing = (bench.slowed_part, bench.splits_part, bench.equal_part, bench.cpu_part)
        for name, part in zip(BALANCING, balancing, strict=True):
            if name in arguments.parts:
                part()
        if bench.lines and (page := out("balancing.md")) is not None:
            page.write_text("\n".join(bench.lines) + "\n", encoding="utf-8")
        cards = Cards(arguments.gpus, arguments.device, arguments.tiny, Path(temporary))
        for name, measure, page_of in (("stages", stages, stages_page), ("loss", loss, loss_page)):
            if name in arguments.parts:
                found = measure(cards)
                print(f"\n{page_of(found)}\n", flush=True)
                keep(out(f"{name}.json"), found)


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", type=names_of(PARTS), default=list(USUAL), help=", ".join(PARTS))
    parser.add_argument("--slow", type=lambda text: [float(n) for n in text.split(",")], help="2.7, or 2,4")
    parser.add_argument("--tiny", action="store_true", help="models of no use: whether it works, no figures")
    parser.add_argument("--rounds", type=int, default=2, help="of scaling")
    parser.add_argument("--steps", type=int, default=40, help="of scaling")
    parser.add_argument("--out", type=Path, help="folder for what was measured")
    arguments = parser.parse_args(given)
    if arguments.gpus < 2:
        parser.error(f"--gpus must be at least 2, but is {arguments.gpus}")
    if arguments.slow is None:
        arguments.slow = [2.7] if arguments.gpus == 2 else [2.0, 4.0]
    if not len(arguments.slow) < arguments.gpus:
        parser.error(f"--slow must leave one of --gpus as it is, but has {len(arguments.slow)} factors")
    balancing = [name for name in BALANCING if name in arguments.parts]
    if arguments.device != "cuda" and balancing:
        parser.error(f"{', '.join(balancing)} need NVIDIA cards: --device must be cuda")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


if __name__ == "__main__":
    main()
