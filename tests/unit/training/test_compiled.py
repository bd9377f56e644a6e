"""What torch.compile makes of a model, and what is said where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import unbuilt_config
from torch import nn

from hetexp.core.config import read_config
from hetexp.core.errors import SetupError
from hetexp.training.compiled import any_batch_size, compile_errors_explained, compiled


def test_nothing_is_compiled_by_default() -> None:
    assert compiled(nn.Linear(2, 2), read_config(unbuilt_config())) is None


@pytest.mark.parametrize(("setting", "mode"), [(True, None), ("max-autotune", "max-autotune")])
def test_the_mode_is_torchs_own(monkeypatch: pytest.MonkeyPatch, setting: Any, mode: str | None) -> None:
    asked = []
    original = torch.compile

    def compile_as(model: nn.Module, mode: str | None) -> Any:
        asked.append(mode)
        return original(model)

    monkeypatch.setattr(torch, "compile", compile_as)
    model = nn.Linear(2, 2)
    made = compiled(model, read_config(unbuilt_config(trainer={"compile": setting})))
    assert asked == [mode]
    assert made is not None
    assert [id(p) for p in made.parameters()] == [id(p) for p in model.parameters()]


def test_one_graph_serves_all_batch_sizes_but_one() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = torch.compile(nn.Linear(3, 2), backend=backend)
    for size in (5, 3, 8, 1, 2, 1):
        inputs = torch.ones(size, 3)
        any_batch_size({"inputs": inputs, "scalar": torch.ones(())})
        assert model(inputs).shape == (size, 2)
    assert len(graphs) == 2
    torch._dynamo.reset()


def test_a_missing_compiler_is_one_sentence() -> None:
    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/c++"), "fx_graph_cache": False}),
        pytest.raises(SetupError) as refused,
        compile_errors_explained(),
    ):
        model(torch.ones(5, 3))
    torch._dynamo.reset()
    assert str(refused.value).startswith(
        "`trainer.compile` must be false if torch cannot compile the model: "
    )
    assert "/nowhere/c++" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), compile_errors_explained():
        raise ZeroDivisionError
