"""`_target_` nodes: judged by the signature of their class before anything is built."""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from omegaconf import OmegaConf
from pydantic import BaseModel, Field, PositiveInt

from hetexp.core.errors import ConfigError
from hetexp.core.instantiate import (
    check_component,
    instantiate,
    locate,
    only_trusted,
    parameters,
    untrusted,
)

FACTS = ", or, if the data's `facts` have it, give the argument a default of None."


class Net:
    """Takes one of each kind."""

    def __init__(  # type: ignore[no-untyped-def]
        self,
        width: PositiveInt,
        rate: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        kind: Literal["a", "b"] = "a",
        sizes: int | list[int] = 1,
        path: Path | None = None,
        untyped=None,
    ) -> None:
        self.width, self.rate, self.kind, self.sizes, self.path = width, rate, kind, sizes, path
        self.untyped = untyped


class Open(Net):
    """Takes anything by name."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(width)
        self.options = options


def _with_more(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a constructor take more arguments than it names, as Hugging Face's configurations do."""

    @functools.wraps(function)
    def wrapped(self: Any, *args: Any, more: int = 0, **options: Any) -> None:
        known = {name: options.pop(name) for name in list(options) if name == "width"}
        function(self, *args, **known)
        self.more, self.options = more, options

    return wrapped


class Decorated:
    @_with_more
    def __init__(self, width: int = 1) -> None:
        self.width = width


class HeirOfDecorated(Decorated):
    """Has the constructor of its base class."""


@dataclass
class Configured:
    """Gives all other arguments to `__post_init__`, by a decorator that shows the fields alone."""

    width: int = 1

    def __post_init__(self, **options: Any) -> None:
        self.options = options


class Loading:
    """Is made by a method of its class."""

    def __init__(self, width: int) -> None:
        self.width = width

    @classmethod
    def from_config(cls, config: Any = None, **options: Any) -> Loading:
        return cls(**{**(config or {}), **options})


class Judging:
    """Judges two arguments together."""

    def __init__(self, low: int = 0, high: int = 1) -> None:
        self.low, self.high = low, high

    @staticmethod
    def check(low: int = 0, high: int = 1) -> list[str]:
        return [] if low < high else [f"low {low} must be below high {high}"]


class HeirOfJudging(Judging):
    """Inherits the judgement."""


class WithInstanceCheck:
    """Its `check` is a method of the built object and none of our business."""

    def __init__(self, a: int = 0) -> None:
        self.a = a

    def check(self, a: int) -> list[str]:
        raise AssertionError("called on the class")


class Refusing:
    """Refuses what only building shows."""

    def __init__(self, value: int = 0, inner: Any = None) -> None:
        if value < 0:
            raise ConfigError(["`model.value` must be 0 or more.", "and another"])
        self.value, self.inner = value, inner


class Broken:
    """Has a bug."""

    def __init__(self) -> None:
        raise ZeroDivisionError("a bug")


class Layers:
    """Holds other objects."""

    def __init__(
        self, layers: list[torch.nn.Module], by_name: dict[str, torch.nn.Module] | None = None
    ) -> None:
        self.layers, self.by_name = layers, by_name


class OldStyle:
    """Annotated as it was usual before `| None`; torch and many others still have such arguments."""

    def __init__(self, width: int = None) -> None:  # type: ignore[assignment]
        self.width = width


class Options(BaseModel, extra="forbid"):
    """A model of pydantic's as an argument."""

    speed: int = 1
    inner: Options | None = None


class Typed:
    """Takes a model of pydantic's."""

    def __init__(self, options: Options) -> None:
        self.options = options


def build(width: int = 1) -> Net:
    return Net(width)


def here(name: str) -> str:
    return f"{__name__}.{name}"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this file importable by its name, as a person's own module is."""
    import sys

    monkeypatch.setitem(sys.modules, "own_module_of_a_person", sys.modules[__name__])


def node(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"own_module_of_a_person.{name}", **arguments}


# ---------------------------------------------------------------- what fits


