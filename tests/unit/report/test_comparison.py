"""What is compared with what, what is the best, and what a reader is told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from run_folders import BATCH, FAST, SLOW, STEPS, write_log, write_run

from hetexp.report.comparison import compare
from hetexp.report.curves import points
from hetexp.report.results import Comparison, Variant
from hetexp.report.runs import read_runs

ALONE: dict[str, Any] = {"strategy": "single", "names": [FAST]}


class Runs:
    """Run folders of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def add(self, **run: Any) -> Path:
        self.number += 1
        return write_run(self.folder / str(self.number), **run)

    def compared(self) -> Comparison:
        return compare(read_runs([self.folder]), "Title")

    def compared_with_one(self) -> Comparison:
        """Return the comparison of two runs that differ in nothing but the seed."""
        self.add(seed=0)
        self.add(seed=1)
        return self.compared()


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "runs")


def variant(found: Comparison, label: str) -> Variant:
    return next(one for one in found.variants if one.label == label)


def noted(found: Comparison, *words: str) -> bool:
    return any(all(word in note for word in words) for note in found.notes)


def test_seeds_are_one_variant_and_gains_are_paired(runs: Runs) -> None:
    for seed, (alone, equal, auto) in enumerate([(60, 80, 120), (66, 100, 110), (54, 90, 117)]):
        # The scales differ from run to run, and change nothing.
        runs.add(**ALONE, speed=alone, seed=seed, scale=10.0 + seed)
        runs.add(balancing="equal", speed=equal, seed=seed, scale=20.0 - seed)
        runs.add(balancing="auto", speed=auto, seed=seed, shares=[0.75, 0.25])
    found = runs.compared()
    assert found.keys == ("strategy", "balancing")
    assert [one.label for one in found.variants] == ["ddp, auto", "ddp, equal", "single, equal"]
    best = found.variants[0]
    assert found.best is best
    assert [run.seed for run in best.runs] == [0, 1, 2]
    assert best.samples_per_second is not None
    assert best.samples_per_second.mean == pytest.approx((120 + 110 + 117) / 3)
    assert best.step_seconds is not None
    assert best.step_seconds.mean == pytest.approx(BATCH * (1 / 120 + 1 / 110 + 1 / 117) / 3)
    assert best.gain_over_equal is not None
    assert best.gain_over_single is not None
    assert best.gain_over_equal.mean == pytest.approx((120 / 80 * 110 / 100 * 117 / 90) ** (1 / 3))
    assert best.gain_over_single.mean == pytest.approx((120 / 60 * 110 / 66 * 117 / 54) ** (1 / 3))
    assert best.gain_over_single.count == 3
    assert variant(found, "single, equal").gain_over_equal is None  # one device has nothing to split
    assert found.single_samples_per_second == pytest.approx(60)
    assert found.single_source == f"{FAST}, 3 runs of it alone"
    low, high = best.gain_over_single.low, best.gain_over_single.high
    assert found.answer.startswith(
        f"`ddp, auto` trains 1.93× as fast as the RTX 3090 alone [{low:.2f}–{high:.2f}, 3 seeds], "
        "and 1.29× as fast as with an equal split, emulated."
    )


def test_a_seed_without_its_pair_is_left_out_of_the_gain(runs: Runs) -> None:
    runs.add(balancing="equal", speed=50, seed=0)
    for seed, speed in ((0, 100), (1, 900)):
        runs.add(balancing="auto", speed=speed, seed=seed)
    found = runs.compared()
    gain = variant(found, "auto").gain_over_equal
    assert gain is not None
    assert gain.mean == pytest.approx(2.0)
    assert gain.count == 1
    assert noted(found, "without all 2 seeds", "`equal` (1)")


def test_the_single_device_is_known_by_its_runs_before_its_calibration(runs: Runs) -> None:
    runs.add(balancing="auto", speed=150, solo=[200.0, 70.0])
    found = runs.compared()
    assert found.single_source == f"{FAST}, calibrated before the runs"
    assert found.variants[0].gain_over_single is not None
    assert found.variants[0].gain_over_single.mean == pytest.approx(150 / 200)
    assert noted(found, "No run is of the fastest device alone", "calibrated before the runs")
    assert "But the RTX 3090 alone is 1.33× as fast." in found.answer
    runs.add(**ALONE, balancing="auto", speed=100)
    found = runs.compared()
    assert found.single_samples_per_second == pytest.approx(100)
    runs.add(strategy="single", names=[SLOW], balancing="auto", speed=40)  # the slower of two alone
    assert runs.compared().single_samples_per_second == pytest.approx(100)


