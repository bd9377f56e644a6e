"""A class's arguments from its source alone, and where the source does not show them."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from hetexp.core.config.signature import signature_from_source, signature_of
from hetexp.core.instantiate import check_component, locate

SOURCE = """
import functools
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from mine.inner import Inner as Renamed

raise RuntimeError("imported")

class Plain:
    def __init__(self, size: int, rate: Annotated[float, Field(le=1)] = 0.5, *, other: "Unknown" = None):
        pass

class Open:
    def __init__(self, size, **options):
        pass

class Inherits(Plain):
    pass

@dataclass
class Decorated:
    size: int

class Meta(metaclass=type):
    def __init__(self, size):
        pass

def function(size: int, rate=print):
    pass

Assigned = Plain
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text(SOURCE)
    (tmp_path / "mine" / "inner.py").write_text(
        "class Inner:\n    def __init__(self, depth: int = 1): pass\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:  # another test's
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("target", "names", "hinted", "accepts_any"),
    [
        ("mine.Plain", ["size", "rate", "other"], {"size", "rate"}, False),
        ("mine.Open", ["size"], set(), True),
        ("mine.function", ["size", "rate"], {"size"}, False),
        ("mine.Renamed", ["depth"], {"depth"}, False),
        ("mine.inner.Inner", ["depth"], {"depth"}, False),
    ],
)
def test_arguments_are_read_and_nothing_is_imported(
    target: str, names: list[str], hinted: set[str], accepts_any: bool
) -> None:
    signature = signature_from_source(target)
    assert signature is not None
    assert list(signature.parameters) == names
    assert signature.hints.keys() == hinted
    assert signature.accepts_any == accepts_any
    assert not [name for name in sys.modules if name.startswith("mine")]


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("name", ["Inherits", "Decorated", "Meta", "Assigned", "NotThere", "Plain.size"])
def test_what_the_source_does_not_decide_is_left_to_the_import(name: str) -> None:
    assert signature_from_source(f"mine.{name}") is None


def test_a_package_that_does_not_exist() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        signature_from_source("no_such_package.Model")


@pytest.mark.usefixtures("mine")
def test_values_are_judged_by_the_source() -> None:
    node = {"_target_": "mine.Plain", "rate": 2.0, "sise": 1}
    problems = check_component("model", node, imports=False)
    assert [problem.split("`")[1] for problem in problems] == ["model.rate", "model.sise", "model.size"]


@pytest.mark.parametrize(
    "target", ["hetexp.model.convnet.ConvNet", "hetexp.model.gpt.GPT", "torch.optim.AdamW", "torch.optim.SGD"]
)
def test_source_and_object_agree(target: str) -> None:
    source, real = signature_from_source(target), signature_of(locate(target))
    assert source is not None
    assert real is not None
    assert list(source.parameters) == list(real.parameters)
    for name, parameter in source.parameters.items():
        assert parameter.kind == real.parameters[name].kind
        assert (parameter.default is inspect.Parameter.empty) == (
            real.parameters[name].default is inspect.Parameter.empty
        )
        assert name not in source.hints or str(source.hints[name]) == str(real.hints[name])
