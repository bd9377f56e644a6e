"""A merged model is judged beside its parents, its statistics are its own, and any run goes on from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hetexp.checkpoint.folder import TrainingState, load_checkpoint, save_checkpoint
from hetexp.checkpoint.merge import Parent, read_parent
from hetexp.comm.communicator import SoloCommunicator
from hetexp.core.errors import CheckpointError
from hetexp.strategy.independent.merging import MergeOptions, TrainingData, merge, recalibrate, write_merged
from hetexp.strategy.single import Single
from hetexp.training.evaluate import evaluate_locally
from hetexp.training.state import TrainState

MakeState = Callable[..., TrainState]


class Net(nn.Module):
    """A linear classifier behind a BatchNorm."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 4)
        with torch.no_grad():
            for number, parameter in enumerate(self.linear.parameters()):
                values = torch.linspace(-1, 1 + number, parameter.numel()).reshape(parameter.shape)
                parameter.copy_(values + shift * torch.cos(7 * values))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(inputs))  # type: ignore[no-any-return]


@pytest.fixture
def state(make_state: MakeState) -> TrainState:
    generator = torch.Generator().manual_seed(0)
    inputs = 3.0 + 2.0 * torch.randn(24, 3, generator=generator)
    data = TensorDataset(inputs, torch.randint(4, (24,), generator=generator))
    return make_state(SoloCommunicator(), strategy=Single(), model=Net(), train=data, evaluation=data)


def parent(folder: Path, shift: float, samples: int = 10, seed: int = 0) -> Parent:
    model = Net(shift)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    model.load_state_dict(Net(shift).state_dict())
    extra = {
        "run_id": folder.name,
        "progress": {"samples": samples},
        "devices": [{"id": folder.name}],
        "config": {"trainer": {"seed": seed}, "model": {}, "resume": None},
        "part": {"device": folder.name, "samples": samples},
    }
    state = TrainingState(5, {"epoch": 0, "offset": 8}, {"step": 5}, extra)
    return read_parent(save_checkpoint(folder, model, optimizer, state))


def test_statistics_are_those_of_the_training_data(state: TrainState) -> None:
    norm: Any = state.model.norm
    recalibrate(state)
    data: Any = state.train_data
    batches = data.tensors[0]
    # Means over batches of 8: their mean is that of all samples.
    torch.testing.assert_close(norm.running_mean, batches.mean(dim=0))
    assert int(norm.num_batches_tracked) == 3
    assert norm.momentum == 0.1
    assert state.model.training


def test_the_merged_model_beside_its_parents(state: TrainState, tmp_path: Path) -> None:
    parents = [parent(tmp_path / "a", 0.0, 30), parent(tmp_path / "b", 0.5, 10)]
    merged = merge(parents, MergeOptions(), state)
    report = merged.report
    assert report["weights"] == [0.75, 0.25]
    assert [one["device"] for one in report["parents"]] == ["a", "b"]
    assert report["batch_norm"] == "recalibrated"
    losses = [one["loss"] for one in report["parents"]]
    assert report["merged_loss"] == merged.evaluation["loss"] == evaluate_locally(state)["loss"]
    assert report["worse_than_best_parent"] == (report["merged_loss"] > min(losses))
    mean = 0.75 * parents[0].tensors["linear.weight"] + 0.25 * parents[1].tensors["linear.weight"]
    torch.testing.assert_close(merged.tensors["linear.weight"], mean)
    assert bool((merged.tensors["norm.running_mean"] > 1).all())  # the parents' are zero
    average = merge(parents, MergeOptions(batch_norm="average"), state)
    assert average.report["batch_norm"] == "averaged"
    assert not bool(average.tensors["norm.running_mean"].any())


def shifted(key: str, shift: float, count: int) -> TrainingData:
    generator = torch.Generator().manual_seed(count)
    inputs = shift + torch.randn(count, 3, generator=generator)
    targets = torch.randint(4, (count,), generator=generator)
    order = torch.randperm(count, generator=generator).tolist()
    return TrainingData(key, TensorDataset(inputs, targets), order)


