"""The models that ship with hetexp, and how the `model` section becomes one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional

from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import check_component, locate
from hetexp.data.digits import Digits
from hetexp.data.sampler import GlobalSampler, Position
from hetexp.model.base import WithAuxiliary, build_model
from hetexp.model.convnet import ConvNet
from hetexp.model.gpt import GPT
from hetexp.model.mlp import MLP

CONF = Path(__file__).parents[3] / "conf" / "model"
IMAGES = {"input_shape": [1, 8, 8], "num_classes": 10}
TOKENS = {"vocab_size": 11, "sequence_length": 12}
FACTS: dict[str, dict[str, Any]] = {"mlp": IMAGES, "convnet": IMAGES, "gpt": TOKENS}


def section(name: str, **changes: Any) -> dict[str, Any]:
    node = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"), resolve=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()} | changes


def batch(name: str, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if name == "gpt":
        return torch.randint(11, (size, 12), generator=generator)
    return torch.rand(size, 1, 8, 8, generator=generator, dtype=dtype)


def small_gpt(**changes: Any) -> GPT:
    arguments: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "embedding_size": 16} | TOKENS
    torch.manual_seed(0)
    return GPT(**(arguments | changes))


@pytest.fixture(scope="module")
def digits() -> Any:
    """Built once, and before the environment is watched: scikit-learn sets variables when first imported."""
    return Digits(size=8)


@pytest.mark.parametrize("name", FACTS)
def test_yaml_lists_every_argument_with_its_default(name: str) -> None:
    node = section(name)
    assert check_component("model", node) == []
    signature = inspect.signature(locate(node.pop("_target_"))).parameters
    defaults = {key: p.default for key, p in signature.items()}
    assert node == {key: list(d) if isinstance(d, tuple) else d for key, d in defaults.items()}
    assert all(node[fact] is None for fact in FACTS[name])


@pytest.mark.parametrize("kind", [ConvNet, GPT])
def test_check_and_constructor_have_the_same_defaults(kind: Any) -> None:
    constructor = inspect.signature(kind).parameters
    for name, parameter in inspect.signature(kind.check).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert parameter.default == constructor[name].default


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_shape_for_any_batch_and_precision(name: str, size: int, dtype: torch.dtype) -> None:
    model = build_model(section(name), FACTS[name]).to(dtype)
    logits = model(batch(name, size, dtype))
    assert logits.shape == ((size, 12, 11) if name == "gpt" else (size, 10))
    assert logits.dtype == dtype
    logits.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("name", FACTS)
def test_a_sample_does_not_depend_on_its_batch(name: str) -> None:
    """What makes any split of a global batch equal to one device's run."""
    model = build_model(section(name), FACTS[name]).double()
    inputs = batch(name, 5, torch.float64)
    alone = torch.cat([model(inputs[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(model(inputs), alone, rtol=0, atol=1e-12)


# build_model


def test_the_configuration_wins_over_the_facts() -> None:
    model = build_model(section("mlp", num_classes=3), IMAGES | {"unknown_to_the_model": 1})
    assert model(batch("mlp", 2)).shape == (2, 3)


def test_absent_arguments_are_taken_from_the_facts() -> None:
    model = build_model({"_target_": "torch.nn.Linear", "in_features": 4}, {"out_features": 5, "bias": False})
    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (5, 4)
    assert model.bias is None


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build_model({"_target_": "pathlib.PurePosixPath"}, {})
    assert caught.value.problems == [
        "`model._target_` must build a torch.nn.Module, but builds a pathlib.PurePosixPath instead."
    ]


@pytest.mark.parametrize("name", FACTS)
def test_unknown_facts_are_all_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(section(name), {})
    named = {problem.split("`")[1] for problem in caught.value.problems}
    assert named == {f"model.{fact}" for fact in FACTS[name]}


# Clashes between arguments


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (
            "convnet",
            {"widths": [32, 36], "groups": 8},
            "`model.groups` must be a divisor of every number in `model.widths` ([32, 36]), "
            "but is 8 instead.",
        ),
        (
            "convnet",
            {"input_shape": [16]},
            "`model.input_shape` must be [channels, height, width], but is [16] instead.",
        ),
        (
            "gpt",
            {"embedding_size": 130},
            "`model.embedding_size` must be a multiple of `model.num_heads` (4), but is 130 instead.",
        ),
    ],
)
def test_clashes_are_told_before_and_while_building(name: str, changes: dict[str, Any], problem: str) -> None:
    node = section(name, **changes)
    assert check_component("model", node) == [problem]
    with pytest.raises(ConfigError) as caught:
        build_model(node, FACTS[name])
    assert caught.value.problems == [problem]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mlp", {"hidden_sizes": [0], "dropout": 1.0, "activation": "rellu"}),
        ("convnet", {"widths": [], "blocks_per_width": 0, "groups": 0}),
        ("gpt", {"num_layers": 0, "dropout": -0.1, "vocab_size": 0}),
    ],
)
def test_limits_are_told_by_key(name: str, changes: dict[str, Any]) -> None:
    problems = check_component("model", section(name, **changes))
    assert {p.split("`")[1].partition("[")[0] for p in problems} == {f"model.{key}" for key in changes}


