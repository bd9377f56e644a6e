"""What a person types is judged against the real configuration, every mistake at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf

from hetexp.app import CONFIG_NAME, check, check_command_line, compose_config, conf_dir, register_resolvers
from hetexp.core.compose.conf_folders import name_own_conf_dir
from hetexp.core.compose.overrides import Overrides, compose_typed
from hetexp.core.config import own_arguments
from hetexp.core.sweep.grid import compose_jobs
from hetexp.plan.run_spec import Request

Type = Callable[..., Overrides]


@pytest.fixture(scope="module")
def loader() -> Iterator[Any]:
    register_resolvers()
    hydra = Hydra.create_main_hydra2("hetexp", create_config_search_path(str(conf_dir())))
    yield hydra.config_loader
    GlobalHydra.instance().clear()


@pytest.fixture
def typed(loader: Any) -> Type:
    """Judge the words of a command line."""

    def judge(*words: str, sweep: bool = False) -> Overrides:
        return Overrides(loader, CONFIG_NAME, words, sweep)

    return judge


def value(overrides: Overrides, key: str) -> Any:
    return OmegaConf.select(overrides.compose(), key)


@pytest.mark.parametrize(
    ("word", "key", "composed"),
    [
        ("trainer.max_steps=5", "trainer.max_steps", 5),
        ("model=mlp", "model.hidden_sizes", [64, 64]),
        ("hardware.devices=[cpu,cpu]", "hardware.devices", ["cpu", "cpu"]),
        ("name='a=b'", "name", "a=b"),
        ("trainer.clip_norm=null", "trainer.clip_norm", None),
        ("+trainer.extra=1", "trainer.extra", 1),
        ("++trainer.max_steps=7", "trainer.max_steps", 7),
        ("~trainer.loss", "trainer.loss", None),
        ("hydra.run.dir=/tmp/x", "hydra.run.dir", "/tmp/x"),
        ("balancing=manual", "balancing._target_", "hetexp.balancing.manual.Manual"),
        ("debug=fast", "trainer.fast_dev_run", 2),
    ],
)
def test_what_is_right_has_no_problem(typed: Type, word: str, key: str, composed: Any) -> None:
    overrides = typed(word)
    assert overrides.problems == []
    assert value(overrides, key) == composed


def test_deleted_keys_are_gone(typed: Type) -> None:
    overrides = typed("~trainer.loss")
    assert "loss" not in overrides.compose().trainer


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "strategy=dpp",
            ["`strategy` must be one of ", "ddp", "but is 'dpp' instead.", "Did you mean `dp`?"],
        ),
        (
            "trainer.max_stps=5",
            [
                "`trainer.max_stps` is not a key of the configuration (its value is 5).",
                "Did you mean `max_steps`?",
            ],
        ),
        ("strateggy=ddp", ["`strateggy` is not a key of the configuration", "Did you mean `strategy`?"]),
        ("trainer.max_steps.deep=1", ["`trainer.max_steps.deep` is not a key of the configuration"]),
        ("hardware.devices.9=cpu", ["`hardware.devices.9` is not a key"]),
        (
            "resume=/runs/epoch=9.ckpt",
            [
                "`resume` must be given as key=value that Hydra can read",
                "but is 'resume=/runs/epoch=9.ckpt' instead.",
                "quotes",
            ],
        ),
        ("trainer.max_steps", ["`trainer.max_steps` must be given as key=value"]),
        ("name=[a", ["`name` must be given as key=value that Hydra can read, but is 'name=[a' instead."]),
        (
            "balancing.weights=1,2",
            [
                "`balancing.weights` must be one value without --multirun, but is '1,2' instead.",
                "'balancing.weights=[…]'",
                "-m",
            ],
        ),
        ("model=mlp,gpt", ["`model` must be one value without --multirun, but is 'mlp,gpt' instead."]),
        ("trainer.seed=range(3)", ["`trainer.seed` must be one value without --multirun"]),
    ],
)
def test_what_is_wrong_is_told(typed: Type, word: str, told: list[str]) -> None:
    overrides = typed(word)
    assert len(overrides.problems) == 1, overrides.problems
    for part in told:
        assert part in overrides.problems[0]


def test_every_mistake_is_told_and_the_rest_is_composed(typed: Type) -> None:
    overrides = typed(
        "strategy=dpp", "trainer.max_stps=5", "name=[a", "model=mlp", "trainer.seed=3", "data=digts"
    )
    assert [problem.split("`")[1] for problem in overrides.problems] == [
        "strategy",
        "name",
        "data",
        "trainer.max_stps",
    ]
    composed = overrides.compose()
    assert composed.trainer.seed == 3
    assert composed.model._target_ == "hetexp.model.mlp.MLP"
    assert composed.strategy._target_ == "hetexp.strategy.ddp.DDP"


def test_keys_are_those_of_the_chosen_option(typed: Type) -> None:
    assert typed("model=mlp", "model.dropout=0.1").problems == []
    assert typed("model.dropout=0.1", "model=mlp").problems == []  # the order does not count
    assert len(typed("model.dropout=0.1").problems) == 1  # the default model has none
    assert len(typed("model=mlp", "model.widths=[1]").problems) == 1


@pytest.mark.parametrize("word", ["+trainer.seed=5", "~trainer.nope", "+model=mlp"])
def test_what_only_hydra_can_refuse_is_refused_when_composing(typed: Type, word: str) -> None:
    overrides = typed(word)
    assert overrides.problems == []
    with pytest.raises(HydraException):
        overrides.compose()


def test_a_key_that_an_earlier_word_adds_is_known(typed: Type) -> None:
    overrides = typed("+trainer.extra={a: 1}", "trainer.extra.a=2")
    assert overrides.problems == []
    assert value(overrides, "trainer.extra.a") == 2


def test_a_key_below_a_value_that_an_earlier_word_set_is_known(typed: Type) -> None:
    overrides = typed("hardware.devices=[{device: cpu, count: 1}]", "hardware.devices.0.count=2")
    assert overrides.problems == []
    assert value(overrides, "hardware.devices.0.count") == 2


# ---------------------------------------------------------------- sweeps


@pytest.mark.parametrize(
    "word",
    [
        "model=mlp,gpt",
        "model=choice(mlp,gpt)",
        "balancing.weights=[3,1],[1,1]",
        "trainer.seed=range(3)",
        "trainer.seed=1,2,3",
        "model=glob(*)",
        "model=glob([m*,g*])",
        "optimizer.lr=interval(0,1)",
        "trainer.seed=shuffle(1,2)",
    ],
)
def test_sweeps_are_right_with_multirun(typed: Type, word: str) -> None:
    words = [word] if not word.startswith("balancing") else ["balancing=manual", word]
    assert typed(*words, sweep=True).problems == []
    assert any("without --multirun" in problem for problem in typed(*words).problems)


def test_each_choice_of_a_sweep_is_judged(typed: Type) -> None:
    found = typed("model=mlp,mpl,nett", sweep=True).problems
    assert len(found) == 2
    assert "'mpl'" in found[0]
    assert "'nett'" in found[1]


def test_a_sweep_over_an_unknown_key_is_told(typed: Type) -> None:
    assert len(typed("trainer.sed=1,2", sweep=True).problems) == 1


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("sweep.name=../mine", "`sweep.name` must be null, or a name of letters"),
        ("sweep.name=/tmp/mine", "but is '/tmp/mine' instead."),
        ("sweep.name='a=b'", "but is 'a=b' instead."),
        ("sweep.name=", "but is '' instead."),
        (
            "sweep.name=a,b",
            "must be one name: it is that of the whole sweep, but is 'a,b' instead.",
        ),
    ],
)
def test_a_sweep_has_one_name_that_is_a_folder(typed: Type, word: str, told: str) -> None:
    (problem,) = typed("trainer.seed=1,2", word, sweep=True).problems
    assert told in problem


def test_the_folder_of_a_sweep(typed: Type) -> None:
    def folder(*words: str) -> Any:
        return value(typed("trainer.seed=1,2", *words, sweep=True), "hydra.sweep.dir")

    assert folder("sweep.name=2026-11-28/14-03-02-ff8120") == "outputs/sweeps/2026-11-28/14-03-02-ff8120"
    assert folder("sweep.name=7") == "outputs/sweeps/7"
    assert folder("sweep.name=mine", "hydra.sweep.dir=/tmp/x") == "/tmp/x"
    pattern = r"outputs/sweeps/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-[0-9a-f]{6}"
    assert re.fullmatch(pattern, folder())


def test_sweeps_do_not_keep_the_rest_from_being_composed(typed: Type) -> None:
    composed = typed("model=mlp,gpt", "trainer.seed=1,2", "trainer.max_steps=4", sweep=True).compose()
    assert composed.trainer.max_steps == 4
    assert composed.trainer.seed == 0


def test_no_words_no_problems(typed: Type) -> None:
    overrides = typed()
    assert overrides.problems == []
    assert overrides.compose().trainer.global_batch_size == 64


@pytest.mark.parametrize("refused", ["~trainer.nope", "+trainer.seed=5"])
def test_what_hydra_refuses_does_not_hide_the_rest(refused: str) -> None:
    GlobalHydra.instance().clear()  # the loader of the other tests
    arguments = get_args_parser().parse_args([refused, "trainer.max_stps=5", "model=mpl"])
    found = "\n".join(check_command_line(arguments))
    for part in (refused[1:].partition("=")[0], "trainer.max_stps", "'mpl'"):
        assert part in found


def two_of_eps(
    params: Any, lr: float, eps: tuple[float, float] = (1e-30, 1e-3), weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, weight_decay=weight_decay)


SMALL = ("hardware=cpu", "model=mlp", "data=synthetic", "balancing=equal")


@pytest.mark.parametrize(
    ("words", "section", "left"),
    [
        (
            ["optimizer._target_=torch.optim.RMSprop", "optimizer.lr=0.1"],
            "optimizer",
            {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-8, "maximize": False, "foreach": None},
        ),
        (
            [f"optimizer._target_={__name__}.two_of_eps"],
            "optimizer",
            {"lr": 0.001, "weight_decay": 0.01},
        ),
        (["model=gpt", "model._target_=hetexp.model.mlp.MLP"], "model", {"dropout": 0.0}),
        (["data=text", "data._target_=hetexp.data.synthetic.Synthetic"], "data", {"sequence_length": 128}),
        (["balancing=auto", "balancing._target_=hetexp.balancing.equal.Equal"], "balancing", {}),
        (["logger=csv", "logger._target_=hetexp.logger.base.NoLogger"], "logger", {}),
    ],
)
def test_another_class_keeps_what_it_takes_of_the_options_arguments(
    words: list[str], section: str, left: dict[str, Any]
) -> None:
    """Case 92: what is typed, composed for a script, or a job of a sweep."""
    register_resolvers()
    GlobalHydra.instance().clear()
    typed, problems = compose_typed([*SMALL, *words])
    assert typed is not None and not problems
    assert not check(typed, Request(Path.cwd(), Path.cwd()), leases=False).problems
    (job,), problems = compose_jobs([*SMALL, *words])
    assert not problems
    for composed in (typed, job.config, compose_config([*SMALL, *words])):
        node = composed[section]
        arguments = own_arguments(section, dict(node))
        kept = {key: value for key, value in arguments.items() if not key.startswith("_")}
        assert {key: value for key, value in kept.items() if key in left or value is not None} == left


def test_a_typed_argument_that_the_class_does_not_take_is_refused(tmp_path: Path) -> None:
    GlobalHydra.instance().clear()
    words = [*SMALL, "optimizer._target_=torch.optim.RMSprop"]

    def problems(*more: str) -> list[str]:
        return check_command_line(get_args_parser().parse_args([*words, *more]))

    assert problems() == []
    (problem,) = problems("optimizer.amsgrad=false")  # as it is by default, but typed
    assert "`optimizer.amsgrad` is not an argument of torch.optim.RMSprop" in problem
    (problem,) = problems("optimizer.betas=[0.8,0.9]")
    assert "`optimizer.betas` is not an argument" in problem
    (tmp_path / "optimizer").mkdir()
    shipped = (conf_dir() / "optimizer" / "adamw.yaml").read_text()
    (tmp_path / "optimizer" / "adamw.yaml").write_text(shipped)
    name_own_conf_dir(tmp_path)  # a file of the user's own is typed, too
    try:
        assert len(problems()) == 3
    finally:
        name_own_conf_dir(None)
    (tmp_path / "optimizer" / "adamw.yaml").unlink()
    (tmp_path / "experiment").mkdir()
    said = "# @package _global_\noptimizer:\n  _target_: torch.optim.RMSprop\n  amsgrad: true\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(said)
    name_own_conf_dir(tmp_path)
    try:
        words = [*SMALL, "experiment=mine"]
        (problem,) = problems()
        assert "`optimizer.amsgrad` is not an argument" in problem
    finally:
        name_own_conf_dir(None)


LINEAR = "model._target_=torch.nn.Linear"


@pytest.mark.parametrize(
    "words",
    [
        ["model=custom", LINEAR, "model.in_features=3", "model.bias=false"],
        ["model.in_features=3", "model.bias=false", "model=custom", LINEAR],
        ["model=custom", LINEAR, "+model.in_features=3", "++model.bias=false"],
    ],
)
def test_an_argument_of_a_class_needs_no_sign(typed: Type, words: list[str]) -> None:
    overrides = typed(*words)
    assert overrides.problems == []
    assert value(overrides, "model.in_features") == 3
    assert value(overrides, "model.bias") is False
    assert [word.lstrip("+") for word in overrides.words] == [word.lstrip("+") for word in words]
    assert all(word.startswith("+") for word in overrides.words if "in_features" in word or "bias" in word)


def test_a_swept_argument_needs_no_sign(typed: Type) -> None:
    overrides = typed("model=custom", LINEAR, "model.in_features=3,4", sweep=True)
    assert overrides.problems == []
    assert overrides.words[-1] == "++model.in_features=3,4"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer._target_=torch.optim.RMSprop", "optimizer.centerd=true"], "Did you mean `centered`?"),
        (["model=custom", LINEAR, "model.zzz=1"], "It takes in_features, out_features, bias, device, dtype."),
        (["model=custom", "model.hidden=3"], "`model.hidden` is not a key"),
    ],
)
def test_an_argument_that_a_class_lacks(typed: Type, words: list[str], said: str) -> None:
    (problem,) = typed(*words).problems
    assert said in problem


def test_options_of_ones_own_with_a_byte_order_mark(tmp_path: Path) -> None:
    GlobalHydra.instance().clear()
    files = {
        "model/mine.yaml": "_target_: torch.nn.Linear\nin_features: 64\n",
        "optimizer/lion.yaml": "_target_: torch.optim.Rprop\n_partial_: true\nlr: 0.1\n",
        "experiment/short.yaml": "# @package _global_\ntrainer:\n  max_steps: 3\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    words = ["model=mine", "model.out_features=10", "optimizer=lion", "experiment=short"]
    name_own_conf_dir(tmp_path)
    try:
        composed, problems = compose_typed(words, config_dir=str(tmp_path))
    finally:
        name_own_conf_dir(None)
    assert problems == []
    assert composed is not None
    assert dict(composed.model) == {"_target_": "torch.nn.Linear", "in_features": 64, "out_features": 10}
    assert composed.optimizer._target_ == "torch.optim.Rprop"
    assert composed.trainer.max_steps == 3
