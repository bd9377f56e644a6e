"""Balancing on real cards: predicted against measured, the ceiling against what was reached, who takes part.

The step time of a run is the median over its log windows but the first two.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchlib.runs import Run, start
from benchlib.tables import figure, row

from balance_bench.page import percentile
from hetexp.core.cost.calibration import DeviceCalibration, Exchange, joint_seconds
from hetexp.hardware.links import links_of

MODEL = (
    *("model=gpt", "model.num_layers=12", "model.num_heads=16", "model.embedding_size=1024"),
    *("data=text", "data.sequence_length=512"),
    *("trainer.drop_last=true", "trainer.precision=bfloat16", "trainer.max_epochs=null"),
    *("trainer.log_every=4", "hardware.check_memory=false", "launch.start_method=forkserver", "logger=none"),
)
WITH_CPU = (
    *("trainer.precision=auto", "model.num_layers=6", "model.num_heads=6", "model.embedding_size=384"),
)
"""A smaller model: the large one takes the CPU seconds a sample. Each device has its own precision."""
PROFILED = ("balancing=profiled", "balancing.recalibrate=true")
TOTAL = 256
SPLITS = (250, 244, 238, 230, 220, 212, 204, 196, 180, 160, 140, 128)
"""Of 256 samples, those of the first card."""
STEPS, FEW_STEPS = 28, 12
HEAD = ["run", "samples a step", "step, ms", "samples/s", "predicted, ms", "ceiling", "reached of it"]


def step_seconds(run: Run) -> float:
    """Return the median step of a run that has settled."""
    return float(statistics.median([window["step_seconds"] for window in run.rows][2:]))


class Bench:
    """Runs on equal cards, of which the last ones may be slowed, and the tables of what they gave.

    Args:
        slow: how many times slower than they are the last cards become (`slow:`).
    """

    def __init__(self, folder: Path, gpus: int, slow: Sequence[float]) -> None:
        names = [f"cuda:{index}" for index in range(gpus)]
        self.all = f"hardware.devices=[{','.join(names)}]"
        usual = gpus - len(slow)
        slower = [f"{{device:'{n}',slow:{factor:g}}}" for n, factor in zip(names[usual:], slow, strict=True)]
        self.slowed = f"hardware.devices=[{','.join([*names[:usual], *slower])}]"
        self.slow = slow
        self._folder = folder
        self.lines: list[str] = []
        self._profiled: Run | None = None

    def run(self, *overrides: str, steps: int = STEPS) -> Run:
        """Train with these devices and this policy."""
        lengths = (f"trainer.max_steps={steps}", f"trainer.global_batch_size={TOTAL}")
        return start(self._folder, [*MODEL, *lengths, *overrides])

    def say(self, *lines: str) -> None:
        """Print lines, and keep them for the page."""
        print("\n".join(lines), flush=True)
        self.lines += lines

    def head(self, names: Sequence[str] = HEAD) -> None:
        """Begin a table."""
        self.say("", row(names), "|" + "---|" * len(names))

    def row(self, name: str, *overrides: str, steps: int = STEPS) -> Run:
        """Run, and add a line to the table."""
        run = self.run(*overrides, steps=steps)
        step, predicted = step_seconds(run), run.summary["predicted_step_s"]
        reached = predicted / step if predicted is not None else None
        split = " / ".join(f"{device['id']} {device['local_batch']}" for device in run.summary["devices"])
        cells = [name, split, f"{1000 * step:.1f}", f"{TOTAL / step:,.0f}", figure(predicted, ".1f", 1000)]
        self.say(row([*cells, figure(run.summary["ceiling"], ".3g"), figure(reached, ".3g")]))
        return run

    def slowed_part(self) -> None:
        """Some cards are slower: what is chosen, and what that reaches."""
        self.say("", f"The last {len(self.slow)} of the cards slower by {list(self.slow)}:")
        self.head()
        self.row("first card alone", "hardware.devices=[cuda:0]", "balancing=equal")
        self.row("equal shares", self.slowed, "balancing=equal")
        self._profiled = self.row("profiled", self.slowed, *PROFILED)
        adaptive = ("balancing=adaptive", "balancing.recalibrate=true")
        self.row("adaptive, no calibration", self.slowed, *adaptive)
        self.say(*(f"· {reason}" for reason in self._profiled.plan.reasons[:3]))

    def splits_part(self) -> None:
        """Splits that were not measured: predicted against measured."""
        plan = (self._profiled or self.run(self.slowed, *PROFILED)).plan
        if plan.calibration is None or plan.world_size != 2:
            self.say("Not two cards took part: no splits to predict.")
            return
        devices = [DeviceCalibration.from_dict(device) for device in plan.calibration["devices"]]
        exchange = Exchange.from_dict(plan.calibration["exchange"])
        links = links_of(plan, measured=exchange.measured)
        errors = []
        self.head(["samples a step", "predicted, ms", "measured, ms", "error"])
        for first in SPLITS:
            counts = (first, TOTAL - first)
            predicted = joint_seconds(devices, counts, links, exchange)
            weights = f"balancing.weights=[{counts[0]},{counts[1]}]"
            measured = step_seconds(self.run(self.slowed, "balancing=manual", weights, steps=20))
            error = predicted / measured - 1
            errors.append(abs(error))
            split = f"{counts[0]} / {counts[1]}"
            self.say(row([split, f"{1000 * predicted:.1f}", f"{1000 * measured:.1f}", f"{error:+.1%}"]))
        spread = f"median {statistics.median(errors):.1%}, p95 {percentile(sorted(errors), 0.95):.1%}"
        self.say(f"Error of {len(errors)} splits: {spread}.")

    def equal_part(self) -> None:
        """The cards as they are."""
        self.head()
        self.row("one card", "hardware.devices=[cuda:0]", "balancing=equal")
        self.row("all, equal", self.all, "balancing=equal")
        self.row("all, profiled", self.all, *PROFILED)

    def cpu_part(self) -> None:
        """A card and the CPU, alone and together: whether the CPU takes part, and what each choice takes."""
        self.head()
        both, manual = ("hardware.devices=[cuda:0,cpu]", *WITH_CPU), "balancing=manual"
        self.row("card alone", "hardware.devices=[cuda:0]", "balancing=equal", *WITH_CPU)
        self.row("CPU alone", "hardware=cpu", "balancing=equal", *WITH_CPU, steps=FEW_STEPS)
        self.row("card and CPU, equal", *both, "balancing=equal", steps=FEW_STEPS)
        profiled = self.row("card and CPU, profiled", *both, *PROFILED)
        self.row("card and CPU, none left out", *both, *PROFILED, "balancing.drop_slower=false")
        one = f"balancing.weights=[{TOTAL - 1},1]"
        self.row("card and CPU, one sample for the CPU", *both, manual, one, steps=FEW_STEPS)
        self.say(*(f"· {reason}" for reason in profiled.plan.reasons[:2]))
