"""What a report says of real runs, held against a recomputation from their raw logs and plans.

Summary and report are never read for what is expected here; the arithmetic is this file's own.

A log line's `step_seconds` is the mean over the steps since the line before, so that steps × mean gives back
the window's seconds, and these added up are what the summary divides by: both sides are sums of the same
floats in another order, and differ by rounding alone (1e-12). Text is rounded to four digits, gains and
efficiencies to three.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from bench_report import make_sweep
from rich.console import Console

from hetexp.app import compose_config, run
from hetexp.plan.run_spec import Request
from hetexp.report.comparison import compare
from hetexp.report.curves import points
from hetexp.report.markdown import render as as_markdown
from hetexp.report.results import Comparison, Variant
from hetexp.report.runs import read_runs
from hetexp.report.write import write_files

CARDS = """
cards:
  fast:
    name: Fast
    vendor: nvidia
    memory_gib: 8
    tflops: {float32: 6.0e-6}
    bandwidth_gb_per_second: 300
    link: pcie4x16
  slow:
    name: Slow
    vendor: intel
    memory_gib: 8
    tflops: {float32: 2.0e-6}
    bandwidth_gb_per_second: 100
    link: pcie4x16
"""
COMMON = (
    "model=mlp",
    "model.hidden_sizes=[16]",
    "data=synthetic",
    "data.num_samples=320",  # the last batch of an epoch is short
    "data.num_test_samples=32",
    "trainer.global_batch_size=128",
    "trainer.max_epochs=null",
    "trainer.log_every=2",
    "trainer.eval_every=4",
    "launch.start_method=forkserver",
    "hardware.threads_per_rank=1",
    "logger=none",
)
BOTH = ("hardware.devices=[emulated:fast,emulated:slow]", "strategy=ddp")
SEED = ("trainer.seed=0", "trainer.seed=1")
RUNS = {"equal": (0, 1), "manual": (0,), "alone": (0,)}
"""Seeds of each variant that is compared."""
ROUNDING = 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train runs of several variants, seeds, scales and devices.

    Whether this machine kept the emulated devices' pace is not tested here: all runs are taken for valid.
    """
    folder = tmp_path_factory.mktemp("report")
    cards = folder / "cards.yaml"
    cards.write_text(CARDS)

    def start(name: str, *words: str) -> None:
        typed = (*COMMON, f"hardware.catalogue={cards}", *words)
        request = Request(folder / "runs" / name, Path.cwd(), overrides=typed)
        summary = run(compose_config(list(typed)), request, Console(file=io.StringIO()))
        valid = summary | {"valid": True, "invalid_reason": None}
        (request.run_dir / "summary.json").write_text(json.dumps(valid))

    steps = "trainer.max_steps=5"
    # The scales differ: what is compared must not.
    for seed in (0, 1):
        start(
            f"equal_{seed}",
            *BOTH,
            "balancing=equal",
            f"hardware.time_scale={1 + seed / 2}",
            steps,
            SEED[seed],
        )
    weights = ("balancing=manual", "balancing.weights=[3,1]", "hardware.time_scale=1.2")
    start("manual_0", *BOTH, *weights, steps, SEED[0])
    alone = ("hardware.devices=[emulated:fast]", "strategy=single", "balancing=equal")
    start("alone_0", *alone, "hardware.time_scale=1", steps, SEED[0])
    slow = "+fault.events=[{kind:slow,device:emulated:0,at_step:0,factor:2.0}]"
    measured = ("balancing=profiled", "balancing.drop_slower=false", "hardware.time_scale=1", slow)
    start("profiled_0", *BOTH, *measured, steps, SEED[0])
    return folder / "runs"


