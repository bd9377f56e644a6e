"""What runs before the ranks start must not import torch: it takes seconds, and may be another build."""

from __future__ import annotations

import subprocess
import sys

PLAIN = """
import sys
import hetexp
assert "torch" not in sys.modules
assert "pydantic" not in sys.modules, "importing hetexp alone should cost nothing"
"""

ALL = """
import importlib, pkgutil, sys

def load(name):
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"{name} imports torch"

import hetexp.core, hetexp.balancing, hetexp.plan
for package in (hetexp.core, hetexp.balancing, hetexp.plan):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        load(module.name)
for name in ("hetexp.hardware.selection.devices", "hetexp.plan.strategy", "hetexp.plan.planner",
"hetexp.app"):
    load(name)
for name in ("hetexp.launch.prepare.planning", "hetexp.launch.terminal.prediction"):
    load(name)
for name in ("follow", "sampler", "service", "training", "top", "screen", "main"):
    load(f"hetexp.monitor.{name}")
for name in ("plan", "launch", "monitor", "top"):
    load(f"hetexp.commands.{name}")
"""

PLANNING = """
import sys
from pathlib import Path
from hetexp.core.config import HardwareConfig, read_config
from hetexp.hardware.backend import BACKENDS, backend_class
from hetexp.hardware.detection.inventory import detect
from hetexp.hardware.selection.devices import select_devices
from hetexp.plan.planner import check_plan, make_plan
from hetexp.plan.run_spec import Request, RunSpec

for name in BACKENDS:
    backend_class(name)
inventory = detect()
for card in inventory.cards:
    backend_class(card.spec.backend).environment(card.spec)
assert "torch" not in sys.modules, "detecting devices imports torch"
for strategy, devices in (("ddp.DDP", ["cpu", "emulated:rtx_3090"]), ("single.Single", ["cpu"])):
    part = {"_target_": "unused"}
    raw = {
        "hardware": {"devices": devices},
        "strategy": {"_target_": f"hetexp.strategy.{strategy}"},
        "balancing": {"_target_": "hetexp.balancing.equal.Equal"},
        "model": part, "data": part, "optimizer": part, "logger": part,
        "trainer": {"global_batch_size": 8, "max_steps": 1},
    }
    config = read_config(raw)
    selection = select_devices(config.hardware, inventory)
    spec = RunSpec(config, raw, selection, Request(Path("/tmp/run"), Path("/tmp")))
    assert check_plan(spec) == []
    plan = make_plan(spec)
    assert sum(plan.local_batch_sizes) == 8
assert "torch" not in sys.modules, "planning imports torch"
"""


def run(program: str) -> None:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_importing_hetexp_imports_no_torch() -> None:
    run(PLAIN)


def test_importing_the_launcher_side_imports_no_torch() -> None:
    run(ALL)


def test_planning_imports_no_torch() -> None:
    run(PLANNING)