# MLP


def test_mlp_without_hidden_layers_is_linear() -> None:
    model = MLP(hidden_sizes=[], input_shape=[2, 3], num_classes=4)
    assert sum(p.numel() for p in model.parameters()) == 6 * 4 + 4


def test_mlp_drops_values_only_while_training() -> None:
    torch.manual_seed(0)
    model = MLP(hidden_sizes=[64], input_shape=[8], num_classes=4, dropout=0.5)
    inputs = torch.rand(4, 8)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


# ConvNet


def test_convnet_is_small_and_depth_is_configurable() -> None:
    def count(**changes: Any) -> int:
        arguments: dict[str, Any] = IMAGES | changes
        return sum(p.numel() for p in ConvNet(**arguments).parameters())

    assert 100_000 < count() < 200_000
    two = {"widths": [32, 64]}
    block_of = {width: 9 * width**2 + 2 * width for width in (32, 64)}
    assert count(**two, blocks_per_width=2) == count(**two, blocks_per_width=1) + sum(block_of.values())
    assert count(**two, blocks_per_width=[2, 1]) == count(**two, blocks_per_width=1) + block_of[32]
    assert count(**two, blocks_per_width=[1, 3]) == count(**two, blocks_per_width=1) + 2 * block_of[64]


def test_groups_of_channels_fit_each_width_unless_they_are_given() -> None:
    def groups(**changes: Any) -> list[int]:
        arguments: dict[str, Any] = IMAGES | {"widths": [64, 12, 6], "blocks_per_width": 1} | changes
        model = ConvNet(**arguments)
        return [module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)]

    assert groups() == [16, 16, 4, 4, 2, 2]
    assert groups(groups=3, widths=[6]) == [3, 3]


def test_convnet_takes_images_of_any_size() -> None:
    model = ConvNet(widths=[8, 8, 8, 8], input_shape=[3, 5, 9], num_classes=2)
    assert model(torch.rand(2, 3, 5, 9)).shape == (2, 2)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operations: on a busy machine two threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_convnet_learns_real_digits(digits: Any) -> None:
    (train_x, train_y), (test_x, test_y) = digits.train.tensors, digits.evaluation.tensors
    torch.manual_seed(0)
    model = ConvNet(widths=[32, 64], blocks_per_width=1, **digits.facts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler, position = GlobalSampler(len(train_x), 64, seed=0), Position()
    while position.epoch < 3:
        indices, position = sampler.batch(position)
        chosen = torch.from_numpy(indices)
        optimizer.zero_grad()
        loss: torch.Tensor = functional.cross_entropy(model(train_x[chosen]), train_y[chosen])
        torch.autograd.backward(loss)
        optimizer.step()
    with torch.no_grad():
        accuracy = float((model(test_x).argmax(1) == test_y).float().mean())
    assert accuracy > 0.9


# GPT


def test_gpt_sees_no_later_token() -> None:
    model = small_gpt().double()
    tokens = batch("gpt", 2)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 11
    before, after = model(tokens).detach(), model(changed).detach()
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert float((before[:, 7:] - after[:, 7:]).abs().min()) > 0


def test_gpt_sees_every_earlier_token() -> None:
    model = small_gpt().double()
    embedded = model.token_embedding(batch("gpt", 1)).detach().requires_grad_()
    model.token_embedding.register_forward_hook(lambda *_: embedded)
    model(batch("gpt", 1))[0, -1].square().sum().backward()
    assert embedded.grad is not None
    assert bool((embedded.grad[0].abs().sum(1) > 0).all())


def test_gpt_takes_shorter_texts_and_refuses_longer_ones() -> None:
    model = small_gpt()
    tokens = batch("gpt", 1)
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])
    with pytest.raises(ConfigError) as caught:
        model(torch.zeros(1, 13, dtype=torch.int64))
    assert caught.value.problems == [
        "`model.sequence_length` must be at least the 13 tokens of a sample, but is 12 instead."
    ]


