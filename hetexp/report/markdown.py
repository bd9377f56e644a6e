"""`report.md`: the comparison as text, readable in a minute."""

from __future__ import annotations

from hetexp.report.comparison import Comparison


def render(comparison: Comparison) -> str:
    """Return the report as Markdown."""
    lines = [f"# {comparison.title}", "", "| variant | samples/s |", "|---|---:|"]
    for one in comparison.variants:
        speed = one.samples_per_second
        lines.append(f"| {one.label} | {'–' if speed is None else format(speed.mean, '.4g')} |")
    return "\n".join(lines) + "\n"