@pytest.mark.parametrize(
    "part",
    [
        {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2},
        {"_target_": "torch.nn.Conv2d", "in_channels": 3, "out_channels": 2, "kernel_size": [3, 3]},
        {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1},
        {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.1, "betas": [0.9, 0.99], "fused": None},
        {"_target_": "builtins.dict", "anything": 1},
        node("Net", width=1),
        node("Net", width=1, rate=0, kind="b", sizes=[1, 2], path="/a/b", untyped={"x": [1]}),
        node("Net", _partial_=True),
        node("Net", _partial_=True, _convert_="all", _recursive_=True, rate=0.5),
        node("Open", width=1, more=2, yet={"more": 3}),
        node("Decorated", width=2, num_labels=3),
        node("HeirOfDecorated", num_labels=3),
        node("Configured", num_labels=3),
        node("Loading.from_config", width=2, num_labels=3),
        node("Judging", low=0, high=2),
        node("HeirOfJudging"),
        node("WithInstanceCheck", a=3),
        node("Refusing", inner=node("Net", width=3)),
        node("build", width=3),
        node("Typed", options={"speed": 2, "inner": {"speed": 3}}),
    ],
)
def test_a_right_node_passes(part: dict[str, Any]) -> None:
    assert check_component("model", part) == []


# ---------------------------------------------------------------- what does not


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (None, ["`model._target_` must be the dotted path of a class, but is missing."]),
        ([], ["`model._target_` must be the dotted path of a class, but is missing."]),
        ({"width": 1}, ["`model._target_` must be the dotted path of a class, but is missing."]),
        ({"_target_": None}, ["`model._target_` must be the dotted path of a class, but is missing."]),
        (node("Net"), ["`model.width` must be given, but is missing. Add model.width=…" + FACTS]),
        (node("Open"), ["`model.width` must be given, but is missing. Add model.width=…" + FACTS]),
        (node("Net", width=0), ["`model.width` must be greater than 0, but is 0 instead."]),
        (node("Net", width="3"), ["`model.width` must be an integer, but is '3' instead."]),
        (node("Net", width=True), ["`model.width` must be an integer, but is True instead."]),
        (node("Net", width=1, rate=1), ["`model.rate` must be less than 1, but is 1 instead."]),
        (node("Net", width=1, kind="c"), ["`model.kind` must be 'a' or 'b', but is 'c' instead."]),
        (
            node("Net", widht=1),
            [
                "`model.widht` is not an argument of own_module_of_a_person.Net (its value is 1). "
                "Did you mean `width`?",
                "`model.width` must be given, but is missing. Add model.width=…" + FACTS,
            ],
        ),
        (
            node("Net", _partial_=True, rate=-1, kind=3),
            [
                "`model.rate` must be greater than or equal to 0, but is -1 instead.",
                "`model.kind` must be 'a' or 'b'",
            ],
        ),
        (node("Judging", low=2, high=1), ["low 2 must be below high 1"]),
        (node("HeirOfJudging", low=5), ["low 5 must be below high 1"]),
        (node("Judging", low="x", high=1), ["`model.low` must be an integer, but is 'x' instead."]),
        (node("Refusing", inner=node("Net", width=0)), ["`model.inner.width` must be greater than 0"]),
        (
            node("Refusing", inner={"_target_": "no.such.Class"}),
            ["`model.inner._target_` must be an importable class"],
        ),
        (
            node("Open", width=1, extra=node("Net")),
            ["`model.extra.width` must be given, but is missing. Add model.extra.width=…."],
        ),
        (
            {"_target_": "torch.nn.Linear", "in_features": 3, "out_feature": 2},
            [
                "`model.out_feature` is not an argument of torch.nn.Linear (its value is 2). "
                "Did you mean `out_features`?",
                "`model.out_features` must be given, but is missing. Add model.out_features=…" + FACTS,
            ],
        ),
        (
            {"_target_": "torch.nn.Lineer"},
            ["`model._target_` must be an importable class, but is 'torch.nn.Lineer'"],
        ),
        ({"_target_": "no_such_package.Net"}, ["`model._target_` must be an importable class"]),
        (
            {"_target_": "torch.nn"},
            ["`model._target_` must be a class or function, but is 'torch.nn' instead."],
        ),
        ({"_target_": ""}, ["`model._target_` must be"]),
    ],
)
def test_a_wrong_node_is_told(part: Any, told: list[str]) -> None:
    found = check_component("model", part)
    assert len(found) == len(told), found
    for sentence, start in zip(found, told, strict=True):
        assert sentence.startswith(start)


