"""Unusual models, Muon and gathered features: a card beside the CPU, and two cards, equal the CPU."""

from __future__ import annotations

from pathlib import Path

import contrastive
import pytest
import torch
from support import Train, difference, start_script, worst

STEPS = 6
VECTORS = ("data=synthetic", "data.num_samples=72", "data.num_test_samples=20", "model=custom")
TOKENS = (*VECTORS, "data.kind=tokens", "data.mask_fraction=0.5", "data.sequence_length=5")
COMMON = (
    f"trainer.max_steps={STEPS}",
    "trainer.global_batch_size=32",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.checkpoint_every=1",
    "trainer.clip_norm=0.2",
)
MODELS = {
    "lazy": (*VECTORS, "model._target_=unusual_models.Lazy", "optimizer=sgd"),
    "sparse": (*TOKENS, "model._target_=unusual_models.SparseWords", "optimizer=sgd", "optimizer.lr=0.5"),
    "complex": (*VECTORS, "model._target_=unusual_models.Spectral"),
    "spectral_norm": (*VECTORS, "model._target_=unusual_models.Lipschitz"),
    "muon": (*VECTORS[:-1], "model=mlp", "model.hidden_sizes=[16,12]", "optimizer=muon"),
}
LAYOUTS = {
    "card_and_cpu": ("hardware.devices=[cuda:0,cpu]", "balancing=manual", "balancing.weights=[3,1]"),
    "two_cards": ("hardware.devices=[cuda:0,cuda:1]", "balancing=manual", "balancing.weights=[3,1]"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_they_equal_the_cpu(train: Train, model: str, layout: str) -> None:
    reference = train("hardware=cpu", "strategy=single", *MODELS[model], *COMMON)
    run = train(*MODELS[model], *COMMON, *LAYOUTS[layout])
    loss, parameters = worst(run, reference, STEPS)
    assert loss <= 1e-12
    assert parameters <= 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_features(tmp_path: Path, layout: str) -> None:
    start_script(tmp_path / "run", Path(contrastive.__file__), LAYOUTS[layout], "rows", str(tmp_path))
    reference = [weights for _, weights in contrastive.plain_loop()]
    for rank in range(2):
        steps = torch.load(tmp_path / f"rank_{rank}.pt", map_location="cpu")
        assert len(steps) == len(reference)
        assert max(map(difference, steps, reference)) <= 1e-12