class Raw:
    """A run's log and plan, and what follows from them."""

    def __init__(self, folder: Path) -> None:
        self.plan = json.loads((folder / "plan.json").read_text())
        self.lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.scale = self.plan["config"]["hardware"]["time_scale"]
        self.windows: list[tuple[int, int, int, float, dict[str, Any]]] = []
        """(last step, steps, samples of all until then, modelled seconds until then, line)"""
        step, samples, seconds = 0, 0, 0.0
        for line in self.lines:
            if "step_seconds" not in line:
                continue
            steps = line["step"] - step
            seconds += steps * line["step_seconds"] / self.scale
            step, samples = line["step"], line["train/samples"]
            self.windows.append((step, steps, samples, seconds, line))
        self.steps, self.samples, self.seconds = step, samples, seconds

    @property
    def settled(self) -> tuple[int, int, float]:
        """Steps, samples and seconds after the first line: libraries start in the steps before it."""
        _, steps, samples, seconds, _ = self.windows[0]
        return self.steps - steps, self.samples - samples, self.seconds - seconds

    @property
    def throughput(self) -> float:
        _, samples, seconds = self.settled
        return samples / seconds

    @property
    def step_seconds(self) -> float:
        steps, _, seconds = self.settled
        return seconds / steps

    def share(self, device: str) -> float:
        """Return what a device took of all samples: its share of each window, by the window's samples."""
        before, taken = 0, 0.0
        for _, _, samples, _, line in self.windows:
            taken += line[f"device/{device}/share"] * (samples - before)
            before = samples
        return taken / self.samples

    def speed(self, device: str) -> float:
        """Return a device's samples ÷ the seconds in which it computed, modelled."""
        before, samples, seconds = self.windows[0][2], 0.0, 0.0
        for _, _, until, _, line in self.windows[1:]:
            own = line[f"device/{device}/share"] * (until - before)
            samples, seconds = samples + own, seconds + own / line[f"device/{device}/samples_per_second"]
            before = until
        return float(samples / seconds * self.scale)


def raws(folder: Path, name: str) -> list[Raw]:
    return [Raw(folder / f"{name}_{seed}") for seed in RUNS[name]]


def around(values: list[float]) -> tuple[float, ...]:
    """Return mean and bounds of one or two values: Student's t of one degree of freedom is Cauchy's."""
    if len(values) == 1:
        return (values[0],)
    mean = sum(values) / 2
    half = math.tan(math.pi * (0.975 - 0.5)) * abs(values[0] - values[1]) / 2
    return mean, mean - half, mean + half


def told(value: Any) -> tuple[float, ...]:
    return tuple(one for one in (value.mean, value.low, value.high) if one is not None)


def near(value: Any) -> Any:
    return pytest.approx(value, rel=ROUNDING)


def variant(found: Comparison, balancing: str, strategy: str = "ddp") -> Variant:
    settings = {"balancing": balancing, "strategy": strategy}
    (one,) = [v for v in found.variants if settings.items() <= v.settings.items()]
    return one


