"""A plan's picture in Graphviz's language, and the colours of the SVG that `dot` draws from it.

Machines are boxes. Their devices stand one below the other, with the host memory beside them. Colours are
those of a light page; in an SVG a style sheet changes them for a dark page.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hetexp.report.diagram.picture import Arrow, Device, ExchangeBox, MachineBox, Picture

if TYPE_CHECKING:
    from graphviz import Digraph

FONT = "Helvetica,Arial,sans-serif"
LONGEST_REMARK = 96
BAR_WIDTH = 150
"""Points of a share of 100 %."""

PAPER, PANEL, INK, MUTED, LINE, TRACK = "#ffffff", "#f6f8fa", "#1f2328", "#59636e", "#848d97", "#d8dee4"
EXCHANGE, EXCHANGE_FILL, WARNING = "#8250df", "#f3ecff", "#9a6700"
VENDOR_COLOURS = {
    "nvidia": ("#4d7c0f", "#f0f9e1"),
    "amd": ("#c2410c", "#fff0e5"),
    "intel": ("#0969da", "#e4f1ff"),
    "apple": ("#7d4e9f", "#f7effc"),
    "cpu": ("#475569", "#eef1f5"),
}
"""Line and ground of a device's box."""
OTHER_VENDOR = VENDOR_COLOURS["cpu"]
DARK = {
    PAPER: "#0d1117",
    PANEL: "#161b22",
    INK: "#e6edf3",
    MUTED: "#9da7b3",
    LINE: "#7d8590",
    TRACK: "#3d444d",
    EXCHANGE: "#b98eff",
    EXCHANGE_FILL: "#271d3d",
    WARNING: "#e3b341",
    "#4d7c0f": "#8fce3c",
    "#f0f9e1": "#1b2611",
    "#0969da": "#58a6ff",
    "#e4f1ff": "#10233d",
    "#c2410c": "#ff9a5c",
    "#fff0e5": "#331c10",
    "#7d4e9f": "#cfa3ee",
    "#f7effc": "#291a35",
    "#475569": "#a5b1c2",
    "#eef1f5": "#202833",
}
"""Each colour on a dark page."""

ARROW = {"color": EXCHANGE, "penwidth": "1.8", "arrowsize": "0.8"}


def dot_of(picture: Picture) -> str:
    """Return the picture in Graphviz's language."""
    from graphviz import Digraph

    graph = Digraph("plan")
    graph.attr(
        rankdir="LR",
        label=_title(picture),
        labelloc="t",
        labeljust="l",
        fontname=FONT,
        bgcolor=PAPER,
        pad="0.2",
        nodesep="0.22",
        ranksep="0.5",
    )
    graph.attr("node", fontname=FONT, fontsize="11", fontcolor=INK, shape="box")
    graph.attr("edge", fontname=FONT, fontsize="10", fontcolor=MUTED, color=LINE, dir="none")
    for machine in picture.machines:
        _machine(graph, machine, picture)
    for machine in picture.machines:
        for device in machine.devices:
            if device.rank is not None:
                label = _lines(str(device.link).split(", ")) if device.link is not None else ""
                graph.edge(f"{device.key}:e", f"{machine.key}_memory:{device.key}:w", label=label)
    _other_arrows(graph, picture)
    if len(picture.machines) > 1:
        _network(graph, picture)
    return str(graph.source)


def _machine(graph: Digraph, machine: MachineBox, picture: Picture) -> None:
    """Add a machine's box: its devices in a column, held together by invisible edges, and its memory."""
    arrows = {(arrow.sender, arrow.receiver): arrow for arrow in picture.arrows}
    with graph.subgraph(name=f"cluster_{machine.key}") as box:
        box.attr(
            label=_plain(machine.name + (" (emulated)" if machine.emulated else "")),
            labelloc="t",
            labeljust="l",
            fontname=FONT,
            fontsize="11",
            fontcolor=MUTED,
            style="rounded,filled" + (",dashed" if machine.emulated else ""),
            color=LINE,
            fillcolor=PANEL,
            margin="12",
        )
        with box.subgraph() as column:
            column.attr(rank="same")
            for device in machine.devices:
                _device(column, device)
            for above, below in zip(machine.devices, machine.devices[1:], strict=False):
                _tie(column, above, below, arrows)
        _memory(box, machine)
        if picture.exchange is not None and len(picture.machines) == 1:
            _exchange(box, picture, picture.exchange)


def _memory(box: Digraph, machine: MachineBox) -> None:
    """Add a machine's memory, as high as its devices together, so that their links are straight."""
    devices = [device for device in machine.devices if device.rank is not None] or list(machine.devices)
    rows = [f'<TD PORT="{device.key}" WIDTH="1" HEIGHT="{_height(device)}"></TD>' for device in devices]
    rows[0] += f'<TD ROWSPAN="{len(rows)}" CELLPADDING="7">host<BR/>memory</TD>'
    table = "".join(f"<TR>{row}</TR>" for row in rows)
    box.node(
        f"{machine.key}_memory",
        label=f"<{_table(table)}>",
        style="rounded,filled",
        color=LINE,
        fillcolor=PAPER,
        fontcolor=MUTED,
        margin="0",
    )