def test_one_sentence_for_a_value_that_fits_no_branch_of_a_union() -> None:
    found = check_component("model", node("Net", width=1, sizes="many"))
    assert len(found) == 1
    assert found[0].startswith("`model.sizes` must be ")
    assert found[0].endswith("but is 'many' instead.")


def test_an_element_of_a_union_is_told_by_its_place() -> None:
    found = check_component("model", node("Net", width=1, sizes=[1, "x"]))
    assert any(problem.startswith("`model.sizes[1]` must be an integer, but is 'x'") for problem in found), (
        found
    )


def test_a_module_that_fails_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_at_import.py").write_text("raise RuntimeError('first line\\nsecond')")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_component("data", {"_target_": "fails_at_import.Data"}) == [
        "`data._target_` must be an importable class, but is 'fails_at_import.Data' instead (first line)."
    ]


# ---------------------------------------------------------------- what passes the check can be built


@pytest.mark.parametrize("target", ["torch.nn:Linear", "torch.nn.Linear"])
def test_a_target_that_passes_can_be_built(target: str) -> None:
    part = {"_target_": target, "in_features": 3, "out_features": 2}
    if check_component("model", part) == []:
        assert isinstance(instantiate(part), torch.nn.Linear)


@pytest.mark.parametrize(
    "arguments",
    [
        {"layers": [{"_target_": "torch.nn.ReLU"}]},
        {"layers": [], "by_name": {"a": {"_target_": "torch.nn.ReLU"}}},
    ],
)
def test_nodes_inside_lists_and_mappings_are_nodes_too(arguments: dict[str, Any]) -> None:
    part = node("Layers", **arguments)
    built = instantiate(part)
    assert all(isinstance(layer, torch.nn.ReLU) for layer in [*built.layers, *(built.by_name or {}).values()])
    assert check_component("model", part) == []


def test_the_default_of_an_argument_is_accepted() -> None:
    assert check_component("model", node("OldStyle", width=None)) == []


@pytest.mark.parametrize(
    ("options", "key"),
    [({"sped": 2}, "model.options.sped"), ({"inner": {"sped": 2}}, "model.options.inner.sped")],
)
def test_an_unknown_key_inside_a_typed_argument(options: dict[str, Any], key: str) -> None:
    found = check_component("model", node("Typed", options=options))
    assert len(found) == 1
    assert found[0].startswith(f"`{key}` is not a key of")
    assert "trainer" not in found[0]
    assert "Did you mean `speed`?" in found[0] or "Did you mean" not in found[0]


# ---------------------------------------------------------------- instantiate


def test_plain_types_reach_the_class() -> None:
    built = instantiate(node("Open", width=2, more=[1, {"a": 2}]))
    assert type(built) is Open
    assert built.width == 2
    assert built.options == {"more": [1, {"a": 2}]}
    assert type(built.options["more"]) is list
    assert type(built.options["more"][1]) is dict


def test_nested_nodes_are_built_and_extras_win() -> None:
    part = node("Refusing", value=1, inner=node("Net", width=3))
    built = instantiate(part, value=5)
    assert built.value == 5
    assert type(built.inner) is Net
    assert built.inner.width == 3
    assert part["value"] == 1


def test_a_partial_waits_for_the_rest() -> None:
    made = instantiate(node("Net", _partial_=True, rate=0.5))
    assert isinstance(made, functools.partial)
    assert made(3).width == 3


