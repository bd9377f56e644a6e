"""Parameters by name into groups, also of a part of the model, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetexp.core.errors import ConfigError
from hetexp.model.gpt import GPT
from hetexp.optimizer.build import build_optimizer, check_optimizer
from hetexp.optimizer.groups import parameter_groups

SGD: dict[str, Any] = {"_target_": "torch.optim.SGD", "lr": 0.1, "weight_decay": 0.5}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(1, 4, 1))
        self.head = nn.Linear(4, 2)


def grouped(section: dict[str, Any], model: nn.Module) -> list[tuple[set[str], float, float]]:
    """Return each group's names, rate and weight decay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(section, model)
    return [({names[p] for p in g["params"]}, g["lr"], g["weight_decay"]) for g in optimizer.param_groups]


def test_the_first_match_wins_and_the_rest_keeps_the_optimizers_options() -> None:
    groups = {
        "head": {"match": "head.*", "lr": 0.01},
        "rest": {"match": ["*.bias", "body.1.*"], "weight_decay": 0},
    }
    for form in (groups, list(groups.values())):
        assert grouped({**SGD, "groups": form}, Net()) == [
            ({"body.0.weight", "body.2.weight", "scale"}, 0.1, 0.5),
            ({"head.weight", "head.bias"}, 0.01, 0.5),
            ({"body.0.bias", "body.1.weight", "body.1.bias", "body.2.bias"}, 0.1, 0),
        ]


def test_no_decay_spares_a_group_with_its_own() -> None:
    section = {**SGD, "no_decay": True, "groups": [{"match": "head.*", "weight_decay": 0.2}]}
    assert grouped(section, Net()) == [
        ({"scale", "body.0.weight", "body.2.weight"}, 0.1, 0.5),
        ({"body.0.bias", "body.1.weight", "body.1.bias", "body.2.bias"}, 0.1, 0.0),
        ({"head.weight", "head.bias"}, 0.1, 0.2),
    ]


def test_no_decay_spares_vectors_of_any_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False))
    model.register_parameter("gain", nn.Parameter(torch.ones(4)))
    assert grouped({**SGD, "no_decay": True}, model) == [({"0.weight"}, 0.1, 0.5), ({"gain"}, 0.1, 0.0)]


def test_the_factor_of_the_batch_multiplies_the_rate_of_every_group() -> None:
    section = {**SGD, "groups": [{"match": "head.*", "lr": 0.01}]}
    rates = [group["lr"] for group in build_optimizer(section, Net(), lr_factor=4.0).param_groups]
    assert rates == pytest.approx([0.4, 0.04])


def test_without_keys_there_is_one_group_as_before() -> None:
    for section in (SGD, {**SGD, "groups": None, "no_decay": False}, {**SGD, "groups": []}):
        ((names, _, _),) = grouped(section, Net())
        assert len(names) == 9


def test_tied_parameters_match_by_any_name_and_frozen_ones_by_none() -> None:
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "num_heads": 1,
        "embedding_size": 4,
        "sequence_length": 3,
        "vocab_size": 5,
    }
    model = GPT(**sizes, tie_weights=True)
    found = grouped({**SGD, "groups": [{"match": "head.weight", "lr": 1.0}]}, model)
    assert [group for group in found if group[1] == 1.0] == [({"token_embedding.weight"}, 1.0, 0.5)]
    model.position_embedding.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="must match a trained parameter"):
        grouped({**SGD, "groups": [{"match": "position_embedding.*"}]}, model)


def test_a_part_of_the_model_has_all_groups() -> None:
    whole, part = Net(), Net()
    groups = parameter_groups({**SGD, "groups": [{"match": "head.*", "lr": 0.3}]}, whole)
    del part.head, part.scale
    optimizer = build_optimizer(SGD, part, groups=groups)
    assert [(g["lr"], len(g["params"])) for g in optimizer.param_groups] == [(0.1, 6), (0.3, 0)]
    for parameter in part.parameters():
        parameter.sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{"match": "hed.*"}], "`optimizer.groups[0].match` must match a trained parameter of the model"),
        ({"a": {"match": ["head.*", "tail"]}}, "`optimizer.groups.a.match` must match"),
        (
            [{"match": "*"}, {"match": "head.*"}],
            "`optimizer.groups[1].match` must be a pattern of parameters",
        ),
        ([{"match": "head.*", "leanring": 1}], "`optimizer.groups` sets leanring, which is no option of SGD"),
    ],
)
def test_groups_that_do_not_fit_the_model(groups: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer({**SGD, "groups": groups}, Net())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {**SGD, "groups": [{"match": "*", "lr": -1.0}]},
            "`optimizer.groups[0]`: Invalid learning rate: -1.0",
        ),
        ({**SGD, "groups": [{"match": "*", "momentun": 1}]}, "Did you mean `momentum`?"),
        ({"_target_": "torch.optim.Rprop", "no_decay": True}, "`optimizer.no_decay` must be false for"),
        ({"_target_": "torch.optim.LBFGS"}, "must be an optimizer whose step needs no closure"),
    ],
)
def test_what_is_refused_before_there_is_a_model(section: dict[str, Any], said: str) -> None:
    (problem,) = check_optimizer(section)
    assert said in problem


def needing_a_closure(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params)


def test_a_function_that_returns_one_that_needs_a_closure() -> None:
    with pytest.raises(ConfigError, match="closure"):
        build_optimizer({"_target_": f"{__name__}.needing_a_closure"}, Net())


def test_all_rates_follow_the_factor() -> None:
    section = {**SGD, "groups": [{"match": "head.*", "lr": 1.0}]}
    optimizer = build_optimizer(section, Net(), lr_factor=4.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 4.0]