def _height(device: Device) -> int:
    """Return a device's approximate height in the column, in points, with the gap below it."""
    return 78 + 13 * len(device.lines()) + (5 if device.layers else 0)


def _device(column: Digraph, device: Device) -> None:
    line, ground = VENDOR_COLOURS.get(device.vendor, OTHER_VENDOR)
    if device.rank is None:
        line, ground = LINE, PANEL
    dash = ",dashed" if device.emulated else ""
    rows = [_row(device.heading, MUTED, 10), _row(device.name, INK, 12, bold=True)]
    if device.emulated and "(emulated)" not in device.name:
        rows.append(_row("altered: not as it is", WARNING, 10))
    for text in device.lines():
        rows.append(_row(text, MUTED if device.rank is None else INK, 10))
    if device.rank is not None and device.share is not None:
        rows.append(_bar(device.share, line))
    column.node(
        device.key,
        label=f"<{_table(''.join(rows), padding=1)}>",
        style=f"rounded,filled{dash}",
        color=line,
        fillcolor=ground,
        penwidth="1.5",
    )


def _table(rows: str, more: str = "", padding: int = 0) -> str:
    """Return a table without lines."""
    return f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="{padding}"{more}>{rows}</TABLE>'


def _row(text: str, colour: str, size: int, bold: bool = False) -> str:
    inner = f'<FONT COLOR="{colour}" POINT-SIZE="{size}">{_markup(text)}</FONT>'
    return f'<TR><TD ALIGN="LEFT">{f"<B>{inner}</B>" if bold else inner}</TD></TR>'


def _bar(share: float, colour: str) -> str:
    """Return a row with a bar as long as the share."""
    long = min(max(round(share * BAR_WIDTH), 1), BAR_WIDTH - 1)
    cell = '<TD FIXEDSIZE="TRUE" HEIGHT="5" WIDTH="{}" BGCOLOR="{}"></TD>'
    cells = cell.format(long, colour) + cell.format(BAR_WIDTH - long, TRACK)
    fixed = f'FIXEDSIZE="TRUE" WIDTH="{BAR_WIDTH}" HEIGHT="5"'
    inner = _table(f"<TR>{cells}</TR>", f' ALIGN="LEFT" {fixed}')
    return f'<TR><TD ALIGN="LEFT" HEIGHT="12">{inner}</TD></TR>'


def _tie(column: Digraph, above: Device, below: Device, arrows: Mapping[tuple[str, str], Arrow]) -> None:
    """Keep one device below another, by the arrow between them or by an invisible edge.

    dot puts the head of an edge within a column above its tail.
    """
    arrow = arrows.get((above.key, below.key))
    if arrow is None:
        column.edge(below.key, above.key, style="invis", weight="10")
    else:
        both = (below.key, above.key) in arrows
        words = ["activations,", "gradients"] if both else ["activations ↓", "gradients ↑"]
        column.edge(below.key, above.key, dir="back", weight="10", label=_beside(words), **ARROW)


def _beside(lines: Sequence[str]) -> str:
    """Return a label to the right of an edge between two devices of a column.

    dot centres labels on the edge, so the left half of this one is empty.
    """
    rows = "".join(_row(line, EXCHANGE, 9) for line in lines)
    text = _table(rows)
    cells = f'<TD WIDTH="104" FIXEDSIZE="TRUE" HEIGHT="1"></TD><TD ALIGN="LEFT" WIDTH="64">{text}</TD>'
    return f"<{_table(f'<TR>{cells}</TR>')}>"


def _other_arrows(graph: Digraph, picture: Picture) -> None:
    """Add the arrows between devices that are not neighbours in a column."""
    tied = {
        (above.key, below.key)
        for machine in picture.machines
        for above, below in zip(machine.devices, machine.devices[1:], strict=False)
    }
    for arrow in picture.arrows:
        if (arrow.sender, arrow.receiver) not in tied:
            graph.edge(arrow.sender, arrow.receiver, dir="forward", constraint="false", **ARROW)


def _exchange(graph: Digraph, picture: Picture, exchange: ExchangeBox) -> None:
    """Add the exchange: beside the devices if their own links carry it, else beside the hosts' memories."""
    graph.node(
        "exchange",
        label=_stacked(exchange_lines(picture, exchange)),
        style="rounded,filled",
        color=EXCHANGE,
        fillcolor=EXCHANGE_FILL,
        penwidth="1.5",
    )
    ends = {"color": EXCHANGE, "penwidth": "1.8"}
    if exchange.direct:
        for key in exchange.members:
            graph.edge("exchange:e", f"{key}:w", **ends)
        return
    for machine in picture.machines:
        if any(device.key in exchange.members for device in machine.devices):
            graph.edge(f"{machine.key}_memory:e", "exchange:w", **ends)


