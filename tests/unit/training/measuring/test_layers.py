"""What layers cost, against the model itself: its tensors, a real step of its halves, what autograd keeps."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from support import unbuilt_config
from torch import nn

from hetexp.core.call import call_model
from hetexp.core.config import Config, read_config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import instantiate
from hetexp.core.stage import Layer
from hetexp.model.base import build_model
from hetexp.model.layered import Pieces, call_layer, pieces_of
from hetexp.optimizer.build import build_optimizer
from hetexp.training.measuring.estimate import RunMemory
from hetexp.training.measuring.layers import describe_layers

CPU = DeviceSpec("cpu", "cpu", 0, "A CPU", "cpu")
TEXT = {"_target_": "hetexp.data.text.Text", "sequence_length": 16}
GPT = {"_target_": "hetexp.model.gpt.GPT", "num_layers": 3, "embedding_size": 32}
IMAGES = {"_target_": "hetexp.data.synthetic.Synthetic", "input_shape": [4], "num_classes": 3}
ADAM = {"_target_": "torch.optim.AdamW", "lr": 0.01}


class Pair(nn.Module):
    """Hands two tensors from layer to layer, and one of them has no gradient."""

    def forward(self, hidden: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(hidden)), counts + 1

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Paired(nn.Module):
    """A model of such layers; one of them is frozen, and `reads` asks for values while it computes."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Pair() for _ in range(3)])
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(5), persistent=False)
        self.scale: torch.Tensor
        self.reads = reads

    def pieces(self) -> Pieces:
        names = tuple(f"layers.{index}" for index in range(3))
        return Pieces(names, ("scale",), ("head",), self._begin, self._finish)

    def _begin(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.reads and float(inputs.sum()) == 1e9:
            raise AssertionError("no sample is like that")
        return inputs * self.scale[:1], torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)

    def _finish(self, payload: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.head(payload[0])
        return logits

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        payload = self._begin(inputs)
        for layer in self.layers:
            payload = layer(*payload)
        return self._finish(payload)


class Whole(nn.Module):
    """Says nothing of where it may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(inputs)
        return logits


def described(
    model: dict[str, Any],
    data: dict[str, Any],
    optimizer: dict[str, Any] = ADAM,
    precision: str = "float32",
    emulated: bool = False,
) -> tuple[tuple[Layer, ...], Config, RunMemory]:
    config = read_config(unbuilt_config(model=model, data=data, optimizer=optimizer))
    built = RunMemory(config, [CPU], [8], [precision], instantiate(config.strategy))
    return describe_layers(config, built, precision, emulated), config, built


OWN = "layered_models_of_this_test"
"""Name of a module that `_target_` finds."""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(OWN)
    module.__dict__.update(Paired=Paired, Whole=Whole)
    monkeypatch.setitem(sys.modules, OWN, module)


def tensors_of(model: nn.Module, names: list[str]) -> list[nn.Parameter]:
    """Return the parameters of modules, each once."""
    found = {id(p): p for name in names for p in model.get_submodule(name).parameters()}
    return list(found.values())


def test_layers_of_a_gpt_sum_up_to_it() -> None:
    layers, config, built = described(GPT, TEXT)
    model = build_model(config.model, built.data_facts)
    assert [layer.name for layer in layers] == ["blocks.0", "blocks.1", "blocks.2"]
    assert sum(layer.work for layer in layers) == pytest.approx(1)
    assert sum(layer.weight_bytes for layer in layers) == sum(4 * p.numel() for p in model.parameters())
    assert [layer.output_bytes for layer in layers] == [16 * 32 * 4, 16 * 32 * 4, 0]
    assert layers[0].weight_bytes > layers[1].weight_bytes  # the embeddings come with the first block
    assert layers[2].work > layers[1].work  # and the head with the last


def test_work_is_counted_operations() -> None:
    """Two linear layers: each gradient is as much work as forward, and the first one's input needs none."""
    layers, _, _ = described(
        {"_target_": "hetexp.model.mlp.MLP", "hidden_sizes": [8], "input_shape": [4]}, IMAGES
    )
    assert [layer.name for layer in layers] == ["layers.0", "layers.1", "layers.2", "layers.3"]
    first, last = 2 * 4 * 8, 3 * 8 * 3
    assert [layer.work for layer in layers] == pytest.approx(
        [0, first / (first + last), 0, last / (first + last)]
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", [ADAM, {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}])
def test_memory_of_stages_is_what_a_step_leaves(tied: bool, optimizer: dict[str, Any]) -> None:
    """The model in two stages, as two devices would hold it, each with an optimizer that steps."""
    layers, config, built = described({**GPT, "tie_weights": tied}, TEXT, optimizer)
    stages = [["token_embedding", "position_embedding", "blocks.0"], ["blocks.1", "blocks.2", "norm", "head"]]
    for names, held in zip(stages, (layers[:1], layers[1:]), strict=True):
        model = build_model(config.model, built.data_facts)
        parameters = tensors_of(model, names)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        stage = nn.ParameterList(parameters)
        stepping = build_optimizer(config.optimizer, stage)
        stepping.step()
        state = [t for one in stepping.state.values() for t in one.values() if isinstance(t, torch.Tensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        actual: list[list[torch.Tensor]] = [list(parameters), gradients, state]
        predicted = [
            sum(layer.weight_bytes for layer in held),
            sum(layer.trained_bytes for layer in held),
            sum(layer.state_bytes for layer in held),
        ]
        for tensors, count in zip(actual, predicted, strict=True):
            assert count == pytest.approx(sum(t.numel() * t.element_size() for t in tensors), rel=0.1)


@pytest.mark.parametrize("emulated", [False, True], ids=["without data", "on the CPU"])
def test_activations_are_what_autograd_keeps(emulated: bool) -> None:
    layers, config, built = described(GPT, TEXT, emulated=emulated)
    model = build_model(config.model, built.data_facts)
    pieces = pieces_of(model)
    assert pieces is not None
    size, (inputs, targets) = 5, built.sample
    payload = call_model(pieces.begin, inputs.expand(size, -1).contiguous())
    for layer in layers[:2]:
        payload = call_layer(model.get_submodule(layer.name), payload.detach().requires_grad_())
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = pieces.finish(model.get_submodule("blocks.2")(payload.detach().requires_grad_()))
        loss = built.local_loss(output, targets.expand(size, -1))
    assert layers[2].activation_bytes * size == pytest.approx(sum(kept.values()), rel=0.1)
    assert loss.requires_grad


def test_activations_follow_the_precision() -> None:
    full, half = (described(GPT, TEXT, precision=precision)[0] for precision in ("float32", "bfloat16"))
    assert half[1].activation_bytes < 0.7 * full[1].activation_bytes
    assert half[1].weight_bytes == full[1].weight_bytes


@pytest.mark.parametrize("reads", [False, True])
def test_tuples_frozen_layers_and_buffers(reads: bool) -> None:
    layers, _, _ = described({"_target_": f"{OWN}.Paired", "reads": reads}, IMAGES)
    weights = (4 * 4 + 4) * 4
    assert [layer.weight_bytes for layer in layers] == [weights, weights, weights + (4 * 3 + 3) * 4]
    assert [layer.trained_bytes for layer in layers] == [weights, 0, weights + (4 * 3 + 3) * 4]
    assert [layer.state_bytes > 0 for layer in layers] == [True, False, True]
    assert [layer.buffer_bytes for layer in layers] == [5 * 4, 0, 0]
    assert [layer.output_bytes for layer in layers] == [4 * 4 + 8, 4 * 4 + 8, 0]


def test_a_model_that_may_not_be_cut() -> None:
    with pytest.raises(ConfigError, match=r"`model` must say where it may be cut \(a method `pieces`"):
        described({"_target_": f"{OWN}.Whole"}, IMAGES)
    with pytest.raises(ConfigError, match="can be built and called"):
        described({"_target_": "hetexp.model.gpt.GPT", "num_heads": 3}, TEXT)
