"""Parameters that take no part train as on one device, or are named; frozen ones are not sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import Train, difference, worst

from hetexp.core.errors import RunFailedError

STEPS = 12
ADAPTED = (
    "model=custom",
    "model._target_=adapted.Adapted",
    "data=synthetic",
    "data.num_samples=72",  # the last batch leaves a rank with one sample
    "data.num_test_samples=20",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
)
EXACT = (
    "trainer.precision=float64",
    "+model.pooler=true",
    "+model.branch=true",
    "optimizer.weight_decay=0.1",
)
THREE = ("hardware.devices=[cpu,cpu,cpu]", "balancing=manual", "balancing.weights=[7,1,0]")


def test_branches_and_unused_layers_train_as_on_one_device(train: Train) -> None:
    single = train("hardware=cpu", "strategy=single", *ADAPTED, *EXACT)
    used = [
        difference(
            {"branch.weight": single.parameters(k)["branch.weight"]},
            {"branch.weight": single.parameters(k + 1)["branch.weight"]},
        )
        for k in range(1, STEPS)
    ]
    assert any(used)
    assert torch.equal(single.parameters(1)["pooler.weight"], single.parameters()["pooler.weight"])
    run = train(
        *ADAPTED,
        *EXACT,
        *THREE,
        "strategy.find_unused_parameters=true",
        "trainer.activation_checkpointing=true",
    )
    loss, parameters = worst(run, single, STEPS)
    assert loss <= 1e-12
    assert parameters <= 1e-12


def test_an_unused_parameter_is_named_at_once(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "unused"
    with pytest.raises(RunFailedError, match="strategy.find_unused_parameters"):
        train(
            *ADAPTED, "+model.pooler=true", "hardware.devices=[cpu,cpu]", "trainer.max_steps=1", folder=folder
        )
    summary = json.loads((folder / "summary.json").read_text())
    assert "pooler.weight, pooler.bias got no gradient" in summary["error"]
    assert {failure["step"] for failure in summary["failures"]} == {0}


def test_a_static_graph_takes_empty_shares(train: Train) -> None:
    """A layer that no pass uses, a rank without samples, and a short last batch."""
    common = (*ADAPTED, "+model.pooler=true", "trainer.precision=float64", "trainer.max_steps=6")
    single = train("hardware=cpu", "strategy=single", *common)
    run = train(*common, *THREE, "strategy.static_graph=true")
    assert worst(run, single, 6)[1] <= 1e-12


def test_frozen_weights_are_not_sent(train: Train) -> None:
    """The buckets that really travel hold the trained parameters and nothing else."""
    run = train(*ADAPTED, "hardware.devices=[emulated:rtx_3090,emulated:arc_a770]", "trainer.max_steps=3")
    sent = json.loads((run.folder / "emulation.json").read_text())["buckets"]
    trained = [tensor for name, tensor in run.parameters().items() if not name.startswith("base.")]
    assert sum(num_bytes for _, num_bytes in sent) == sum(4 * tensor.numel() for tensor in trained)
    assert torch.equal(run.parameters()["base.weight"], run.parameters(1)["base.weight"])
