"""The pure parts of `scripts/bench_balancing.py`: what the ceiling is, and what the tables say."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from balance_bench import page
from balance_bench.measure import Stage, num_steps, random_splits, steps_until
from balance_bench.mixes import MIXES, Mix
from balance_bench.truth import Truth
from bench_balancing import arguments_of
from bench_regret import mixes_of, regrets
from benchlib import tables
from support import checked

from hetexp.core.plan import Plan
from hetexp.plan.planner import make_plan

BUCKETS = [(0.5, 40_000), (1.0, 60_000)]


def plan_of(folder: Path, mix: Mix, *overrides: str) -> Plan:
    given = [*mix.overrides(folder), "trainer.max_steps=1", *overrides]
    return make_plan(checked(*given, run_dir=folder / "run").accepted())


@pytest.mark.parametrize("name", MIXES)
def test_every_mix_is_a_run_that_may_start(tmp_path: Path, name: str) -> None:
    plan = plan_of(tmp_path, MIXES[name], "balancing=profiled")
    assert plan.world_size == len(MIXES[name].devices)
    assert all(device.backend == "emulated" for device in plan.devices)
    assert len({device.host for device in plan.devices}) == (2 if name == "20:1" else 1)
    assert plan.config["trainer"]["global_batch_size"] >= (512 if plan.world_size == 8 else 256)


@pytest.mark.parametrize("name", ["3:1", "10:4:1", "20:1"])
def test_the_ceiling_is_the_best_of_all_splits(tmp_path: Path, name: str) -> None:
    mix = MIXES[name]
    truth = Truth(plan_of(tmp_path, mix, "trainer.global_batch_size=24"), BUCKETS)
    best = truth.best()
    ranks = range(truth.plan.world_size)
    alone = [truth.own_seconds(rank, truth.total) for rank in ranks]
    pairs = [(0, 1), (0, 2), (1, 2)] if len(ranks) == 3 else []
    every = [
        truth.step_seconds(counts)
        for counts in product(range(truth.total + 1), repeat=len(ranks))
        if sum(counts) == truth.total
    ]
    for pair in pairs:
        for first in range(truth.total + 1):
            counts = [0] * len(ranks)
            counts[pair[0]], counts[pair[1]] = first, truth.total - first
            every.append(truth.step_seconds(counts, pair))
    assert best.seconds == min(*alone, *every)
    assert truth.step_seconds(best.counts, best.ranks) == best.seconds
    assert best.exhaustive


def test_of_eight_cards_no_sample_moved_makes_the_best_split_better(tmp_path: Path) -> None:
    truth = Truth(plan_of(tmp_path, MIXES["8 mixed"]), BUCKETS)
    best = truth.best()
    assert sum(best.counts) == truth.total
    assert not best.exhaustive
    for giver, taker in product(best.ranks, repeat=2):
        moved = list(best.counts)
        moved[giver] -= 1
        moved[taker] += 1
        assert truth.step_seconds(moved, best.ranks) >= best.seconds * (1 - 1e-9)


def test_the_curve_is_the_card(tmp_path: Path) -> None:
    truth = Truth(plan_of(tmp_path, MIXES["10:4:1"]), BUCKETS)
    for rank, curve in enumerate(truth.curves):
        for samples in (1, 7, 40, 130, 256):
            assert curve.seconds(samples) == pytest.approx(truth.own_seconds(rank, samples))
    slowed = Truth(truth.plan, BUCKETS, slower={0: 2.0})
    assert slowed.own_seconds(0, 100) > 1.9 * truth.own_seconds(0, 100)
    assert slowed.own_seconds(1, 100) == truth.own_seconds(1, 100)


def test_the_closed_form_of_equal_cards(tmp_path: Path) -> None:
    mix = Mix("equal", ("three",) * 4, 256, 4000, 0.1)
    truth = Truth(plan_of(tmp_path, mix, "hardware.deviation_seed=null"), BUCKETS)
    fixed = truth.curves[0].fixed_seconds + truth.curves[0].update_seconds
    share = fixed / truth.own_seconds(0, 256)
    assert truth.closed_form() == pytest.approx(1 / (1 + 3 * share))
    assert truth.losses()[0] == pytest.approx(1 - truth.closed_form())
    best = truth.best()
    assert truth.total / best.seconds / sum(truth.solo_throughputs()) < truth.closed_form()
    assert truth.jitter(best) == pytest.approx(0.0, abs=1e-9)


def test_splits_to_predict_are_others_and_not_absurd(tmp_path: Path) -> None:
    mix = MIXES["10:4:1"]
    plan = plan_of(tmp_path, mix)
    truth = Truth(plan, BUCKETS)
    stage = Stage("10:4:1", mix, tmp_path, [], plan, truth, truth.best(), 1.0)
    splits = random_splits(stage, 15, seed=1)
    assert len(set(splits)) == 15
    assert all(sum(split) == truth.total and min(split) > 0 for split in splits)
    assert splits == random_splits(stage, 15, seed=1)


def test_regret_is_never_below_zero_and_small_for_one_mix() -> None:
    found = regrets(2, 10)
    assert 0 <= found["median"] <= found["p95"] <= found["worst"] < 0.1
    assert mixes_of("2:500,8:100") == {2: 500, 8: 100}


def test_regret_of_a_mix_is_in_the_model_and_measured() -> None:
    splits = {"chosen": [196, 60], "best": [195, 61], "valid": True}
    found = {"3:1": {**splits, "regret_in_the_model": 0.01, "regret_measured": -0.005}}
    assert "| 3:1 | 196 / 60 against 195 / 61 | 1.00% | -0.50% |" in page.regret(found)


def test_steps_until_balanced() -> None:
    assert steps_until([True] * 10) == 0
    assert steps_until([False, False, False, *[True] * 20]) == 3
    assert steps_until([False, True, *[False] * 9, *[True] * 10]) == 11  # a lucky step is none
    assert steps_until([False] * 10) is None


def test_slow_steps_are_few() -> None:
    assert num_steps(10.0) == (1, 1)
    warm, measured = num_steps(0.4)
    assert (warm, measured) == (3, 8)


def run(speed: float, *split: int, valid: bool = True, **more: Any) -> dict[str, Any]:
    return {"samples_per_s": speed, "step_s": 1.0, "split": list(split), "valid": valid, **more}


FACTS = {
    "title": "3:1",
    "global_batch_size": 256,
    "time_scale": 5.0,
    "best_split": [195, 61],
    "exhaustive": True,
    "ceiling_samples_per_s": 100.0,
    "best_step_s": 0.5,
    "solo_samples_per_s": [75.0, 25.0],
    "closed_form": 1.01,
    "lost_to_rounding": 0.004,
    "jitter": 0.01,
}


def test_the_tables_say_what_was_measured() -> None:
    runs = {
        "equal": [run(50.0, 128, 128)],
        "profiled": [run(90.0, 196, 60), run(98.0, 195, 61), run(95.0, 195, 61, valid=False)],
        "plain DDP": [run(47.5, 128, 128)],
    }
    pages = page.render({name: {"3:1": {"facts": FACTS, "runs": runs}} for name in ("mixes", "rivals")})
    assert "| equal | 50.0 | 50.0–50.0 | 0.500 | 0.500 | – | 128 / 128 |" in pages["mixes"]
    # Median of three; (95 − 50) of (100 − 50) is gained; a run that was outrun is told.
    assert "| profiled (!) | 95.0 | 90.0–98.0 | 0.950 | 0.950 | 0.900 | 195 / 61 |" in pages["mixes"]
    assert "(!) 1 of 5 runs were outrun" in pages["mixes"]
    assert "1.33× the fastest card" in pages["mixes"]
    assert "| 3:1 | profiled (!) | 95.0 | 2.00× | – |" in pages["rivals"]


def test_errors_are_of_all_splits() -> None:
    rows = [{"predicted_s": 1.0 + error, "measured_s": 1.0} for error in (-0.02, 0.01, 0.05)]
    table = page.render({"prediction": {"3:1": {"rows": rows, "valid": True}}})["prediction"]
    assert "| 3:1 | 3 | 2.0% | 5.0% | 5.0% | +1.3% |" in table


def test_a_table_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- mixes: begin -->\nold\n<!-- mixes: end -->\nafter\n", encoding="utf-8")
    tables.write(path, {"mixes": "new"})
    tables.write(path, {"mixes": "newer"})
    assert path.read_text() == "before\n<!-- mixes: begin -->\nnewer\n<!-- mixes: end -->\nafter\n"
    with pytest.raises(ValueError, match="rivals: begin"):
        tables.write(path, {"rivals": "table"})


def test_the_page_has_a_place_for_every_table() -> None:
    text = Path(page.__file__).parents[2].joinpath("docs/reference/benchmarks.md").read_text(encoding="utf-8")
    for name in page.TABLES:
        assert text.count(tables.BEGIN.format(name=name)) == text.count(tables.END.format(name=name)) == 1


def test_quick_is_one_run_of_two_mixes() -> None:
    arguments = arguments_of(["--quick"])
    assert arguments.repeats == 1
    assert arguments.mixes == ["3:1", "165:61"]
    with pytest.raises(SystemExit):
        arguments_of(["--mixes", "5:1"])