def test_gpt_tied_weights_share_storage() -> None:
    tied, free = small_gpt(tie_weights=True), small_gpt()
    assert tied.head.weight.data_ptr() == tied.token_embedding.weight.data_ptr()
    assert free.head.weight.data_ptr() != free.token_embedding.weight.data_ptr()
    numbers = [sum(p.numel() for p in model.parameters()) for model in (free, tied)]
    assert numbers[0] - numbers[1] == 11 * 16


def test_gpt_without_bias_has_only_weights() -> None:
    assert {name.rpartition(".")[2] for name, _ in small_gpt(bias=False).named_parameters()} == {"weight"}
    assert any(name.endswith("bias") for name, _ in small_gpt().named_parameters())


def test_gpt_starts_near_a_uniform_guess() -> None:
    model = small_gpt(num_layers=6, embedding_size=64)
    targets = torch.randint(11, (8 * 12,), generator=torch.Generator().manual_seed(1))
    loss = functional.cross_entropy(model(batch("gpt", 8)).flatten(0, 1), targets)
    assert loss.item() == pytest.approx(float(torch.tensor(11.0).log()), abs=0.1)


def test_gpt_drops_values_only_while_training() -> None:
    model = small_gpt(dropout=0.5)
    tokens = batch("gpt", 2)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_experts_balance_loss_is_least_where_tokens_spread_evenly() -> None:
    model = small_gpt(num_experts=4, experts_per_token=1, balance_weight=0.5, num_layers=1)
    block: Any = model.blocks[0]
    tokens = batch("gpt", 6)
    told = model(tokens)
    assert isinstance(told, WithAuxiliary)
    assert told.output.shape == (6, 12, 11)
    assert told.auxiliary.shape == (6,)
    with torch.no_grad():
        block.mlp.router.weight.zero_()  # every expert as probable as every other
        torch.testing.assert_close(model(tokens).auxiliary, torch.full((6,), 0.5))
        block.mlp.router.weight[2] = 100.0
        block.mlp_norm.bias.fill_(1.0)  # all tokens want the same one
        torch.testing.assert_close(model(tokens).auxiliary, torch.full((6,), 2.0))
    assert isinstance(model.eval()(tokens), torch.Tensor)


def test_experts_have_a_gradient_whether_a_token_uses_them_or_not() -> None:
    model = small_gpt(num_experts=8, experts_per_token=1).double()
    layer: Any = model.blocks[0].mlp
    logits, balance, _ = model(batch("gpt", 1)[:, :2])
    (logits.sum() + balance.sum()).backward()
    gradients = [expert.input.weight.grad for expert in layer.experts]
    assert all(gradient is not None for gradient in gradients)
    assert any(not gradient.any() for gradient in gradients)
    assert layer.router.weight.grad.any()


def test_a_token_gets_the_mean_of_its_experts_by_their_weights() -> None:
    model = small_gpt(num_experts=3, experts_per_token=2).double()
    layer: Any = model.blocks[0].mlp
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    mixed, _ = layer(hidden)
    token = hidden[1, 3]
    probabilities = layer.router(token).softmax(-1)
    best = probabilities.topk(2)
    expected = sum(p * layer.experts[int(i)](token) for p, i in zip(*best, strict=True)) / best.values.sum()
    torch.testing.assert_close(mixed[1, 3], expected)
