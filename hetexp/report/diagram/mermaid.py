"""A plan's picture as Mermaid text, which GitHub, GitLab and many editors draw by themselves.

The syntax is that of https://mermaid.js.org/syntax/flowchart.html: labels stand in quotation marks, and their
special characters are written as entities (`#quot;`).
"""

from __future__ import annotations

import json
import textwrap

from hetexp.report.diagram.dot import (
    EXCHANGE,
    EXCHANGE_FILL,
    INK,
    LINE,
    MUTED,
    PANEL,
    PAPER,
    VENDOR_COLOURS,
    exchange_lines,
    network_title,
    printable,
)
from hetexp.report.diagram.picture import Device, ExchangeBox, MachineBox, Picture

LONGEST_REMARK = 60
_SETTINGS = ("config:", "  flowchart:", "    wrappingWidth: 460")
"""Longest line of a label, in pixels."""
_MACHINE = f"fill:{PANEL},stroke:{LINE},color:{MUTED}"
_SPECIAL = '"#<>&`\\'
"""Characters of a label with a meaning in markup, quotation, entities or Markdown."""
CLASSES = {
    **{vendor: f"fill:{ground},stroke:{line}" for vendor, (line, ground) in VENDOR_COLOURS.items()},
    "exchange": f"fill:{EXCHANGE_FILL},stroke:{EXCHANGE}",
    "memory": f"fill:{PAPER},stroke:{LINE}",
    "out": f"fill:{PANEL},stroke:{LINE}",
}
"""Class of a node → its colours, dark text on a light ground whatever the page's theme."""


def mermaid_of(picture: Picture) -> str:
    """Return the picture as a flowchart."""
    title = picture.title[0] + (" …" if len(picture.title) > 1 else "")
    lines = [
        "---",
        f"title: {json.dumps(printable(title), ensure_ascii=False)}",
        *_SETTINGS,
        "---",
        "flowchart LR",
    ]
    about = [*picture.lines, *([picture.warning] if picture.warning is not None else [])]
    about += [line for remark in picture.remarks for line in textwrap.wrap(remark, LONGEST_REMARK)]
    for machine in picture.machines:
        lines += _machine(machine)
    for machine in picture.machines:
        for device in machine.devices:
            if device.rank is not None:
                rate = f"|{_label(str(device.link).split(', '))}|" if device.link is not None else ""
                lines.append(f"  {device.key} ---{rate} {machine.key}_memory")
    for arrow in picture.arrows:
        words = ["activations, gradients back", *([network_title(picture)] if arrow.network else [])]
        lines.append(f"  {arrow.sender} ==>|{_label(words)}| {arrow.receiver}")
    if picture.exchange is not None:
        lines += _exchange(picture, picture.exchange)
    lines.append(f"  about[{_label(about)}]:::memory")
    used = {_class(device) for device in picture.devices} | {"memory"}
    used |= {"exchange"} if picture.exchange is not None else set()
    for name, colours in CLASSES.items():
        if name in used:
            lines.append(f"  classDef {name} {colours},color:{INK}")
    dashed = [device.key for device in picture.devices if device.emulated]
    for machine in picture.machines:
        dashes = ",stroke-dasharray:6 4" if machine.emulated else ""
        lines.append(f"  style {machine.key} {_MACHINE}{dashes}")
    if dashed:
        lines += ["  classDef emulated stroke-dasharray:6 4", f"  class {','.join(dashed)} emulated"]
    return "\n".join(lines) + "\n"


def _machine(machine: MachineBox) -> list[str]:
    name = machine.name + (" (emulated)" if machine.emulated else "")
    lines = [f"  subgraph {machine.key}[{_label([name])}]"]
    for device in machine.devices:
        head = [device.heading, device.name]
        if device.emulated and "(emulated)" not in device.name:
            head.append("altered: not as it is")
        lines.append(f"    {device.key}[{_label([*head, *device.lines()])}]:::{_class(device)}")
    return [*lines, f"    {machine.key}_memory[{_label(['host memory'])}]:::memory", "  end"]


def _exchange(picture: Picture, exchange: ExchangeBox) -> list[str]:
    lines = [f"  exchange([{_label(exchange_lines(picture, exchange))}]):::exchange"]
    if exchange.direct:
        return lines + [f"  exchange --- {key}" for key in exchange.members]
    hosts = [m.key for m in picture.machines if any(d.key in exchange.members for d in m.devices)]
    return lines + [f"  {key}_memory --- exchange" for key in hosts]


def _class(device: Device) -> str:
    if device.rank is None:
        return "out"
    return device.vendor if device.vendor in CLASSES else "cpu"


def _label(lines: list[str]) -> str:
    """Return a quoted label of these lines."""
    return '"' + "<br/>".join(escaped(line) for line in lines) + '"'


def escaped(text: str) -> str:
    """Return a text with Mermaid's special characters as entities."""
    return "".join(f"#{ord(sign)};" if sign in _SPECIAL else sign for sign in printable(text))
