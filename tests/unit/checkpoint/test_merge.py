"""Merging models: means, adapters as products, what is kept, what is refused (case 42)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetexp.checkpoint.folder import TrainingState, save_checkpoint
from hetexp.checkpoint.merge import (
    Parent,
    adapter_names,
    check_parents,
    greedy_soup,
    lora_scalings,
    merge_tensors,
    read_parent,
    strangers,
    weights_of,
)
from hetexp.core.errors import CheckpointError


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, its tensors named as peft names them."""

    def __init__(self, rank: int = 2, scaling: float = 2.0) -> None:
        super().__init__()
        self.base_layer = nn.Linear(5, 4).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(5, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, 4, bias=False)})
        self.scaling = {"default": scaling}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        low = self.lora_B["default"](self.lora_A["default"](inputs))
        return self.base_layer(inputs) + self.scaling["default"] * low  # type: ignore[no-any-return]


def adapted(seed: int) -> nn.Sequential:
    """Return a model with one base for all seeds and an adapter of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted())
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter)
    return model.double()


def test_adapters_are_merged_as_products() -> None:
    """Two adapters of rank 2 on a frozen layer, 0.7 and 0.3: the delta is the weighted sum of products."""
    models = [adapted(1), adapted(2)]
    scalings = lora_scalings(models[0])
    assert scalings == {"0.lora_A.default.weight": 2.0}
    merged = merge_tensors([model.state_dict() for model in models], [0.7, 0.3], scalings)
    result = adapted(3)
    result.load_state_dict(merged)
    inputs = torch.randn(6, 5, dtype=torch.float64)
    expected = 0.7 * models[0](inputs) + 0.3 * models[1](inputs)
    torch.testing.assert_close(result(inputs), expected, rtol=1e-12, atol=1e-12)
    # The mean of factors is another model: the test can fail.
    naive = {
        key: 0.7 * value + 0.3 * models[1].state_dict()[key] for key, value in models[0].state_dict().items()
    }
    result.load_state_dict(naive)
    assert float((result(inputs) - expected).detach().norm() / expected.detach().norm()) > 0.1
    # The adapter can be trained on: B = 0, A as it was.
    assert not bool(merged["0.lora_B.default.weight"].any())
    assert torch.equal(merged["0.lora_A.default.weight"], models[0].state_dict()["0.lora_A.default.weight"])


def test_adapters_without_their_base_are_stacked() -> None:
    states = [
        {key: value for key, value in adapted(seed).state_dict().items() if "lora" in key} for seed in (1, 2)
    ]
    merged = merge_tensors(states, [0.7, 0.3])
    a, b = merged["0.lora_A.default.weight"], merged["0.lora_B.default.weight"]
    assert (a.shape, b.shape) == ((4, 5), (4, 4))
    products = [s["0.lora_B.default.weight"] @ s["0.lora_A.default.weight"] for s in states]
    torch.testing.assert_close(b @ a, 0.7 * products[0] + 0.3 * products[1], rtol=1e-12, atol=1e-12)


def test_what_an_adapter_lacks_is_named() -> None:
    state = adapted(1).state_dict()
    with pytest.raises(CheckpointError, match="The scaling of '0.lora_A.default.weight' must be known"):
        merge_tensors([state, state], [0.5, 0.5])
    assert adapter_names(state) == ["0.lora_A.default.weight"]
    alone = {key: value for key, value in state.items() if "lora_B" not in key}
    with pytest.raises(CheckpointError, match=r"'0\.lora_B\.default\.weight' is missing"):
        merge_tensors([alone, alone], [0.5, 0.5])
    other = state | {"0.lora_magnitude_vector.default.weight": torch.ones(4)}
    with pytest.raises(CheckpointError, match="magnitude"):
        merge_tensors([other, other], [0.5, 0.5])


@pytest.mark.parametrize("transposed", [False, True])
def test_a_base_of_either_layout(transposed: bool) -> None:
    a, b = torch.randn(2, 5, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    base = torch.randn((5, 3) if transposed else (3, 5), dtype=torch.float64)
    state = {"x.weight": base, "x.lora_A.weight": a, "x.lora_B.weight": b}
    merged = merge_tensors([state, state], [0.5, 0.5], {"x.lora_A.weight": 0.5})
    product = (0.5 * b @ a).T if transposed else 0.5 * b @ a
    torch.testing.assert_close(merged["x.weight"], base + product)


def test_means_and_what_is_kept() -> None:
    models = [
        {
            "weight": torch.tensor([1.0, 0.1, -math.inf, 3.0]),
            "half": torch.tensor([1.0], dtype=torch.bfloat16),
            "num_batches_tracked": torch.tensor(10),
            "flag": torch.tensor([True, False]),
        },
        {
            "weight": torch.tensor([2.0, 0.1, -math.inf, 5.0]),
            "half": torch.tensor([2.0], dtype=torch.bfloat16),
            "num_batches_tracked": torch.tensor(20),
            "flag": torch.tensor([False, True]),
        },
    ]
    merged = merge_tensors(models, [0.25, 0.75])
    torch.testing.assert_close(merged["weight"], torch.tensor([1.75, 0.1, -math.inf, 4.5]))
    assert float(merged["weight"][1]) == float(models[0]["weight"][1])  # to the bit
    assert merged["half"].dtype == torch.bfloat16
    assert int(merged["num_batches_tracked"]) == 20  # of the heavier one
    assert merged["flag"].tolist() == [False, True]
    assert int(merge_tensors(models, [0.5, 0.5])["num_batches_tracked"]) == 10  # the first of equals


def parent(folder: Path, model: nn.Module, step: int = 3, samples: int = 24, **extra: Any) -> Parent:
    config = {"trainer": {"seed": extra.pop("seed", 0)}, "model": {}, "resume": extra.pop("resume", None)}
    state = TrainingState(
        step,
        {"epoch": 0, "offset": 0},
        {"step": step},
        {"run_id": folder.name, "progress": {"samples": samples}, "devices": [], "config": config, **extra},
    )
    optimizer = torch.optim.Adam(model.parameters())
    return read_parent(save_checkpoint(folder, model, optimizer, state))


def test_parents_and_weights(tmp_path: Path) -> None:
    one = parent(tmp_path / "a", nn.Linear(2, 2), samples=30)
    two = parent(tmp_path / "b", nn.Linear(2, 2), samples=10, part={"device": "cpu:1", "samples": 90})
    check_parents([one, two])
    assert [one.name, two.name] == ["a", "cpu:1"]
    assert weights_of([one, two]) == (0.25, 0.75)
    assert weights_of([one, two], [3, 1]) == (0.75, 0.25)
    for wrong in ([1.0], [0.0, 0.0], [1.0, -1.0], [math.nan, 1.0]):
        with pytest.raises(CheckpointError, match="--weights"):
            weights_of([one, two], wrong)


def test_other_models_are_refused(tmp_path: Path) -> None:
    first = parent(tmp_path / "a", nn.Linear(2, 2))
    for number, model in enumerate([nn.Linear(2, 3), nn.Linear(2, 2, bias=False), nn.Linear(2, 2).double()]):
        with pytest.raises(CheckpointError, match=r"must be checkpoints of one model.*(weight|bias)"):
            check_parents([first, parent(tmp_path / f"{number}", model)])


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied(value: float) -> nn.Module:
        first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        second.weight = first.weight
        nn.init.constant_(first.weight, value)
        return nn.Sequential(first, second)

    parents = [parent(tmp_path / f"{value}", tied(value)) for value in (1.0, 3.0)]
    check_parents(parents)
    assert parents[0].tied == {"1.weight": "0.weight"}
    merged = merge_tensors([one.tensors for one in parents], [0.5, 0.5])
    assert {key: value.unique().tolist() for key, value in merged.items()} == {"0.weight": [2.0]}
    apart = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with pytest.raises(CheckpointError, match=r"1\.weight"):
        check_parents([parents[0], parent(tmp_path / "apart", apart)])


def test_other_starts_are_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    one, same = parent(tmp_path / "a", model), parent(tmp_path / "b", model, step=9)
    assert strangers([one, same]) is None
    told = strangers([one, same, parent(tmp_path / "c", model, seed=7)])
    assert told is not None
    assert "trainer.seed=7" in told
    resumed = [parent(tmp_path / f"{s}", model, seed=s, resume="runs/x") for s in (1, 2)]
    assert strangers(resumed) is None
    assert strangers([one, *resumed]) is not None


@pytest.mark.parametrize(
    ("losses", "means", "chosen"),
    [
        ([2.0, 1.0, 3.0], {(1, 0): 0.9, (1, 0, 2): 0.8}, [1, 0, 2]),
        ([2.0, 1.0, 3.0], {(1, 0): 1.1, (1, 2): 0.8}, [1, 2]),
        ([2.0, 1.0, 3.0], {(1, 0): 1.1, (1, 2): 1.2}, [1]),
        ([1.0, 1.0], {(0, 1): 1.0}, [0, 1]),
        ([1.0, 2.0], {(0, 1): math.nan}, [0]),
    ],
)
def test_a_greedy_soup(losses: list[float], means: dict[tuple[int, ...], float], chosen: list[int]) -> None:
    assert greedy_soup(losses, lambda some: means[tuple(some)]) == chosen