def test_a_policy_that_left_all_others_out_is_not_the_device_alone(runs: Runs) -> None:
    runs.add(strategy="ddp", balancing="auto", names=[FAST], shares=[1.0], speed=90)
    runs.add(strategy="ddp", balancing="equal", speed=50)
    left_out = variant(runs.compared(), "auto").gain_over_single
    assert left_out is not None and left_out.mean == 1.0  # nothing better is known
    runs.add(**ALONE, balancing="auto", speed=100)
    left_out = variant(runs.compared(), "ddp, auto").gain_over_single
    assert left_out is not None and left_out.mean == pytest.approx(0.9)


def test_devices_of_one_process_are_not_one_alone(runs: Runs) -> None:
    made = runs.add(strategy="dp", speed=100)
    (run,) = read_runs([made])
    assert len(run.device_names) == 2
    found = compare([run], "dp")
    assert found.single_samples_per_second is None
    assert found.variants[0].efficiency is None
    assert noted(found, "no efficiency is known")


def test_what_is_not_valid_is_neither_best_nor_a_measure(runs: Runs) -> None:
    runs.add(**ALONE, speed=500, valid=False, invalid_reason="late")
    runs.add(balancing="equal", speed=400, valid=False, invalid_reason="late")
    runs.add(balancing="auto", speed=100, seed=0)
    runs.add(balancing="auto", speed=300, seed=1, valid=False, invalid_reason="late")
    found = runs.compared()
    assert found.best is not None
    assert found.best.label == "ddp, auto"
    assert found.best.num_invalid == 1
    assert found.best.samples_per_second is not None
    assert found.best.samples_per_second.mean == pytest.approx(100)  # of the valid run alone
    assert found.best.gain_over_single is None
    assert found.best.gain_over_equal is None
    assert found.variants[0] is found.best
    assert [one.valid for one in found.variants] == [True, False, False]
    assert noted(found, "Invalid: 3 runs", "its speeds are of these: `ddp, auto`")


def test_diverged_runs_are_never_the_best(runs: Runs) -> None:
    runs.add(balancing="equal", speed=100, loss=0.5)
    runs.add(balancing="auto", speed=200, seed=0, loss=math.nan, eval_loss=math.inf)
    runs.add(balancing="auto", speed=200, seed=1, loss=0.25)
    found = runs.compared()
    assert found.best is not None
    assert found.best.label == "equal"
    auto = variant(found, "auto")
    assert auto.num_diverged == 1
    assert auto.train_loss is not None
    assert (auto.train_loss.mean, auto.train_loss.count) == (0.25, 1)
    assert noted(found, "Diverged", "`auto` (1 of 2)")


def test_fallbacks_are_marked_and_never_the_best(runs: Runs) -> None:
    fallback = {"from": "pipeline", "to": "single", "reason": "because"}
    runs.add(**ALONE, speed=200, plan={"fallback": fallback}, fallback=fallback)
    runs.add(speed=100)
    found = runs.compared()
    assert found.best is not None
    assert found.best.label == "ddp"
    assert variant(found, "pipeline").fallback == "pipeline → single"
    assert noted(found, "strategy.fallback", "pipeline → single")


def test_emulated_and_real_runs_are_never_compared(runs: Runs) -> None:
    runs.add(**ALONE, speed=1000, scale=10.0)
    runs.add(speed=2000, scale=10.0)
    runs.add(**ALONE, speed=10, scale=None)
    runs.add(speed=15, scale=None)
    found = runs.compared()
    labels = {one.label: one for one in found.variants}
    assert set(labels) == {"single (emulated)", "ddp (emulated)", "single (real)", "ddp (real)"}
    for kind, gain in (("emulated", 2.0), ("real", 1.5)):
        over = labels[f"ddp ({kind})"].gain_over_single
        assert over is not None
        assert over.mean == pytest.approx(gain)
    assert found.best is labels["ddp (real)"]
    assert noted(found, "Emulated: 2 of 4 runs", "of one kind only")
    assert "emulated" not in found.answer.partition(".")[0]


def test_other_work_has_its_own_single_device(runs: Runs) -> None:
    for model, alone, both in (("mlp", 100, 150), ("gpt", 10, 18)):
        runs.add(**ALONE, speed=alone, choices={"model": model})
        runs.add(speed=both, choices={"model": model})
    found = runs.compared()
    gains = {
        one.label: one.gain_over_single.mean for one in found.variants if one.gain_over_single is not None
    }
    assert gains["ddp, mlp"] == pytest.approx(1.5)
    assert gains["ddp, gpt"] == pytest.approx(1.8)
    assert noted(found, "different models (mlp, gpt)", "not the same work")
    assert noted(found, "with the same work")