def tables(text: str) -> list[list[dict[str, str]]]:
    """Return the tables of a report as text, by their headers."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *rows = [line.strip("|").split("|") for line in block.splitlines()]
        names = [cell.strip() for cell in header]
        found.append([dict(zip(names, map(str.strip, row), strict=True)) for row in rows])
    return found


def printed(cell: str) -> float:
    return float(cell.partition(" ")[0].replace(",", ""))


def five_steps(folder: Path) -> list[Path]:
    return [folder / f"{name}_{seed}" for name, seeds in RUNS.items() for seed in seeds]


def test_figures_of_variants_are_those_of_the_logs(folder: Path) -> None:
    found = compare(read_runs(five_steps(folder)), "Five steps")
    assert len(found.variants) == 3
    alone = raws(folder, "alone")
    equal = raws(folder, "equal")
    for balancing, strategy, name in (
        ("equal", "ddp", "equal"),
        ("manual", "ddp", "manual"),
        ("equal", "single", "alone"),
    ):
        one, own = variant(found, balancing, strategy), raws(folder, name)
        assert one.samples_per_second is not None
        assert one.step_seconds is not None
        assert told(one.samples_per_second) == near(around([run.throughput for run in own]))
        assert told(one.step_seconds) == near(around([run.step_seconds for run in own]))
        assert all(run.steps == 5 and run.samples == 128 + 128 + 64 + 128 + 128 for run in own)
        # Gains, pair by pair: seed by seed, geometric, bounds of the logarithms.
        for gain, base in ((one.gain_over_single, alone), (one.gain_over_equal, equal)):
            if strategy == "single" and base is equal:
                assert gain is None  # one device has nothing to split
                continue
            assert gain is not None
            pairs = zip(own, base, strict=False)  # the first seed is in all, the second in some
            ratios = [a.throughput / b.throughput for a, b in pairs]
            bounds = around([math.log(ratio) for ratio in ratios])
            assert told(gain) == near(tuple(map(math.exp, bounds)))
            assert gain.mean == near(statistics.geometric_mean(ratios))
        last = [[line for line in run.lines if "train/loss" in line][-1]["train/loss"] for run in own]
        judged = [[line for line in run.lines if "eval/loss" in line][-1]["eval/loss"] for run in own]
        assert one.train_loss is not None
        assert one.eval_loss is not None
        assert told(one.train_loss) == near(around(last))
        assert told(one.eval_loss) == near(around(judged))
    best = max(found.variants, key=lambda one: one.samples_per_second.mean if one.samples_per_second else 0)
    assert found.best is best
    assert found.single_samples_per_second == near(statistics.fmean(run.throughput for run in alone))


def test_curves_are_those_of_the_logs(folder: Path) -> None:
    for path in five_steps(folder):
        (record,) = read_runs([path])
        raw = Raw(path)
        trained = [point for point in points(record) if point.train_loss is not None]
        assert [point.step for point in trained] == [window[0] for window in raw.windows]
        for point, (_, _, samples, seconds, line) in zip(trained, raw.windows, strict=True):
            assert point.samples == samples
            assert point.seconds == near(seconds)
            assert point.train_loss == line["train/loss"]
            devices = [device["id"] for device in raw.plan["devices"]]
            assert point.shares == {device: line[f"device/{device}/share"] for device in devices}
        judged = [(point.step, point.eval_loss) for point in points(record) if point.eval_loss is not None]
        assert judged == [(line["step"], line["eval/loss"]) for line in raw.lines if "eval/loss" in line]


def test_efficiency_and_profiles_are_those_of_the_calibration(folder: Path) -> None:
    (record,) = read_runs([folder / "profiled_0"])
    found = compare([record], "Profiled")
    (one,) = found.variants
    raw = Raw(folder / "profiled_0")
    told_of = raw.plan["calibration"]["devices"]
    alone = [128 / own_seconds(device["curve"], 128) for device in told_of]
    assert one.efficiency is not None
    assert one.lost_to is not None
    assert one.efficiency.mean == near(raw.throughput / sum(alone))
    assert sum(one.lost_to.values()) == near(1 - one.efficiency.mean)
    counts = raw.plan["local_batch_sizes"]
    quiet = max(own_seconds(d["curve"], n) for d, n in zip(told_of, counts, strict=True))
    predicted = raw.plan["calibration"]["predicted_step_seconds"]
    assert one.predicted_step_seconds == near(predicted)
    waiting = 128 / quiet / sum(alone) - 128 / predicted / sum(alone)
    assert one.lost_to["communication"] == pytest.approx(waiting, rel=1e-9, abs=1e-12)
    fast, slow = found.profiles
    assert [profile.samples_per_second for profile in found.profiles] == near(alone)
    assert fast.relative_speed == 1.0
    assert slow.relative_speed == near(alone[1] / alone[0])
    assert slow.relative_speed == pytest.approx(1 / 3, rel=0.2)
    assert fast.fault == "slow 2× from step 0"
    assert slow.fault is None
    assert len(fast.samples) == len(fast.seconds) >= 20
    # In the run the fast device, three times the slow one before it, is twice as slow as it should be: what
    # is measured of both there says so, since waiting for each other is no part of it.
    ids = ("emulated:0", "emulated:1")
    shares = {device: raw.share(device) for device in ids}
    assert {d["id"]: d["share"] for d in record.summary["devices"]} == near(shares)
    speeds = [raw.speed(device) for device in ids]
    assert list(one.device_speeds.values()) == near(speeds)
    shown = [rows for rows in tables(as_markdown(found)) if "samples/s while it computes" in rows[0]][0]
    assert [printed(row["samples/s while it computes"]) for row in shown] == pytest.approx(speeds, rel=5e-4)
    assert printed(shown[1]["÷ fastest"]) == pytest.approx(speeds[1] / speeds[0], abs=5e-4)
    assert speeds[1] / speeds[0] == pytest.approx(2 / 3, rel=0.2)


def own_seconds(curve: dict[str, Any], samples: int) -> float:
    """Return a device's step in one pass: the update, what a pass costs, and each sample at its place."""
    assert curve["microbatch_size"] is None
    seconds = curve["update_seconds"] + curve["fixed_seconds"]
    for sample in range(samples):
        slope = curve["seconds_per_sample"]
        for at, beyond in curve["kinks"]:
            slope = beyond if sample >= at else slope
        seconds += slope
    return float(seconds)


