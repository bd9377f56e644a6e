"""The estimate against what an H100 really took: `benchmarks/bench_memory.py --limits --record`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hetexp.core.device import DeviceSpec
from hetexp.core.instantiate import instantiate
from hetexp.hardware.memory.estimate import MemoryEstimate, Workload, estimate_memory
from hetexp.hardware.memory.rules import CONTEXT_BYTES, rules_for
from hetexp.training.loss import CrossEntropy, MeanSquaredError

RECORDED = json.loads((Path(__file__).parents[3] / "recorded" / "memory_h100.json").read_text())
ROWS: list[dict[str, Any]] = RECORDED["rows"]
FITS: list[dict[str, Any]] = RECORDED["fits"]
RULES = rules_for(DeviceSpec("cuda:0", "cuda", 0, RECORDED["card"], "nvidia", architecture="sm_90"))
ACCEPTED = 0.15


def workload(row: dict[str, Any]) -> Workload:
    """Build a row as `benchmarks/bench_memory.py` did."""
    with torch.device("meta"):
        model = instantiate(row["model"])
    loss = CrossEntropy() if "below" in row["targets"] else MeanSquaredError()

    def build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        if row["optimizer"] == "adamw":
            return torch.optim.AdamW(model.parameters(), fused=row["fused"] or None)
        return torch.optim.SGD(model.parameters(), momentum=0.9)

    return Workload(
        model=model,
        build_optimizer=build_optimizer,
        loss=lambda output, targets: loss.total(output.float(), targets),
        sample=(values(**row["inputs"]), values(**row["targets"])),
        precision=row["precision"],
        accumulates=row["microbatches"] > 1,
        keeps_gradients=row["ddp"],
        bucket_bytes=lambda gradients, accumulates: gradients if row["ddp"] and accumulates else 0,
    )


def values(shape: list[int], below: int | None = None) -> torch.Tensor:
    return torch.zeros(1, *shape, dtype=torch.float32 if below is None else torch.int64)


def estimate(row: dict[str, Any], size: int | None = None) -> MemoryEstimate:
    found = estimate_memory(workload(row), size or row["microbatch_size"], RULES)
    assert found.reason is None
    return found


def named(rows: list[dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(row, id="-".join([row["row"].replace(" ", "_"), row["optimizer"], row["precision"]]))
        for row in rows
    ]


def test_all_models_sizes_optimizers_and_precisions_are_there() -> None:
    kinds = {(row["row"].split()[0], row["optimizer"], row["precision"]) for row in ROWS}
    models = ("mlp", "convnet", "gpt", "autoencoder")
    assert kinds >= {(m, o, p) for m in models for o in ("sgd", "adamw") for p in ("float32", "bfloat16")}
    assert {row["row"].split()[1] for row in ROWS if " " in row["row"]} >= {"small", "medium", "large"}


@pytest.mark.parametrize("row", named(ROWS))
def test_the_peak_is_within_15_percent_and_the_need_covers_what_it_ran_in(row: dict[str, Any]) -> None:
    found = estimate(row)
    assert found.allocated_bytes == pytest.approx(row["peak"], rel=ACCEPTED)
    if row["least"] is not None:
        assert row["least"] <= found.total_bytes - found.context_bytes <= 1.2 * row["least"]


@pytest.mark.parametrize("fit", FITS, ids=lambda fit: f"{fit['row']}-{fit['precision']}".replace(" ", "_"))
def test_no_microbatch_is_said_to_fit_that_did_not_run(fit: dict[str, Any]) -> None:
    """And few that did run are refused; more than the last samples of a large model would be too many."""
    row = next(
        row
        for row in ROWS
        if (row["row"], row["precision"]) == (fit["row"], fit["precision"]) and row["optimizer"] == "adamw"
    )
    capacity = fit["capacity"] + CONTEXT_BYTES["cuda"]  # it was torch's allocator's
    assert estimate(row, fit["largest"] + 1).total_bytes > capacity
    assert estimate(row, int(0.86 * fit["largest"])).total_bytes <= capacity


def test_the_context_covers_what_was_beside_the_allocator() -> None:
    assert RECORDED["context"] <= CONTEXT_BYTES["cuda"] <= 1.1 * RECORDED["context"]
