"""Whether a loss is found to be a sum over samples."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from support import unbuilt_config
from torch import nn
from torch.utils.data import Dataset

from hetexp.core.config import Config, read_config
from hetexp.training.measuring.coupling import coupling


def config_of(model: str, loss: str, data: Mapping[str, object] | None = None, **arguments: object) -> Config:
    raw = unbuilt_config(trainer={"max_steps": 3, "loss": loss})
    raw |= {
        "model": {"_target_": model},
        "data": dict(data) if data else {"_target_": "returning.Vectors"},
        "loss": arguments,
    }
    return read_config(raw)


CLASSES = {"_target_": "returning.Vectors", "classes": True}
HEADS = {"_target_": "returning.numbers"}
TERMS = {
    "kind": {"loss": "cross_entropy", "output": "kind", "target": "kind"},
    "words": {"loss": "cross_entropy", "output": "words", "target": "words", "class_dim": 1},
}


@pytest.mark.parametrize(
    "config",
    [
        config_of("returning.normed", "mse"),
        config_of("returning.normed", "cross_entropy", CLASSES, weight=[0.5, 2.0, 1.0]),
        config_of("returning.bert", "model", {"_target_": "returning.texts"}),
        config_of("returning.gpt2", "model", {"_target_": "returning.tokens"}, count="shifted_labels"),
        config_of("returning.Heads", "sum", HEADS, terms=TERMS),
    ],
    ids=["norm", "weights", "bert", "gpt2", "sum"],
)
def test_a_sum_over_samples(config: Config) -> None:
    assert coupling(config) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("returning.normed", "returning.Contrastive"), "the loss couples samples"),
        (config_of("returning.normed", "returning.MeanOfMeans"), "is no sum over them"),
        (config_of("returning.Centred", "mse"), "the model couples samples"),
        (
            config_of("returning.gpt2", "model", {"_target_": "returning.tokens"}, count="samples"),
            "the loss couples samples",
        ),
    ],
    ids=["contrastive", "mean", "model", "count"],
)
def test_a_loss_that_couples_samples(config: Config, message: str) -> None:
    found = coupling(config)
    assert found is not None and message in found and "run.gather" in found


def test_a_model_that_cannot_be_called_says_nothing() -> None:
    assert coupling(config_of("returning.normed", "cross_entropy", {"_target_": "returning.texts"})) is None


class Lengths(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(1 + index), torch.tensor(float(index))


class MeanWithPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(values.mean(1, keepdim=True)).squeeze(1)
        return found


def test_padding_that_a_model_does_not_leave_out_is_named() -> None:
    data = {"_target_": f"{__name__}.Lengths", "collate": "pad"}
    found = coupling(config_of(f"{__name__}.MeanWithPadding", "mse", data))
    assert found is not None and "data.collate.mask" in found
