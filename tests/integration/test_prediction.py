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
    (equal,) = [row for row in predicted["rows"] if row["policy"] == "equal"]
    assert [part["samples"] for part in equal["split"]] == [8, 8]
    assert predicted["exchange"]["buckets"] == [[pytest.approx(f), size] for f, size in emulation["buckets"]]
    assert (len(emulation["buckets"]) > 1) == (cap < 1)
    assert equal["predicted_step_s"] == pytest.approx(emulation["predicted_step_s"], rel=1e-9)
