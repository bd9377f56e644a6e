"""Activations that are computed again give the same gradients, bit by bit, from less memory and more work."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.hardware.emulation.pacing import count_work
from hetexp.hardware.memory.estimate import MemoryEstimate, Workload, estimate_memory
from hetexp.hardware.memory.rules import rules_for
from hetexp.model.base import build_model
from hetexp.model.convnet import ConvNet
from hetexp.model.gpt import GPT
from hetexp.model.recompute import _Call, layer_names, once, recompute_layers, recomputes

CARD = DeviceSpec(id="cuda:0", backend="cuda", index=0, name="GPU", vendor="nvidia", memory_bytes=2**34)


def gpt(num_layers: int = 3, dropout: float = 0.0) -> GPT:
    return GPT(num_layers, 2, 16, sequence_length=8, vocab_size=11, dropout=dropout, tie_weights=True)


def convnet() -> ConvNet:
    return ConvNet([4, 8], 2, groups=2, input_shape=[1, 8, 8], num_classes=3)


TOKENS = torch.arange(32).reshape(4, 8) % 11
IMAGES = torch.linspace(-1, 1, 4 * 64, dtype=torch.float64).reshape(4, 1, 8, 8)


def step(model: nn.Module, inputs: Any) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of a step, and what the generator gives after it."""
    torch.manual_seed(5)
    model.zero_grad()
    model(inputs).sin().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients, torch.rand(3)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [(gpt(), TOKENS), (gpt(dropout=0.4), TOKENS), (convnet(), IMAGES)],
    ids=["gpt", "dropout", "conv"],
)
def test_gradients_are_bit_equal(model: nn.Module, inputs: Tensor) -> None:
    model = model.double()
    again = copy.deepcopy(model)
    names = recompute_layers(again)
    assert len(names) == 3 if isinstance(model, GPT) else 8
    assert recomputes(again)
    assert not recomputes(model)
    assert [name for name, _ in again.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(again.state_dict()) == list(model.state_dict())
    (wanted, drawn), (found, then) = step(model, inputs), step(again, inputs)
    assert len(wanted) == len(found) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert torch.equal(drawn, then)  # the generator goes on from where forward left it
    copied = copy.deepcopy(again)
    assert all(torch.equal(a, b) for a, b in zip(wanted, step(copied, inputs)[0], strict=True))
    with torch.no_grad():
        list(copied.parameters())[-1].zero_()  # the copy computes with weights of its own
    assert all(torch.equal(a, b) for a, b in zip(wanted, step(again, inputs)[0], strict=True))


class Counting(nn.Module):
    """Counts its calls; takes and gives more than one value."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.done_once = 0
        self.linear = nn.Linear(3, 3)

    def forward(self, values: Tensor, *, scale: Tensor, label: str) -> tuple[Tensor, str]:
        self.calls += 1
        self.done_once = once(lambda: self.done_once + 1)
        return self.linear(values).tanh() * scale * self.done_once, label


class Stacked(nn.Module):
    """Layers in a list, as most people's models have them, one of them inside another list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counting(), Counting()])
        self.nested = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.ReLU())])

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values, label = block(values, scale=torch.ones(()), label="x")
            assert label == "x"
        for block in self.nested:
            values = block(values)
        return values


def test_layers_are_found_and_called_again_in_backward_only() -> None:
    model = Stacked()
    assert recompute_layers(model) == ["blocks.0", "blocks.1", "nested.0"]
    block = model.blocks[0]
    assert isinstance(block, Counting)
    model(torch.ones(2, 3)).sum().backward()
    assert (block.calls, block.done_once) == (2, 1)
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert (block.calls, block.done_once) == (3, 2)
    recompute_layers(model)  # a second time changes nothing
    model(torch.ones(2, 3)).sum().backward()
    assert (block.calls, block.done_once) == (5, 3)


def test_outside_of_a_layer_everything_is_done() -> None:
    numbers = iter(range(3))
    assert [once(lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(("kind", "arguments"), [("cuda", 1), ("xpu", 1), ("mps", 0)])
def test_every_devices_generator_is_set_back(
    monkeypatch: pytest.MonkeyPatch, kind: str, arguments: int
) -> None:
    """A device's own generator gives in backward what it gave in forward, and then goes on."""

    class Module:
        state = torch.tensor([7])

        def get_rng_state(self, *device: torch.device) -> Tensor:
            assert len(device) == arguments
            return self.state

        def set_rng_state(self, state: Tensor, *device: torch.device) -> None:
            assert len(device) == arguments
            self.state = state

    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    on_device = SimpleNamespace(device=torch.device(kind, 0))
    call = _Call([on_device, on_device, torch.zeros(1)])  # type: ignore[list-item]
    with call.first():
        module.state = torch.tensor([8])  # a draw
    module.state = torch.tensor([9])
    with contextlib.suppress(ZeroDivisionError), call.again():
        assert module.state == 7
        module.state = torch.tensor([8])
        raise ZeroDivisionError  # torch ends it early by an exception of its own
    assert module.state == 9


def test_a_model_without_layers_is_refused() -> None:
    assert layer_names(nn.Linear(2, 2)) == []
    node = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2}
    build_model(node, {})
    with pytest.raises(ConfigError, match=r"`trainer.activation_checkpointing` must be false .*\(Linear\)"):
        build_model(node, {}, recompute=True)


def memory(num_layers: int, recompute: bool) -> MemoryEstimate:
    with torch.device("meta"):
        model = GPT(num_layers, 4, 64, sequence_length=64, vocab_size=32)
    if recompute:
        recompute_layers(model)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    workload = Workload(
        model,
        lambda model: torch.optim.SGD(model.parameters()),
        lambda output, targets: functional.cross_entropy(output.flatten(0, 1), targets.flatten()),
        (tokens, tokens),
    )
    estimate = estimate_memory(workload, 16, rules_for(CARD))
    assert estimate.reason is None
    return estimate


def test_the_memory_estimate_follows() -> None:
    between = 16 * 64 * 64 * 4  # what goes from layer to layer: all that is kept of one
    few, many = (memory(n, recompute=True).phases["after_forward"] for n in (4, 16))
    assert (many - few) / 12 == pytest.approx(between, rel=0.15)
    kept = memory(16, recompute=False)
    assert memory(16, recompute=True).activations * 4 < kept.activations  # type: ignore[operator]
    assert memory(16, recompute=True).weights == kept.weights


def test_the_second_forward_pass_is_counted_as_work() -> None:
    model = gpt(6).double()
    forward, backward, fractions = count_work(model, TOKENS)
    recompute_layers(model)
    forward_again, backward_again, fractions_again = count_work(model, TOKENS)
    assert forward_again == forward
    head = 2 * 8 * 16 * 11  # outside of the layers
    # All but what only the layer's output needs, its last product.
    last = 6 * 2 * 8 * 64 * 16
    assert backward_again - backward == forward - head - last
    assert sum(fraction for _, fraction in fractions_again) == pytest.approx(1)
    assert len(fractions_again) == len(fractions)
