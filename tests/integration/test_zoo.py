"""The models of `examples/zoo` train on unequal shares as by their own scripts on one device."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import start_run, start_script

import hetexp

ZOO = Path(hetexp.__file__).resolve().parent.parent / "examples" / "zoo"
EPOCHS, STEPS = 2, 10
UNEQUAL = ("hardware.devices=[cpu,cpu,cpu]", "balancing=manual", "balancing.weights=[5,2,1]")
NEEDS = {
    "bert": ["transformers"],
    "gpt2": ["transformers"],
    "bart": ["transformers"],
    "clip": ["transformers"],
    "lstm": [],
    "graph": ["torch_geometric"],
    "unet": ["diffusers", "torchvision"],
    "vit": ["timm", "torchvision"],
    "efficientnet": ["timm", "torchvision"],
    "segmentation": ["torchvision"],
    "detection": ["torchvision"],
}


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script of the zoo, whose folder is where it is started."""
    name = request.param
    for package in NEEDS[name]:
        pytest.importorskip(package, exc_type=Exception)  # torchvision of another build raises anything
    monkeypatch.syspath_prepend(str(ZOO))
    monkeypatch.chdir(ZOO)
    spec = importlib.util.spec_from_file_location(name, ZOO / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    spec.loader.exec_module(loaded)
    request.addfinalizer(lambda: [sys.modules.pop(new) for new in set(sys.modules) - before & _own()])
    return loaded
