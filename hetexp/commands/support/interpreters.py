"""This process's interpreter and the recorded environments, with the cards that each can drive."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hetexp.hardware.backend import backend_class
from hetexp.hardware.detection.builds import TorchBuild, own_build, read_builds
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.inventory import Inventory, detect
from hetexp.launch.environments.record import records, version_of
from hetexp.launch.environments.wheels import KINDS

if TYPE_CHECKING:
    from rich.text import Text

OWN = "this"
"""Name of the interpreter that runs the command."""
NO_ENVIRONMENT = "No environment is recorded. To make one: hetexp env create cuda (rocm, xpu, cpu)"


@dataclass
class Interpreter:
    """One interpreter of this machine."""

    name: str
    python: str
    build: TorchBuild
    python_version: str | None = None
    devices: list[str] = field(default_factory=list)
    """Ids of the cards that its torch can drive, free or not."""
    visible: list[str] = field(default_factory=list)
    """Those of these cards that no visibility variable hides."""

    @property
    def built_for(self) -> str:
        """The build's platform: `CUDA 13.0`, `CPU`."""
        build = self.build
        words = {"cuda": f"CUDA {build.cuda}", "hip": f"ROCm {build.hip}", "xpu": "Intel XPU"}
        return words.get(build.kind, "Apple GPU" if build.kind == "mps" else "CPU")


def interpreters(inventory: Inventory | None = None) -> list[Interpreter]:
    """Return this process's own interpreter, then the recorded ones, without importing torch.

    Args:
        inventory: cards of the machine; detected by default.
    """
    recorded = records()
    builds = [own_build(), *read_builds(recorded.values())]
    inventory = detect(builds=builds) if inventory is None else inventory
    by_python = {build.python: build for build in builds}
    version_here = ".".join(map(str, sys.version_info[:3]))
    result = [Interpreter(OWN, sys.executable, builds[0], version_here)]
    for name, python in recorded.items():
        result.append(Interpreter(name, python, by_python[python], version_of(python)))
    for interpreter in result:
        if interpreter.build.problem is None:
            cards = driven(inventory, interpreter.build)
            interpreter.devices = [card.spec.id for card in cards]
            interpreter.visible = [card.spec.id for card in cards if card.hidden_by is None]
    return result


def driven(inventory: Inventory, build: TorchBuild) -> list[DetectedCard]:
    """Return the cards that a build of torch can drive, free or not."""
    return [
        card
        for card in inventory.cards
        if card.lost is None
        and card.undriven is None
        and backend_class(card.spec.backend).build_problem(card.spec, build) is None
    ]


def unbroken_line(command: str) -> Text:
    """Return a command as a line that rich never breaks, so that the user can copy it."""
    from rich.text import Text

    return Text(f"   {command}", no_wrap=True, overflow="ignore")


def repair_command(interpreter: Interpreter) -> str:
    """Return the command that gives an interpreter a working torch."""
    name = interpreter.name
    if name == OWN:
        return f"{interpreter.python} -m pip install torch"
    # Its name says which cards it was made for; if not, its build of torch does.
    built = next((kind for kind, build in KINDS.items() if build == interpreter.build.kind), "cpu")
    kind = name if name in KINDS else built
    return f"hetexp env create {kind}{'' if kind == name else f' --name {name}'} --force"