def test_statistics_are_measured_on_all_parents_data_by_weight(state: TrainState, tmp_path: Path) -> None:
    parents = [parent(tmp_path / "a", 0.0), parent(tmp_path / "b", 0.5)]
    data = [shifted("a", 0.0, 48), shifted("b", 4.0, 64)]
    merged = merge(parents, MergeOptions(weights=(3, 1)), state, data=data)
    other = merge(parents[::-1], MergeOptions(weights=(1, 3)), state, data=data[::-1])
    assert merged.report["batch_norm_samples"] == [48, 16]
    assert other.report["batch_norm_samples"] == [16, 48]
    for name in ("norm.running_mean", "norm.running_var"):
        assert torch.equal(merged.tensors[name], other.tensors[name])
    used = torch.cat(
        [
            torch.stack([each.samples[i][0] for i in each.order[:n]])
            for each, n in zip(data, (48, 16), strict=True)
        ]
    )
    torch.testing.assert_close(merged.tensors["norm.running_mean"], used.mean(dim=0))
    assert bool((merged.tensors["norm.running_mean"] - 1.0).abs().max() < 0.5)
    # Each batch of 8 has the mixture's spread, not that of one parent's samples.
    assert bool((merged.tensors["norm.running_var"] > 2.5).all())


def test_parents_of_the_same_data_use_it_once(state: TrainState, tmp_path: Path) -> None:
    parents = [parent(tmp_path / name, shift) for name, shift in (("a", 0.0), ("b", 0.5), ("c", 0.2))]
    same, other = shifted("same", 0.0, 20), shifted("other", 4.0, 20)
    merged = merge(parents, MergeOptions(weights=(1, 1, 2)), state, data=[same, same, other])
    assert merged.report["batch_norm_samples"] == [20, 0, 20]


def test_any_run_goes_on_from_it(state: TrainState, tmp_path: Path) -> None:
    parents = [parent(tmp_path / "a", 0.0, 10), parent(tmp_path / "b", 0.5, 30)]
    merged = merge(parents, MergeOptions(), state)
    path = write_merged(tmp_path / "merged", parents, merged)
    model = Net(3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loaded = load_checkpoint(path, model, optimizer)
    assert loaded.step == 5
    assert not optimizer.state  # moments of other weights are none of these
    assert torch.equal(model.linear.weight, merged.tensors["linear.weight"])
    assert [one["id"] for one in loaded.extra["devices"]] == ["a", "b"]
    assert loaded.extra["merged"] == merged.report
    assert "part" not in loaded.extra


def test_a_soup_takes_in_what_helps(state: TrainState, tmp_path: Path) -> None:
    parents = [parent(tmp_path / name, shift) for name, shift in (("a", 0.0), ("b", 50.0))]
    soup = merge(parents, MergeOptions(soup="greedy"), state)
    assert soup.report["weights"] == [1.0, 0.0]
    assert soup.report["worse_than_best_parent"] is False
    assert torch.equal(soup.tensors["linear.weight"], parents[0].tensors["linear.weight"])
    assert merge(parents, MergeOptions(), state).report["worse_than_best_parent"] is True


def test_other_seeds_need_force_and_are_flagged(state: TrainState, tmp_path: Path) -> None:
    parents = [parent(tmp_path / "a", 0.0), parent(tmp_path / "b", 0.1, seed=4)]
    with pytest.raises(CheckpointError, match=r"trainer\.seed=4.*--force"):
        merge(parents, MergeOptions(), state)
    merged = merge(parents, MergeOptions(force=True), state)
    assert "trainer.seed=4" in merged.report["other_start"]
    assert merged.report["worse_than_best_parent"] is not None


def test_without_a_model_nothing_is_judged(tmp_path: Path) -> None:
    parents = [parent(tmp_path / "a", 0.0), parent(tmp_path / "b", 0.5)]
    merged = merge(parents, MergeOptions(), None)
    assert (merged.report["merged_loss"], merged.report["worse_than_best_parent"]) == (None, None)
    assert merged.report["batch_norm"] == "averaged"
    with pytest.raises(CheckpointError, match="needs evaluation data"):
        merge(parents, MergeOptions(soup="greedy"), None)
