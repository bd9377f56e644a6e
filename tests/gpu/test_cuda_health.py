"""What goes wrong with numbers on a real card is found there, and its random numbers are as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import Train

from hetexp.cli import main
from hetexp.core.errors import RunFailedError
from hetexp.data.sampler import GlobalSampler, Position

COMMON = (
    "data=custom",
    "data._target_=poisoned.Data",
    "model=mlp",
    "model.hidden_sizes=[8]",
    "model.dropout=0.2",
    "balancing=manual",
    "trainer.global_batch_size=16",
    "trainer.max_epochs=null",
    "trainer.max_steps=4",
    "trainer.log_every=1",
    "trainer.check_sync_every=1",
)
MIXED = ("hardware.devices=[cpu,cuda:0]", "balancing.weights=[3,1]")
TWO = ("hardware.devices=[cuda:0,cuda:1]", "balancing.weights=[3,1]")


@pytest.mark.parametrize("layout", [MIXED, TWO], ids=["cpu-cuda", "two_cards"])
def test_a_bad_sample_is_named(train: Train, tmp_path: Path, layout: tuple[str, ...]) -> None:
    second, _ = GlobalSampler(64, 16, seed=0).batch(Position(0, 16))
    options = (*COMMON, *layout, f"+data.bad=[{int(second[13])}]")
    with pytest.raises(RunFailedError, match=rf"nan on rank 1, cuda.*training sample {int(second[13])}\."):
        train(*options, folder=tmp_path / "run")
    run = train(*options, f"resume={tmp_path / 'run'}", "trainer.non_finite=skip")
    assert run.summary["steps"] == 4
    assert all(tensor.isfinite().all() for tensor in run.parameters().values())


def test_a_card_and_the_cpu_are_certified(tmp_path: Path) -> None:
    options = ["data=synthetic", "model=mlp", "launch.start_method=forkserver", "balancing=manual"]
    assert main(["verify", *options, *MIXED, "--output", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "certificate.json").read_text())
    assert told["verdict"] == "exact" and told["control_must_differ"]