def test_the_same_settings_on_other_cards_are_another_variant(runs: Runs) -> None:
    choices = {"hardware": "auto"}
    for seed in (0, 1):
        runs.add(speed=100, seed=seed, choices=choices)
        runs.add(speed=50, seed=seed, choices=choices, names=["T4", SLOW])
    runs.add(speed=90, seed=2, choices=choices, names=[FAST])  # a policy left the other one out
    found = runs.compared()
    assert {one.label: len(one.runs) for one in found.variants} == {
        f"all runs on {FAST} + {SLOW}": 3,
        f"all runs on T4 + {SLOW}": 2,
    }


def test_a_resumed_run_has_its_own_clock(runs: Runs) -> None:
    made = runs.add(speed=100, scale=10.0, steps=20 + STEPS, samples=BATCH * (20 + STEPS))
    write_log(made, ["emulated:0", "emulated:1"], [0.5, 0.5], BATCH * 10 / 100, 1.0, 2.0, first_step=20)
    (run,) = read_runs([made])
    assert run.first_step == 20
    trained = [point for point in points(run) if point.train_loss is not None]
    assert [point.step for point in trained] == [22, 24]
    assert [point.samples for point in trained] == [22 * BATCH, 24 * BATCH]
    assert [point.seconds for point in trained] == pytest.approx([2 * BATCH / 100, 4 * BATCH / 100])
    found = compare([run], "resumed")
    assert found.variants[0].total_samples == pytest.approx(STEPS * BATCH)
    assert noted(found, "1 run went on from a checkpoint", "at step 20")


def test_only_invalid_runs_have_no_best(runs: Runs) -> None:
    runs.add(balancing="equal", speed=400, valid=False, invalid_reason="late")
    runs.add(balancing="auto", speed=300, valid=False, invalid_reason="late")
    assert runs.compared().best is None


@pytest.mark.parametrize("scale", [None, 10.0])
def test_figures_are_in_the_devices_own_time(runs: Runs, scale: float | None) -> None:
    """A step of a paced run takes 10 real seconds a modelled one, measured and predicted alike."""
    runs.add(speed=100, scale=scale, predicted_step_s=0.5 * (scale or 1.0))
    (only,) = runs.compared().variants
    assert only.samples_per_second is not None and only.step_seconds is not None
    assert only.samples_per_second.mean == pytest.approx(100)
    assert only.step_seconds.mean == pytest.approx(BATCH / 100)
    assert only.predicted_step_seconds == pytest.approx(0.5)


def test_energy_is_of_the_samples_that_drew_it(runs: Runs) -> None:
    """A resumed run counts all samples in its summary, and the joules of its own steps."""
    made = runs.add(speed=100, steps=20 + STEPS, samples=BATCH * (20 + STEPS))
    summary = json.loads((made / "summary.json").read_text())
    for device, joules in zip(summary["devices"], (300.0, 100.0), strict=True):
        device |= {"energy_j": joules, "energy_source": "counter"}
    (made / "summary.json").write_text(json.dumps(summary))
    (only,) = runs.compared().variants
    assert only.joules_per_sample is not None
    assert only.joules_per_sample.mean == pytest.approx(400 / (STEPS * BATCH))
    summary["devices"][1]["energy_j"] = None  # of one device it is not known
    (made / "summary.json").write_text(json.dumps(summary))
    assert runs.compared().variants[0].joules_per_sample is None


def test_each_line_has_the_pace_of_its_time(runs: Runs) -> None:
    made = runs.add(speed=100, scale=10.0)
    first, *rest = map(json.loads, (made / "metrics.jsonl").read_text().splitlines())
    slow = {"step_seconds": 2 * first["step_seconds"], "device/emulated:0/samples_per_second": 5.0}
    lines = [json.dumps(line) for line in (first | slow | {"time_scale": 20.0}, *rest)]
    (made / "metrics.jsonl").write_text("\n".join(lines))
    (run,) = read_runs([made])
    trained = [point for point in points(run) if point.train_loss is not None]
    assert [point.seconds for point in trained] == pytest.approx([2 * BATCH / 100, 4 * BATCH / 100])
    assert trained[0].device_speeds["emulated:0"] == pytest.approx(100.0)


