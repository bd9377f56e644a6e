"""A W&B report asks for metrics, summary fields and settings that a real run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import Train

from hetexp.core.plan import Plan
from hetexp.logger.wandb import STEP_METRIC
from hetexp.report.comparison import compare
from hetexp.report.runs import read_runs
from hetexp.report.wandb_report.report import build, spec_of

pytest.importorskip("wandb_workspaces")
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")
OF_WANDB = ("RelativeTime(Process)",)
"""Axes that W&B has of every run."""


def panels(spec: Any) -> list[dict[str, Any]]:
    return [panel for block in spec["blocks"] for panel in block.get("panels", ())]


def flat(value: dict[str, Any], start: str = "") -> set[str]:
    """Return the names that W&B gives the fields of nested records."""
    names = {f"{start}{key}" for key in value}
    return names.union(*(flat(v, f"{start}{k}.") for k, v in value.items() if isinstance(v, dict)))


def test_everything_that_is_shown_was_logged(train: Train, tmp_path: Path) -> None:
    run = train(
        *("model=mlp", "model.hidden_sizes=[16]", "data=synthetic", "hardware.devices=[cpu,cpu]"),
        *("trainer.max_steps=4", "trainer.max_epochs=null", "trainer.log_every=2"),
        folder=tmp_path / "run",
    )
    logged = {name for line in run.metrics for name in line} | {STEP_METRIC}
    summary, config = flat(run.summary), flat(Plan.read(run.folder / "plan.json").config)
    shown = panels(spec_of(build(compare(read_runs([tmp_path]), "one"), None, "mixed")))
    assert {panel["type"] for panel in shown} == {
        "BarPlot",
        "LinePlot",
        "ParallelCoordinatesPlot",
        "RunComparer",
        "ScalarChart",
    }
    for panel in shown:
        over_steps = [*panel.get("y", ()), *([panel["x"]] if "x" in panel else ())]
        assert {name for name in over_steps if name not in OF_WANDB} <= logged, panel["title"]
        at_the_end = [*panel.get("metrics", ()), *([panel["metric"]] if "metric" in panel else ())]
        assert set(at_the_end) <= summary, panel["title"]
        for column in panel.get("columns", ()):
            there = config if column["metric"]["type"] == "Config" else summary | logged
            assert column["metric"]["name"] in there
    assert any("device/cpu:1/share" in panel.get("y", ()) for panel in shown)
