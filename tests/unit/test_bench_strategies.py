"""The pure parts of `scripts/bench_strategies.py`: who may start, and what the tables say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_strategies import arguments_of
from strategy_bench import page
from strategy_bench.entrants import ENTRANTS, EVAL_EVERY, MIXES, SYNC_EVERY, Entrant, entrants_of
from strategy_bench.measure import Scene, loss_at
from support import checked

from hetexp.core.compose.conf_folders import conf_dir

CURVE = [(2.0, 4.0), (4.0, 3.0), (6.0, 2.8)]


@pytest.mark.parametrize(
    "entrant", [one for one in ENTRANTS if one.policy != "tflops"], ids=lambda one: f"{one.name}-{one.policy}"
)
def test_every_row_may_start(tmp_path: Path, entrant: Entrant) -> None:
    mix = MIXES[(entrant.only or tuple(MIXES))[0]]
    words = Scene(mix, tmp_path, 1.0).words(entrant, 20)
    assert checked(*words).problems == []


def test_every_strategy_that_can_be_emulated_has_rows() -> None:
    elsewhere = {"dp", "hierarchical_sgd"}  # for real cards; for hosts (benchmarks/bench_network.py)
    options = {path.stem for path in (conf_dir() / "strategy").glob("*.yaml")} - elsewhere
    assert {one.strategy for one in ENTRANTS} == options
    assert len({(one.name, one.policy) for one in ENTRANTS}) == len(ENTRANTS)
    assert {one.strategy for one in entrants_of("3:1")} == options - {"hybrid"}
    assert EVAL_EVERY % SYNC_EVERY == 0


def test_a_loss_between_two_evaluations() -> None:
    assert loss_at(CURVE, 1.0) is None
    assert loss_at(CURVE, 2.0) == 4.0
    assert loss_at(CURVE, 3.0) == 3.5
    assert loss_at(CURVE, 60.0) == 2.8


def run(speed: float, **changes: Any) -> dict[str, Any]:
    found = {
        "samples_per_s": speed,
        "step_s": 64 / speed,
        "predicted_step_s": 0.5,
        "solo_samples_per_s": None,
        "bytes_per_step": 2e6,
        "chosen": "ddp",
        "split": [48, 16],
        "curve": CURVE,
        "bubble": None,
        "final_loss": 2.8,
        "valid": True,
    }
    return found | changes


def row(strategy: str, policy: str, *runs: dict[str, Any]) -> dict[str, Any]:
    return {"name": strategy, "strategy": strategy, "policy": policy, "runs": list(runs)}


def test_tables() -> None:
    bubble = {
        "schedule": "1F1B",
        "microbatches": 8,
        "layers": [[0, 4], [4, 6]],
        "measured": 0.22,
        "simulated": 0.2,
    }
    rows = [
        row("ddp", "profiled", run(100.0, solo_samples_per_s=125.0)),
        row("local_sgd", "tflops", run(200.0, curve=[(1.0, 4.0), (3.0, 3.0)])),
        row("pipeline", "tflops", run(50.0, bubble=bubble, valid=False)),
        row("auto", "auto", run(98.0)),
    ]
    mix = {"title": "3:1", "global_batch_size": 64, "steps": 30, "time_scale": 10.0, "rows": rows}
    text = page.strategies({"3:1": mix})
    figures = "100.0 | 0.800 | 0.640 | 0.500 | +28.0% | 2.000 | 2.8000 | 3.5000 | 48 / 16"
    assert f"| ddp | profiled | {figures} |" in text
    assert "| pipeline (!) |" in text and "| auto → ddp |" in text
    assert "fastest row is ddp with profiled; `auto` reached 0.980 of it." in text
    assert "1 of 4 runs were outrun" in text
    assert "| 3:1 | tflops | 1F1B | 8 | 0–4, 4–6 | 0.220 | 0.200 | 1.100 |" in page.bubbles({"3:1": mix})


def test_wrong_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of(["--strategies", "dpp"])
    assert "--strategies: must be of single, ddp" in capsys.readouterr().err
