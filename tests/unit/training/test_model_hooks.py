"""What a model does between steps: asked in order, of what all ranks know, and of nothing in a rehearsal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Train

from hetexp.core.errors import ConfigError
from hetexp.model import hooks
from hetexp.model.base import WithAuxiliary
from hetexp.model.hooks import ModelHooks, Shared, reset_moments
from hetexp.training.loss import CrossEntropy, Reconstruction, total_loss


def test_the_earlier_name_goes_on_working_and_says_so() -> None:
    with pytest.warns(FutureWarning, match="`ModelHooks`"):
        earlier = hooks.StepHooks
    assert earlier is ModelHooks
    with pytest.raises(AttributeError):
        _ = hooks.Unknown


class Counting(ModelHooks, torch.nn.Module):
    """Counts the samples whose first number is positive; its weight must stay at 2."""

    tally_size = 1
    counted: torch.Tensor
    calls: torch.Tensor

    def __init__(self, every: int = 3) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))
        self.every = every
        self.register_buffer("counted", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("calls", torch.zeros(3, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> Any:
        positive = inputs[:, :1] > 0
        return WithAuxiliary(inputs * self.weight, inputs.new_zeros(len(inputs)), positive)

    def after_update(self) -> None:
        self.weight.fill_(2.0)

    def probe_size(self, shared: Shared) -> int:
        return 7 if shared.step % self.every == 0 else 0

    def scores(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return inputs[:, 0] * 3

    def after_step(self, shared: Shared, optimizer: torch.optim.Optimizer) -> None:
        assert float(self.weight) == 2.0
        assert shared.step == shared.before + 1
        self.counted += shared.tally
        self.calls += torch.tensor([1, shared.samples, shared.probe is not None])
        if shared.probe is not None:
            places = list(range(len(shared.probe.scores)))
            assert len(places) == 7
            assert torch.equal(shared.probe.take(places)[:, 0] * 3, shared.probe.scores)


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        vector = torch.full((2,), float(index - 30), dtype=torch.float64)
        return vector, vector


RUN = (
    "data=custom",
    "data._target_=test_model_hooks.Numbers",
    "model=custom",
    "model._target_=test_model_hooks.Counting",
    "trainer.loss=reconstruction",
    "trainer.precision=float64",
    "trainer.global_batch_size=16",
    "trainer.max_epochs=2",
    "optimizer.lr=1e-3",
)


@pytest.mark.parametrize(
    "ranks",
    [
        ("hardware=cpu", "strategy=single"),
        ("hardware.devices=[cpu,cpu]", "strategy=ddp", "balancing=manual", "balancing.weights=[13,3]"),
    ],
    ids=["single", "ddp"],
)
def test_each_sample_is_counted_once(
    train: Train, monkeypatch: pytest.MonkeyPatch, ranks: tuple[str, ...]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    found = train(*RUN, *ranks).parameters()
    assert int(found["counted"]) == 2 * 9  # of each epoch's 40 numbers
    assert found["calls"].tolist() == [6, 80, 2]
    assert found["weight"].tolist() == [2.0]


def test_moments_of_some_rows_begin_anew() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    before = optimizer.state[parameter]["exp_avg"].clone()
    reset_moments(optimizer, parameter, torch.tensor([1]))
    after = optimizer.state[parameter]
    assert torch.equal(after["exp_avg"][[0, 2]], before[[0, 2]])
    assert not after["exp_avg"][1].any() and not after["exp_avg_sq"][1].any()
    assert float(after["step"]) == 1.0
    reset_moments(torch.optim.SGD([parameter]), parameter, torch.tensor([1]))  # which has none


def test_the_loss_of_a_reconstruction() -> None:
    output, targets = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    loss = Reconstruction()
    assert (loss.count(targets), loss.counts(targets).tolist()) == (2, [1, 1])
    assert float(total_loss(loss, WithAuxiliary(output, torch.tensor([0.5, 1.0])), targets)) == 4 + 9 + 1.5
    with pytest.raises(ConfigError, match="one shape"):
        loss.total(output, targets[:1])
    with pytest.raises(ConfigError, match=r"trainer\.loss=reconstruction"):
        CrossEntropy().total(output, targets)
