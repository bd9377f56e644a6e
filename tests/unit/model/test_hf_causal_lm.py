"""Language models of transformers: frozen but for adapters, and cut as their own forward pass goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from language_model import architecture, saved_base

from hetexp.checkpoint.model_state import match_model, pack_model
from hetexp.core.errors import ConfigError
from hetexp.model.cut import Piece, keep_only, whole_of
from hetexp.model.hf_causal_lm import HFCausalLM
from hetexp.model.recompute import recompute_layers
from hetexp.optimizer.build import build_optimizer

TOKENS = torch.randint(3, 259, (3, 11), generator=torch.Generator().manual_seed(0))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},  # scales embeddings; two kinds of rotary embeddings
    "mistral": {"sliding_window": 4},
    "starcoder2": {},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.3},
}


def built(kind: str = "llama", **options: Any) -> HFCausalLM:
    """Return a model whose adapters do something."""
    torch.manual_seed(0)
    sizes = options.pop("sizes", {})
    model = HFCausalLM(architecture=architecture(kind, **sizes), **({"rank": 2} | options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_pieces_give_what_the_model_itself_gives(kind: str) -> None:
    model = built(kind, sizes=FAMILIES[kind]).double()
    expected = model(TOKENS)
    expected.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    whole = whole_of(model)
    ranges = [(0, 1), (1, 3), (3, 5)]
    payload: Any = TOKENS
    for start, end in ranges:
        payload = Piece(model, whole.pieces, start, end)(payload)
    assert torch.equal(payload, expected)
    payload.sum().backward()
    for parameter, gradient in zip(
        [p for p in model.parameters() if p.requires_grad], gradients, strict=True
    ):
        assert gradient is not None and gradient.abs().max() > 0
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


def test_a_piece_needs_nothing_of_the_others() -> None:
    """Case 45: adapters and buffers follow their layer."""
    expected = built()(TOKENS)
    payload: Any = TOKENS
    for start, end in [(0, 2), (2, 4), (4, 5)]:
        model = built()
        whole = whole_of(model)
        piece = Piece(model, whole.pieces, start, end)
        keep_only(model, whole, [(start, end)])
        assert {int(n.split(".layers.")[1].split(".")[0]) for n in model.state_dict()} == set(
            range(start, end)
        )
        payload = piece(payload)
    assert torch.equal(payload, expected)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_other_parts_are_refused_and_train_whole(kind: str) -> None:
    model = built(kind)
    assert model(TOKENS).shape == (3, 11, 259)
    with pytest.raises(ConfigError, match="strategy=ddp trains it whole"):
        model.pieces()


def test_only_adapters_are_trained_and_saved() -> None:
    model = built(dropout=0.1, targets=["q_proj", "down_proj"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 5 * 2 * 2
    assert all(".q_proj.lora_" in name or ".down_proj.lora_" in name for name in trained)
    assert set(model.state_dict()) == trained
    optimizer = build_optimizer({"_target_": "torch.optim.AdamW", "lr": 0.1}, model)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters() if p.requires_grad
    }
    before = {name: p.clone() for name, p in model.named_parameters()}
    model(TOKENS).logsumexp(-1).sum().backward()
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == trained
    assert set(model.constant_names()) & set(before) == set(before) - trained


def test_a_state_is_loaded_strictly() -> None:
    one, other = built(), HFCausalLM(architecture=architecture(), rank=2)
    packed, left_out = pack_model(one)
    assert not left_out
    other.load_state_dict(match_model(packed, other), strict=True)
    assert all(torch.equal(tensor, packed[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({}, strict=True)
    name = next(iter(packed))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**packed, "lm.nothing.weight": packed[name]}, strict=True)


def test_a_folder_and_random_numbers_begin_with_the_same_adapters(tmp_path: Path) -> None:
    """Ranks whose bases take other random numbers, as another version of transformers would, agree."""
    base = saved_base(tmp_path)
    torch.manual_seed(5)
    loaded = HFCausalLM(folder=str(base), rank=2)
    torch.manual_seed(5)
    drawn = HFCausalLM(architecture=architecture(), rank=2)
    assert all(torch.equal(tensor, drawn.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.facts() != drawn.facts()
    torch.manual_seed(6)
    assert HFCausalLM(folder=str(base), rank=2).facts() == loaded.facts()


def test_a_base_keeps_its_type(tmp_path: Path) -> None:
    model = built(base_dtype="bfloat16").to(torch.float32)
    kinds = {p.requires_grad: p.dtype for p in model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    expected = model(TOKENS)
    pieces = model.pieces()
    stream = pieces.begin(TOKENS)
    for name in pieces.layer_names:
        stream = model.get_submodule(name)(stream.float())  # as it comes from another device
    assert torch.equal(pieces.finish(stream), expected)


def test_activations_computed_again_give_the_same_gradients() -> None:
    plain, again = built(), built()
    recompute_layers(again)
    for model in (plain, again):
        model(TOKENS).logsumexp(-1).sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_an_evaluation_before_training_leaves_nothing_that_autograd_refuses() -> None:
    pieces = built().pieces()
    model = built()
    pieces = model.pieces()
    layer = model.get_submodule(pieces.layer_names[0])
    with torch.inference_mode():
        layer(pieces.begin(TOKENS))
    layer(pieces.begin(TOKENS)).sum().backward()
    assert any(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"folder": "/nowhere"}, "`model.folder` must be a folder with a model's config.json"),
        (
            {"architecture": {"hidden_size": 8}},
            "`model.architecture` must be a configuration with a model_type",
        ),
        (
            {"architecture": {"model_type": "none"}, "vocab_size": 9},
            "`model.architecture` must be a decoder-only model",
        ),
        (
            {"architecture": {"model_type": "t5"}, "vocab_size": 9},
            "`model.architecture` must be a decoder-only",
        ),
        ({"targets": []}, "`model.targets` must be all-linear or at least one name"),
        ({"attention": "someone/kernels"}, "`model.attention` must be sdpa or eager"),
        ({"targets": ["qproj"], "vocab_size": 9}, "names of linear layers (down_proj, gate_proj, k_proj"),
        ({}, "`model.vocab_size` must be given if the data does not give it"),
    ],
)
def test_what_cannot_be_built_is_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HFCausalLM(**options)
    assert told in str(caught.value)


def test_a_tokenizer_of_more_tokens_than_the_model_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most the model's 259 tokens"):
        HFCausalLM(folder=str(saved_base(tmp_path)), vocab_size=300)
