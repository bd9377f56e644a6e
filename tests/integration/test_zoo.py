"""The models of `examples/zoo` train on unequal shares as by their own scripts on one device."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import Run, difference, start_run, start_script

import hetexp

ROOT = Path(hetexp.__file__).resolve().parent.parent
ZOO = ROOT / "examples" / "zoo"
UNEQUAL = ("hardware.devices=[cpu,cpu,cpu]", "balancing=manual", "balancing.weights=[5,2,1]")
EPOCHS, STEPS = 2, 10
# Not Faster R-CNN and T5, which compute a part in float32: scripts/zoo.py compares them as far as that goes.
NEEDS = {
    "bart": ["transformers"],
    "bert": ["transformers"],
    "clip": ["transformers"],
    "efficientnet": ["torchvision", "timm"],
    "gpt2": ["transformers"],
    "graph": ["torch_geometric"],
    "lstm": [],
    "segmentation": ["torchvision"],
    "unet": ["torchvision", "diffusers"],
    "vit": ["torchvision", "timm"],
}


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let scripts be found as where a person starts them."""
    monkeypatch.chdir(ZOO)
    monkeypatch.syspath_prepend(str(ZOO))
    yield
    own = [name for name, module in sys.modules.items() if str(ZOO) in str(getattr(module, "__file__", ""))]
    for name in own:
        del sys.modules[name]


def script(name: str) -> ModuleType:
    """Import a script of the zoo, if the packages of its model are installed."""
    for package in NEEDS[name]:
        # torchvision raises a RuntimeError where it is not of torch's build.
        pytest.importorskip(package, exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    return importlib.import_module(name)


def alone(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the parameters of the plain loop, without hetexp."""
    losses: list[float] = []
    model = script(name).plain(EPOCHS, lambda loss: losses.append(loss.item()))
    return losses, model.state_dict()


def assert_equal(run: Run, losses: list[float], parameters: dict[str, torch.Tensor]) -> None:
    assert len(losses) == STEPS
    assert losses[-1] != losses[0]
    assert run.losses == pytest.approx(losses, rel=1e-12)
    found = run.parameters()
    assert len(found) > len(parameters) / 2  # a tied weight has one name
    assert difference(found, {name: parameters[name] for name in found}) < 1e-12


@pytest.mark.usefixtures("zoo")
@pytest.mark.parametrize("name", NEEDS)
def test_by_its_script(name: str, tmp_path: Path) -> None:
    losses, parameters = alone(name)
    run = start_script(tmp_path / "run", ZOO / f"{name}.py", UNEQUAL, "hetexp", "--epochs", str(EPOCHS))
    assert_equal(run, losses, parameters)


@pytest.mark.usefixtures("zoo")
@pytest.mark.parametrize("name", [name for name in NEEDS if name != "clip"])
def test_by_its_yaml(name: str, tmp_path: Path) -> None:
    losses, parameters = alone(name)
    run = start_run(tmp_path / "run", (f"experiment={name}", f"trainer.max_epochs={EPOCHS}", *UNEQUAL))
    assert_equal(run, losses, parameters)


def test_the_lines_of_the_table_are_counted_from_the_scripts() -> None:
    """The plain loop and the one with hetexp differ in these statements only."""
    from zoo import lines_added

    assert lines_added("bert", "hetexp") == 7
    assert lines_added("bert", "accelerate") == 5
