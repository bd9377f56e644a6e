"""Layers in 4 bits: what they take, before anything is there, and the adapters that are trained beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from language_model import architecture

from hetexp.core.device import DeviceSpec
from hetexp.hardware.memory.estimate import MemoryEstimate, Workload, estimate_memory
from hetexp.hardware.memory.rules import rules_for
from hetexp.model.four_bit import Modelled, keep_in_four_bits
from hetexp.model.hf_causal_lm import HFCausalLM
from hetexp.model.recompute import recompute_layers
from hetexp.optimizer.build import build_optimizer

TOKENS = torch.randint(3, 259, (2, 64), generator=torch.Generator().manual_seed(0))


def planned(**options: object) -> HFCausalLM:
    """Return a model as the planner builds it: without data."""
    sizes = architecture(hidden_size=64, intermediate_size=128)
    with torch.device("meta"):
        model = HFCausalLM(architecture=sizes, rank=2, base_dtype="bfloat16", **options)  # type: ignore[arg-type]
    return model.to(torch.float32)  # type: ignore[no-any-return]


def estimate(model: HFCausalLM) -> MemoryEstimate:
    workload = Workload(
        model=model,
        build_optimizer=lambda m: build_optimizer({"_target_": "torch.optim.AdamW", "lr": 0.1}, m, False),
        loss=lambda output, targets: output.float().sum(),
        sample=(TOKENS, TOKENS),
        precision="bfloat16",
    )
    cpu = DeviceSpec(id="cpu", backend="cpu", index=0, name="cpu", vendor="cpu", memory_bytes=None)
    return estimate_memory(workload, 2, rules_for(cpu))


def test_the_estimate_counts_four_bits_and_adapters_only() -> None:
    model = planned(four_bit="nf4")
    found = estimate(model)
    assert found.reason is None
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained <= found.gradients <= 1.1 * trained
    assert found.optimizer_state is not None
    assert 2 * trained <= found.optimizer_state <= 2.2 * trained
    # A layer: q and o 64 × 64, k and v 64 × 32, three of 64 × 128, in half a byte each, with a scale for 64.
    linear = 5 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    tables = 5 * 7 * 4 * (16 + 256 + 1 + 2)
    rest = 2 * (2 * 259 * 64 + 11 * 64)
    expected = linear / 2 + linear / 64 + tables + rest + trained
    assert found.weights == pytest.approx(expected, rel=0.05)
    assert estimate(planned()).weights - found.weights == pytest.approx(1.5 * linear, rel=0.2)


def test_activations_computed_again_take_less() -> None:
    kept, again = planned(four_bit="nf4"), planned(four_bit="nf4")
    recompute_layers(again)
    less, more = estimate(again).activations, estimate(kept).activations
    assert less is not None and more is not None and less < 0.7 * more


def test_planned_layers_take_what_real_ones_take() -> None:
    pytest.importorskip("bitsandbytes")
    linear = nn.Linear(128, 256)
    real, modelled = nn.Sequential(nn.Linear(128, 256)), Modelled(linear.to("meta"), torch.float32)
    keep_in_four_bits(real, "nf4", torch.float32)
    weight: Any = real[0].weight
    state = weight.quant_state
    nested = state.state2
    tensors = [state.absmax, state.code, state.offset, nested.absmax, nested.code]
    real_bytes = weight.nbytes + sum(t.numel() * t.element_size() for t in tensors)
    assert modelled.weight.nbytes + sum(b.nbytes for b in modelled.buffers()) == real_bytes


def test_adapters_on_real_four_bits_learn() -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = HFCausalLM(architecture=architecture(), rank=2, four_bit="nf4", base_dtype="float32")
    model = model.to(torch.float32)
    model.to("cpu")
    optimizer = build_optimizer({"_target_": "torch.optim.AdamW", "lr": 0.01}, model)
    before = [p.clone() for p in model.parameters() if not p.requires_grad]
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert all(torch.equal(one, other) for one, other in zip(frozen, before, strict=True))
    pieces, expected = model.pieces(), model(TOKENS)
    stream = pieces.begin(TOKENS)
    for name in pieces.layer_names:
        stream = model.get_submodule(name)(stream)
    assert torch.equal(pieces.finish(stream), expected)
