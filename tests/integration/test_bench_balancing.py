"""The benchmark's own ranks: another framework's loop, and many splits in a row, on emulated cards."""

from __future__ import annotations

from pathlib import Path

from balance_bench.measure import Stage, prepare, run_rival, run_splits
from balance_bench.mixes import Mix

MIX = Mix("quick", ("three", "one"), 64, 8000, 0.0)


def test_ranks_that_hetexp_does_not_start_run_on_the_same_cards(tmp_path: Path) -> None:
    stage: Stage = prepare("quick", MIX, tmp_path, time_scale=2.0)
    assert sum(stage.best.counts) == 64
    assert stage.facts()["best_step_s"] == 2.0 * stage.best.seconds
    rival = run_rival(stage, "plain DDP")
    assert rival["split"] == [32, 32]
    # Paced as the cards are: no quicker than their true times allow, jitter of the passes aside.
    paced = stage.truth.step_seconds((32, 32)) * 2.0
    assert rival["step_s"] > 0.9 * paced
    best, bad = stage.best.counts, (4, 60)
    seconds, _ = run_splits(stage, [best, bad], steps=2)
    assert seconds[0] > 0.9 * stage.best.seconds
    assert seconds[1] > 0.9 * stage.truth.step_seconds(bad)
