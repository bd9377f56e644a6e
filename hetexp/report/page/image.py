"""The chart of throughput as an image of its own, for slides, notebooks and documents."""

from __future__ import annotations

import re
import textwrap

from markupsafe import Markup

from hetexp.report.page.data import drawn
from hetexp.report.page.figures import throughput
from hetexp.report.page.html import templates
from hetexp.report.results import Comparison

WIDTH, MARGIN, TOP = 760.0, 20.0, 44.0
CAPTION = 110
"""Most characters of a line of the caption."""


def render(comparison: Comparison) -> str | None:
    """Return samples a second of each variant as SVG that needs no other file, for light and dark pages.

    `None` if no run has completed.
    """
    figure = throughput(comparison, drawn(comparison))
    if figure is None:
        return None
    chart_width = WIDTH - 2 * MARGIN
    chart = figure.draw(chart_width)
    chart_height = float(re.findall(r'height="([\d.]+)"', chart)[0])
    caption = figure.caption
    if figure.emulated:
        caption = f"Emulated devices: no measurement of hardware. {caption}"
    lines = textwrap.wrap(caption, CAPTION)
    image = templates().get_template("image.svg.j2")
    return image.render(
        title="Samples a second of each variant" + (", emulated" if comparison.emulated else ""),
        chart=Markup(chart),
        caption=lines,
        width=WIDTH,
        height=TOP + chart_height + 16 * len(lines) + MARGIN,
        chart_width=chart_width,
        chart_height=chart_height,
        margin=MARGIN,
        top=TOP,
    )