def test_files_print_what_the_logs_say(folder: Path, tmp_path: Path) -> None:
    found = compare(read_runs(five_steps(folder)), "Five steps")
    page = write_files(found, tmp_path)
    of = {"equal": ("equal", "ddp"), "manual": ("manual", "ddp"), "alone": ("equal", "single")}
    labels = {name: variant(found, *settings).label for name, settings in of.items()}
    rows = {
        one["variant"]: one for one in csv.DictReader(io.StringIO((tmp_path / "variants.csv").read_text()))
    }
    lines = list(csv.DictReader(io.StringIO((tmp_path / "curves.csv").read_text())))
    of_runs = list(csv.DictReader(io.StringIO((tmp_path / "runs.csv").read_text())))
    data = json.loads(
        re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())[0]
    )
    in_page = {one["label"]: one for one in data["variants"]}
    (main, *_) = tables((tmp_path / "report.md").read_text())
    in_text = {re.sub(r"\*\*(.*)\*\*.*", r"\1", one["variant"]): one for one in main}
    assert len(rows) == len(in_page) == len(in_text) == 3
    for name, label in labels.items():
        own = raws(folder, name)
        bounds = around([raw.throughput for raw in own])
        row, shown, text = rows[label], in_page[label], in_text[label]
        columns = ("samples_per_second", "samples_per_second_low", "samples_per_second_high")
        assert tuple(float(row[column]) for column in columns if row[column]) == near(bounds)
        speed = shown["samples_per_second"]
        assert tuple(speed[key] for key in ("mean", "low", "high") if speed[key] is not None) == near(bounds)
        assert printed(text["samples/s"]) == pytest.approx(bounds[0], rel=5e-4)
        gain = own[0].throughput / raws(folder, "alone")[0].throughput  # of the seed that both have
        assert float(row["gain_over_single"]) == near(gain)
        assert shown["gain_over_single"]["mean"] == near(gain)
        assert printed(text["× single"]) == pytest.approx(gain, abs=5e-3)
        for seed, raw in enumerate(own):
            (of_run,) = [one for one in of_runs if one["variant"] == label and one["seed"] == str(seed)]
            assert float(of_run["samples_per_second"]) == near(raw.throughput)
            assert float(of_run["share[emulated:0]"]) == near(raw.share("emulated:0"))
            assert int(of_run["samples"]) == raw.samples
            logged = [
                one
                for one in lines
                if one["variant"] == label and one["seed"] == str(seed) and one["train_loss"]
            ]
            assert [float(one["train_loss"]) for one in logged] == [w[4]["train/loss"] for w in raw.windows]
            assert [float(one["seconds"]) for one in logged] == near([w[3] for w in raw.windows])
        # The page's curve is the mean over seeds, at the steps of both.
        windows = zip(*(raw.windows for raw in own), strict=True)
        means = [statistics.fmean(window[4]["train/loss"] for window in at) for at in windows]
        assert shown["drawn"]["train"]["mean"] == near(means)
    best = max(labels, key=lambda name: statistics.fmean(raw.throughput for raw in raws(folder, name)))
    assert data["best"] == labels[best]
    assert f"**{labels[best]}** ← best" in [one["variant"] for one in main]
    assert [row["best"] for row in rows.values()].count("True") == 1


def test_a_large_sweep_is_reported_whole(folder: Path, tmp_path: Path) -> None:
    # How long it takes is for benchmarks/bench_report.py to say.
    make_sweep(folder / "equal_0", tmp_path / "sweep", 200, lines=20)
    runs = read_runs([tmp_path / "sweep"])
    found = compare(runs, "Large")
    write_files(found, tmp_path)
    assert len(runs) == 200
    assert len(found.variants) == 40
    assert [len(one.runs) for one in found.variants] == [5] * 40
    assert found.failed == ()
    assert len(list(csv.DictReader(io.StringIO((tmp_path / "runs.csv").read_text())))) == 200
    assert len((tmp_path / "curves.csv").read_text().splitlines()) == 1 + 200 * 20
    speeds = [one.samples_per_second.mean for one in found.variants if one.samples_per_second is not None]
    assert speeds == sorted(speeds, reverse=True)
