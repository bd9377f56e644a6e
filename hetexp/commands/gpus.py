"""`hetexp gpus`: the machine's cards and processor, with readings and the reason if one cannot be used."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetexp.commands.support.command_line import (
    above_zero,
    add_shared,
    command_parser,
    exit_code,
    print_parts,
    table,
)
from hetexp.core.device import GIB
from hetexp.core.errors import ConfigError
from hetexp.hardware.backend import add_backends
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.backends.sysfs import host_memory
from hetexp.hardware.detection.busy import who_is_busy
from hetexp.hardware.detection.detected import DetectedCard, Reading
from hetexp.hardware.detection.inventory import Inventory, detect
from hetexp.hardware.detection.machine import Machine

if TYPE_CHECKING:
    from rich.console import RenderableType

_UNKNOWN = "n/a"
_STYLES = {"available": "green", "busy": "yellow", "hidden": "dim", "unusable": "red", "lost": "bold red"}


def main(arguments: Sequence[str]) -> int:
    """Print the cards as a table or as JSON, once or again and again."""
    parser = command_parser(
        "gpus", "List every card of this machine, usable or not, whatever its vendor, and its processor."
    )
    add_shared(parser, "--json")
    parser.add_argument(
        "--watch",
        type=above_zero,
        nargs="?",
        const=2.0,
        metavar="SECONDS",
        help="print again every SECONDS (2) until Ctrl-C",
    )
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="PATH",
        help="ask a backend of your own, too, by the dotted path of its class (as `hardware.backends`)",
    )
    options = parser.parse_args(list(arguments))
    sys.path.append(str(Path.cwd()))  # the user's own classes, as for `hetexp train`
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    if problems := add_backends(options.backend, "--backend"):
        raise ConfigError(problems)
    if options.watch is None:
        show(options.json)
        return 0
    try:
        if options.json or not sys.stdout.isatty():
            while True:  # one JSON document or table after the other, for pipes
                show(options.json)
                sys.stdout.flush()
                time.sleep(options.watch)
        _watch(options.watch)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    return 0


def show(as_json: bool) -> None:
    """Print the cards once."""
    inventory = inspect()
    if as_json:
        print(json.dumps([as_dict(card) for card in (*inventory.cards, processor())], indent=2))
        return
    from rich.console import Console

    print_parts(rendered(inventory, Console().width))


def inspect() -> Inventory:
    """Return the cards of this machine, with the processes that use them."""
    from hetexp.hardware.detection.probe import torch_devices

    # If no driver knows a card, an interpreter's torch is asked, which takes seconds. Its answer comes
    # in the background, and the next call shows it.
    machine = Machine(torch_sees=partial(torch_devices, wait=False))
    return detect(machine, busy=who_is_busy(machine))


def processor() -> DetectedCard:
    """Return the processor like a card; it has no number, because `hardware.gpu_ids` counts cards."""
    _, free = host_memory(Machine())
    return DetectedCard(CpuBackend.describe(0), Reading(memory_free_bytes=free))


def as_dict(card: DetectedCard) -> dict[str, Any]:
    """Return a card as plain types, for JSON; an unknown value is null, never 0."""
    spec, reading = card.spec, card.reading
    used = card.python or (sys.executable if card.unusable is None and card.undriven is None else None)
    return {
        "id": spec.number,
        "device": spec.id,
        "vendor": spec.vendor,
        "name": spec.name,
        "uuid": spec.uuid,
        "pci": spec.pci,
        "architecture": spec.architecture,
        "driver": spec.driver,
        "integrated": spec.integrated,
        "unified_memory": spec.unified_memory,
        "precisions": list(spec.precisions) if spec.precisions is not None else None,
        "memory_bytes": spec.memory_bytes,
        "memory_free_bytes": reading.memory_free_bytes,
        "utilisation": reading.utilisation,
        "temperature_celsius": reading.temperature_celsius,
        "power_watts": reading.power_watts,
        "power_limit_watts": reading.power_limit_watts,
        "throttled": list(reading.throttled) if reading.throttled is not None else None,
        "processes": [asdict(p) for p in reading.processes] if reading.processes is not None else None,
        "python": used if card.lost is None else None,
        "state": card.state,
        "why_not": card.why_not,
    }


def rendered(inventory: Inventory, width: int) -> list[RenderableType]:
    """Return the table and the lines below it.

    Args:
        width: columns of the terminal; a narrow one gets a smaller table.
    """
    left_out = () if width >= 100 else ("temp", "power")
    rows = [
        {name: cell for name, cell in _cells(card).items() if name not in left_out}
        for card in (*inventory.cards, processor())
    ]
    cards = table(list(rows[0]), [list(row.values()) for row in rows], ("id", "util", "temp"), "ellipsis")
    if inventory.cards:
        return [cards, *_notes(inventory)]
    return [
        cards,
        "No accelerator in this machine: hetexp trains on the CPU, or emulates the cards that you name "
        "(python train.py hardware=nvidia_arc).",
    ]


def _cells(card: DetectedCard) -> dict[str, tuple[str, str]]:
    """Return text and style of each column, by its name."""
    spec, reading = card.spec, card.reading
    vendor = "" if spec.vendor == "cpu" or spec.vendor in spec.name.lower() else f"{spec.vendor}: "
    name = vendor + spec.name + (" (integrated)" if spec.integrated else "")
    name += " (unified memory)" if spec.unified_memory and not spec.integrated else ""
    texts = {
        "id": "" if spec.number is None else str(spec.number),
        "device": spec.id,
        "name": name,
        "memory": f"{_gib(reading.memory_free_bytes)}/{_gib(spec.memory_bytes)} GiB free",
        "util": _number(reading.utilisation, ".0%"),
        "temp": _number(reading.temperature_celsius, ".0f", " °C"),
        "power": f"{_number(reading.power_watts, '.0f')}/{_number(reading.power_limit_watts, '.0f')} W",
    }
    state = card.state + (" (throttled)" if reading.throttled else "")
    return {name: (text, "") for name, text in texts.items()} | {"state": (state, _STYLES[card.state])}


def _notes(inventory: Inventory) -> list[RenderableType]:
    """Return lines for reasons, fixes and interpreters, which do not fit a cell."""
    from rich.text import Text

    lines = []
    for card in inventory.cards:
        if card.why_not is not None:
            lines.append(f"{card.spec.id}: {card.why_not}.")
        if card.reading.throttled:
            lines.append(f"{card.spec.id}: its clocks are held back: {', '.join(card.reading.throttled)}.")
        if card.python is not None:
            lines.append(f"{card.spec.id}: driven by {card.python}.")
    lines += [problem for problems in inventory.mask_problems.values() for problem in problems]
    return [Text(f"· {line}") for line in lines]


def _watch(seconds: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*rendered(inspect(), console.width)), refresh=True)
            time.sleep(seconds)


def _gib(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value / GIB:.1f}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return _UNKNOWN if value is None else f"{value:{form}}{unit}"