def test_a_config_error_passes_unchanged() -> None:
    for part in (node("Refusing", value=-1), node("Refusing", inner=node("Refusing", value=-1))):
        with pytest.raises(ConfigError) as refused:
            instantiate(part)
        assert refused.value.problems == ["`model.value` must be 0 or more.", "and another"]


def test_a_bug_of_the_class_is_no_config_error() -> None:
    with pytest.raises(Exception, match="a bug") as failed:
        instantiate(node("Broken"))
    assert not isinstance(failed.value, ConfigError)


class WithCause:
    def __init__(self) -> None:
        raise OSError("no such table") from KeyError("houses")


def test_a_constructors_own_error_keeps_its_cause() -> None:
    with pytest.raises(OSError, match="no such table") as caught:
        instantiate({"_target_": f"{__name__}.WithCause"})
    assert isinstance(caught.value.__cause__, KeyError)


def test_locate_and_parameters() -> None:
    assert locate("torch.nn.Linear") is torch.nn.Linear
    assert list(parameters("torch.nn.Linear"))[:2] == ["in_features", "out_features"]
    assert "self" not in parameters("torch.nn.Linear")
    assert parameters("builtins.dict") == {}
    with pytest.raises(ImportError):
        locate("no_such_package.Net")
    with pytest.raises(AttributeError):
        locate("torch.nn.Lineer")


CONF = Path(__file__).parents[3] / "conf"
SHIPPED = [
    path
    for group in ("strategy", "balancing", "model", "data")  # no folder's optimizer is ever built
    for path in sorted((CONF / group).glob("*.yaml"))
    if path.stem != "custom"
]
MLP = "hetexp.model.mlp.MLP"
OPEN = f"{__name__}.Open"
LOADED = {"_target_": "torch.load", "f": "weights.pt", "weights_only": False}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_all_that_ships_is_built_without_trust(path: Path) -> None:
    node = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(node, dict)
    kept = {name: value for name, value in node.items() if "${" not in str(value)}  # runs store plain values
    with only_trusted():
        refused = untrusted(kept, path.parent.name)
    # transformers builds whatever the files of a folder name
    assert bool(refused) == (path.stem in ("hf_causal_lm", "sft_jsonl"))