def _stacked(lines: Sequence[str]) -> str:
    """Return a label whose first line is bold."""
    texts = [f'<FONT POINT-SIZE="10">{_markup(line)}</FONT>' for line in lines[1:]]
    return f"<{'<BR/>'.join([f'<B>{_markup(lines[0])}</B>', *texts])}>"


def _network(graph: Digraph, picture: Picture) -> None:
    """Add the exchange between machines, or only the network if it carries activations alone."""
    if picture.exchange is not None:
        _exchange(graph, picture, picture.exchange)
        return
    if not any(arrow.network for arrow in picture.arrows):
        return
    label = ["network", *([str(picture.network)] if picture.network is not None else [])]
    graph.node(
        "network", label=_stacked(label), style="rounded,filled", color=LINE, fillcolor=PAPER, fontcolor=MUTED
    )
    for machine in picture.machines:
        graph.edge(f"{machine.key}_memory:e", "network:w")


def _title(picture: Picture) -> str:
    rows = [_row(line, INK, 13, bold=True) for line in picture.title]
    rows += [_row(line, MUTED, 11) for line in picture.lines]
    if picture.warning is not None:
        rows.append(_row(picture.warning, WARNING, 11, bold=True))
    for remark in picture.remarks:
        rows += [_row(line, MUTED, 10) for line in textwrap.wrap(remark, LONGEST_REMARK)]
    rows.append('<TR><TD HEIGHT="6"></TD></TR>')
    return f"<{_table(''.join(rows), padding=1)}>"


def _markup(text: str) -> str:
    """Return a text for an HTML-like label, without characters that XML does not have."""
    return html.escape(printable(text)) or " "


def _plain(text: str) -> str:
    """Return a text for a plain label, with escapes and markup quoted."""
    from graphviz import escape

    return str(escape("\n".join(printable(line) for line in text.split("\n")))).replace("\n", "\\n")


def _lines(lines: Sequence[str]) -> str:
    return _plain("\n".join(lines)) if lines else ""


def network_title(picture: Picture) -> str:
    """Return the name of the network between machines, with its rate if it is known."""
    return f"network: {picture.network}" if picture.network is not None else "network"


def exchange_lines(picture: Picture, exchange: ExchangeBox) -> list[str]:
    """Return lines on the exchanged values, their time and their transport, and on the network if used."""
    network = [network_title(picture)] if len(picture.machines) > 1 else []
    return [exchange.what, f"{exchange.when}: {exchange.how}", *network]


def printable(text: str) -> str:
    """Return the text with its control characters replaced."""
    return "".join(character if character.isprintable() else "�" for character in text)


def restyled(svg: str, prefix: str, standalone: bool = True) -> str:
    """Return dot's SVG with unique ids and colours that follow a light or dark page.

    Attributes keep the light colours, for viewers without style sheets.

    Args:
        prefix: id of the drawing, and prefix of its parts' ids; unique within a page.
        standalone: whether the drawing is a file with its own background; else it is part of a page.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<title>.*?</title>\n?", "", svg, flags=re.DOTALL)  # browsers would show our keys
    svg = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}-\1"', svg)
    if not standalone:
        svg = re.sub(rf'<polygon fill="{PAPER}" stroke="(?:transparent|none)"[^>]*/>\n?', "", svg, count=1)
    svg = re.sub(r"<(?:polygon|path|text|polyline|ellipse)\b[^>]*?(?=/?>)", _with_classes, svg)
    rules = [
        (f"#{prefix} .{kind}{number}", f"{{{name}:{dark}}}")
        for number, dark in enumerate(DARK.values())
        for kind, name in (("f", "fill"), ("s", "stroke"))
        if re.search(rf'class="[^"]*\b{kind}{number}\b', svg)
    ]
    style = f"<style>{_style_sheet(rules, standalone)}</style>\n"
    opening = svg.index(">") + 1
    head = f'id="{prefix}" role="img" aria-label="Diagram of the plan" style="max-width:100%;height:auto"'
    return f"<svg {head}{svg[4:opening]}\n{style}{svg[opening:].lstrip()}"


def _style_sheet(rules: Sequence[tuple[str, str]], standalone: bool) -> str:
    """Return the rules for dark pages; a page around the drawing may choose its theme by `data-theme`.

    Print keeps the light colours.
    """
    dark = "@media screen and (prefers-color-scheme: dark)"
    if standalone:
        return f"{dark}{{{''.join(name + look for name, look in rules)}}}"
    system = "".join(f':root:not([data-theme="light"]) {name}{look}' for name, look in rules)
    chosen = "".join(f':root[data-theme="dark"] {name}{look}' for name, look in rules)
    return f"{dark}{{{system}}}@media screen{{{chosen}}}"


def _with_classes(match: re.Match[str]) -> str:
    """Return an element's opening tag with a class for each colour that differs on a dark page."""
    numbers = {light: number for number, light in enumerate(DARK)}
    colours = re.findall(r'\b(fill|stroke)="(#[0-9a-f]{6})"', match[0])
    classes = [f"{kind[0]}{numbers[colour]}" for kind, colour in colours if colour in numbers]
    return f'{match[0]} class="{" ".join(classes)}"' if classes else match[0]
