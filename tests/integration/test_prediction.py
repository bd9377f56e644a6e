"""What is predicted from the catalogue is what a run of emulated devices is modelled to take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import Train

TINY = (
    "model=gpt",
    "data=text",
    "data.sequence_length=16",
    "model.num_layers=2",
    "model.embedding_size=32",
    "trainer.global_batch_size=16",
    "trainer.max_steps=2",
    "trainer.max_epochs=null",
    "trainer.fast_dev_run=2",
)


@pytest.mark.parametrize("cap", [25, 0.05], ids=["one bucket", "several buckets"])
def test_predicted_is_modelled(train: Train, tmp_path: Path, cap: float) -> None:
    words = (*TINY, "hardware.devices=[emulated:rtx_3090,emulated:arc_a770]", f"strategy.bucket_cap_mb={cap}")
    # Too quick to be kept: only what is modelled is looked at.
    done = train(*words, "hardware.time_scale=1")
    emulation = json.loads((done.folder / "emulation.json").read_text())
    predicted = train(*words, "plan_only=true").summary
    (equal,) = [r for r in predicted["rows"] if (r["strategy"], r["policy"]) == ("ddp", "equal")]
    assert [part["samples"] for part in equal["split"]] == [8, 8]
    assert predicted["exchange"]["buckets"] == [[pytest.approx(f), size] for f, size in emulation["buckets"]]
    assert (len(emulation["buckets"]) > 1) == (cap < 1)
    assert equal["predicted_step_s"] == pytest.approx(emulation["predicted_step_s"], rel=1e-9)
    # Two steps of 16 samples; the evaluation at the end, which is paced as well, is no part of it.
    drawn = [device["energy_j"] for device in done.summary["devices"]]
    assert [device["energy_source"] for device in done.summary["devices"]] == ["modelled"] * 2
    assert sum(drawn) / 32 == pytest.approx(equal["joules_per_sample"], rel=1e-9)


def test_the_planner_picks_the_strategy(train: Train, tmp_path: Path) -> None:
    """What `plan_only` says that it takes; and a run goes on as if that had been configured."""
    words = (*TINY, "hardware.devices=[emulated:rtx_3090,emulated:arc_a770]", "strategy=auto")
    predicted = train(*words, "plan_only=true").summary
    names = {row["strategy"] for row in predicted["rows"]}
    assert {"ddp", "single"} <= names
    assert "auto" not in names
    assert predicted["reasons"][-1].startswith(
        "strategy=auto takes single: 16 samples are predicted to take "
    )
    done = train(*TINY, "hardware.devices=[cpu,cpu]", "strategy=auto")
    plan = json.loads((done.folder / "plan.json").read_text())
    assert done.summary["strategy"] == plan["strategy"] == "ddp"
    assert plan["config"]["strategy"]["_target_"] == "hetexp.strategy.ddp.DDP"
    assert "hetexp.strategy.ddp.DDP" in (done.folder / "config.yaml").read_text()
    (reason,) = [reason for reason in plan["reasons"] if reason.startswith("strategy=auto takes ddp: ")]
    assert reason in done.screen.replace("\n", " ")
    assert done.summary["world_size"] == 2