def test_an_evaluation_between_two_lines_lies_between_them(runs: Runs) -> None:
    made = runs.add(speed=100, scale=10.0)
    with (made / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "eval/loss": 5.0, "device/emulated:0/eval_loss": 4.0}\n')
    lines = (made / "metrics.jsonl").read_text().splitlines()
    order = [lines[0], lines[-1], *lines[1:-1]]
    (made / "metrics.jsonl").write_text("\n".join(order))
    (run,) = read_runs([made])
    (judged,) = [point for point in points(run) if point.step == 3]
    assert judged.samples == 3 * BATCH
    assert judged.seconds == pytest.approx(3 * BATCH / 100)
    assert judged.device_eval_losses == {"emulated:0": 4.0}


def test_what_cannot_be_told_apart_is_said(runs: Runs) -> None:
    for seed, wobble in enumerate((-1.0, 1.0)):
        runs.add(balancing="auto", speed=100 + wobble, seed=seed)
        runs.add(balancing="equal", speed=99 + wobble, seed=seed)
    found = runs.compared()
    assert "From these seeds it cannot be distinguished from `equal` (1.0% slower)." in found.answer
    for seed, wobble in enumerate((-0.001, 0.001)):
        runs.add(balancing="vram", speed=200 + wobble, seed=seed)
    assert "distinguished" not in runs.compared().answer


def test_one_seed_proves_nothing(runs: Runs) -> None:
    runs.add(balancing="auto", speed=100)
    runs.add(balancing="equal", speed=99)
    found = runs.compared()
    assert "One seed does not show whether `equal`" in found.answer
    assert noted(found, "Each variant ran once")


def test_strategies_that_learn_otherwise_are_marked(runs: Runs) -> None:
    runs.add(strategy="local_sgd", speed=200, exact=False)
    runs.add(speed=100)
    found = runs.compared()
    assert found.best is not None
    assert found.best.label == "ddp"
    assert (
        "`local_sgd` takes 2.00× as many samples a second, but its steps are not those of one device"
        in found.answer
    )
    assert noted(found, "The steps of `local_sgd`")


def test_without_an_exact_strategy_the_fastest_is_the_best(runs: Runs) -> None:
    runs.add(strategy="local_sgd", speed=200, exact=False)
    runs.add(strategy="independent", speed=100, exact=False)
    found = runs.compared()
    assert found.best is not None
    assert found.best.label == "local_sgd"
    assert "Its steps are not those of one device, so compare its loss, too." in found.answer


def test_without_a_run_that_completed_there_is_nothing_to_compare(runs: Runs) -> None:
    (runs.add() / "summary.json").unlink()
    runs.add(status="failed", error="CUDA out of memory")
    found = runs.compared()
    assert found.variants == ()
    assert found.best is None
    assert found.answer == "No run completed, 2 did not: there is nothing to compare."
    assert noted(found, "2 runs did not complete (1 unfinished, 1 failed)")


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"global_batch": 64}, {"global_batch": 128}, ("global batch sizes (64, 128)",)),
        ({"data": "text"}, {"data": "digits"}, ("data sets (text, digits)",)),
        ({"samples": 100}, {"samples": 200}, ("not train on equally many samples",)),
        ({"versions": {"torch": "2.8"}}, {"versions": {"torch": "2.13"}}, ("versions of torch (2.8, 2.13)",)),
        ({"versions": {"hetexp": "1"}}, {"versions": {"hetexp": "2"}}, ("versions of hetexp (1, 2)",)),
        ({"scale": 10.0}, {"scale": 500.0}, ("time scales from 10.0 to 500",)),
        ({"eval_loss": None}, {}, ("Without evaluation: 1 of 2 runs",)),
        ({"seed": 0}, {"seed": 0}, ("A seed was run more than once",)),
        (
            {"calibration": {"measured_at": "1"}},
            {"calibration": {"measured_at": "2"}},
            ("The devices were measured 2 times",),
        ),
    ],
)
def test_what_a_reader_must_know(runs: Runs, one: Any, other: Any, words: tuple[str, ...]) -> None:
    for seed, changes in enumerate((one, other)):
        runs.add(**{"seed": seed, **changes})
    assert noted(runs.compared(), *words)
    assert not noted(Runs(runs.folder.parent / "plain").compared_with_one(), *words)


def test_devices_that_a_policy_left_out_are_named(runs: Runs) -> None:
    runs.add(balancing="equal", speed=50, solo=[100.0, 40.0])
    runs.add(balancing="auto", speed=95, names=[FAST], solo=[100.0])
    assert noted(runs.compared(), "Devices were left out in `auto` (Arc A770)")