@pytest.mark.parametrize(
    "node",
    [
        LOADED,
        {"_target_": MLP, "hidden_sizes": [{"deep": [LOADED]}]},
        {"_target_": MLP, "_args_": [LOADED]},
        {"_target_": MLP, "_recursive_": False, "hidden_sizes": LOADED},
        {"_target_": "torch.load", "_partial_": True},
        {"_target_": "hydra.utils.get_method", "path": "os.system"},
        {"_target_": "hetexp.core.instantiate.instantiate", "node": {}},
        {"_target_": "hetexp.core.files.write_text", "path": "x", "text": "y"},
        {"_target_": "hetexp.data.tokenizers.load_tokenizer", "folder": "x"},  # no class
        {"_target_": "hetexp.model.mlp.MLP.register_module"},
        {"_target_": "hetexp.model.mlp.torch.load", "f": "x"},
        {"_target_": "hetexp.model.base.ConfigError", "problems": "x"},  # from elsewhere in hetexp
        {"_target_": "hetexp.model.mlp"},
        {"_target_": "hetexp.model..mlp.MLP"},
        {"_target_": "hetexp.model.layered.LayerChain"},
        {"_target_": "hetexp.strategy.hierarchical_sgd.host_group.HostGroup"},
        {"_target_": "hetexp.data.streams.stream.Generated", "make": LOADED},
        {"_target_": "hetexp.data.samples.build_function", "node": "torch.load"},
        {"_target_": "hetexp.logger.multi.MultiLogger"},
        {"_target_": "hetexp.launch.sweep.run.Start"},
        {"_target_": "hetexp.model.hf_causal_lm.HFCausalLM", "folder": "x"},
        {"_target_": "hetexp.data.sft_jsonl.SftJsonl"},
        {"_target_": "torch.optim.lr_scheduler.LambdaLR", "lr_lambda": {"_target_": "eval"}},
        {"_target_": "torch.nn.Linear"},
        {"_target_": "hetexp.model.none.None"},
        {"_target_": "hetexp_model.Net"},
        {"_target_": "torch.optim.optimizer.torch.load", "f": "x"},
        {"_target_": "torch.optim.lr_scheduler.warn", "text": "x"},
        {"_target_": ["torch", "load"]},
        {"_target_": None},
        {"_target_": "${oc.decode:torch.load}"},
        {"_target_": MLP, "hidden_sizes": "${oc.decode:'{_target_: torch.load, f: weights.pt}'}"},
        [["_target_", "torch.load"], ["f", "weights.pt"]],
    ],
    ids=lambda node: json.dumps(node)[:60],
)
def test_what_a_stored_configuration_may_not_build(
    node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was called")

    monkeypatch.setattr("torch.load", never)
    monkeypatch.setattr("hydra.utils.instantiate", never)
    monkeypatch.chdir(tmp_path)
    with only_trusted(), pytest.raises(ConfigError) as told:
        instantiate(node)
    assert all(" must be a" in problem and " instead." in problem for problem in told.value.problems)


def test_arguments_from_elsewhere_are_checked_too() -> None:
    with only_trusted(), pytest.raises(ConfigError, match=r"add --trust torch\."):
        instantiate({"_target_": MLP}, hidden_sizes=LOADED)


def test_a_trusted_package_is_its_own_code_only() -> None:
    node = {"_target_": OPEN, "width": 3}
    with only_trusted(), pytest.raises(ConfigError, match=rf"add --trust {__name__}\."):
        instantiate(node)
    with only_trusted([__name__]):
        assert instantiate(node).width == 3
        assert locate(OPEN) is Open
        assert instantiate({"_target_": f"{__name__}.Judging.check", "low": 2}) != []  # a function of it
        for name in ("torch.load", "OrderedDict", "functools.reduce"):
            with pytest.raises(ConfigError, match="leads out of the package|comes from collections"):
                instantiate({"_target_": f"{__name__}.{name}"})
        with only_trusted(["torch"]), pytest.raises(ConfigError, match="--trust"):
            instantiate(node)
    with only_trusted([__name__, "collections"]):
        assert isinstance(instantiate({"_target_": f"{__name__}.OrderedDict"}), OrderedDict)
    assert instantiate(node).width == 3


def test_all_refusals_come_at_once_and_show_no_control_characters() -> None:
    node = {"model": {"_target_": "evil\x1b[2J" + "x" * 500}, "data": LOADED, "optimizer": {"lr": 1}}
    with only_trusted(how="{} to data.trust"):
        problems = untrusted(node)
    assert [problem.partition(" ")[0] for problem in problems] == ["`model._target_`", "`data._target_`"]
    assert "\x1b" not in problems[0]
    assert len(problems[0]) < 400
    assert problems[1].endswith(
        "but is 'torch.load' instead. If you trust its code, add torch to data.trust."
    )
    assert untrusted(node) == []


@pytest.mark.parametrize("partial", [{}, {"_partial_": True}])
def test_what_hetexp_gives_a_class_need_not_be_written(partial: dict[str, bool]) -> None:
    """Case 82: a file of one's own without `_partial_`."""
    assert check_component("optimizer", {"_target_": "torch.optim.SGD", "lr": 0.1, **partial}) == []
    node = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": None, **partial}
    assert check_component("trainer.schedule", node) == []
    nested = {"_target_": "torch.optim.lr_scheduler.ChainedScheduler", "schedulers": [node]}
    assert check_component("trainer.schedule", nested) == []
    step = {"_target_": "torch.optim.lr_scheduler.StepLR"}
    assert check_component("trainer.schedule", step) == [
        "`trainer.schedule.step_size` must be given, but is missing. Add trainer.schedule.step_size=…."
    ]
