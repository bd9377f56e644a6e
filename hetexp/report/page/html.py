"""The report's page: one self-contained HTML file for screens, phones and paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from hetexp.core.device import plain_name
from hetexp.report.charts.svg import percent
from hetexp.report.diagram.files import svg_of
from hetexp.report.figures import throughput
from hetexp.report.page import devices, figures, table
from hetexp.report.page.data import Drawn, as_json, drawn, plain
from hetexp.report.results import Comparison
from hetexp.report.runs import RunRecord
from hetexp.report.variants import label_of
from hetexp.report.words import counted, number

SENTENCE = re.compile(r"(?<=\.) (?=[A-Z`])")
"""Space between two sentences."""
MOST_FAILED = 4
"""Failed runs that are shown at first; further ones are folded."""


@dataclass(frozen=True)
class Section:
    """A heading with its figures."""

    id: str
    name: str
    figures: tuple[figures.Figure, ...]
    controls: bool = False
    """Whether its charts have switches."""


@cache
def templates() -> Environment:
    """Return the environment of the templates of `hetexp/report/templates`."""
    environment = Environment(
        loader=PackageLoader("hetexp.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    return environment


def _code(text: str) -> Markup:
    """Return a text, escaped, with words in backticks as code."""
    return Markup(re.sub(r"`([^`\n]+)`", r"<code>\1</code>", str(escape(text))))


@cache
def _vendored(name: str) -> Markup:
    """Return a vendored file for an element of the page."""
    text = files("hetexp.report").joinpath("vendor", name).read_text(encoding="utf-8")
    if "</script" in text or "</style" in text:
        raise ValueError(f"{name} would end the element that it is in")
    return Markup(text)


def render(comparison: Comparison) -> str:
    """Return the page of a comparison as HTML that needs no network and no other file."""
    shown = drawn(comparison)
    sections = _sections(comparison, shown)
    columns = table.columns(comparison.variants)
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            comparison=comparison,
            answer=SENTENCE.split(comparison.answer, maxsplit=1),
            written=date.today().isoformat(),
            tiles=_tiles(comparison),
            badges=_badges(comparison),
            emulated=table.EMULATED if comparison.emulated else None,
            failed=[_failure(run, comparison.keys) for run in comparison.failed],
            most_failed=MOST_FAILED,
            columns=columns,
            variants=[
                (n, variant, table.marks(comparison, variant), [column.of(variant) for column in columns])
                for n, variant in enumerate(comparison.variants, 1)
            ],
            colours={chart.number: chart.colour for chart in shown},
            explained=table.explained(comparison),
            invalid=table.invalid(comparison),
            shown=shown,
            sections=sections,
            plan=_plan(comparison),
            runs=_runs(comparison),
            data=Markup(as_json(plain(comparison, shown))),
            uplot_js=_vendored("uPlot.iife.min.js"),
            uplot_css=_vendored("uPlot.min.css"),
            live=any(section.controls for section in sections),
        )
    )


def _tiles(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return the main figures: value, name and context of each."""
    best = comparison.best
    if best is None or best.samples_per_second is None:
        return []
    of = "the best variant" if len(comparison.variants) > 1 else ""
    speed = best.samples_per_second
    if speed.high is not None:
        of = " · ".join(text for text in (f"± {number(speed.high - speed.mean, 2)}", of) if text)
    tiles = [(number(speed.mean, 4), "samples / s", of)]
    for gain, name, of in (
        (best.gain_over_equal, "the equal split", "same settings and seed"),
        (best.gain_over_single, "the fastest device", "working alone"),
    ):
        if gain is not None and len(comparison.variants) > 1 and abs(gain.mean - 1) > 1e-9:
            tiles.append((f"{gain.mean:.2f}×", f"over {name}", of))
    if best.efficiency is not None:
        of = "" if best.ceiling is None else f"{percent(best.ceiling)} can be reached"
        tiles.append((percent(best.efficiency.mean), "of the devices' own speeds", of))
    if best.eval_loss is not None:
        tiles.append((number(best.eval_loss.mean), "evaluation loss", "at the end"))
    return tiles[:4]


def _badges(comparison: Comparison) -> list[tuple[str, str]]:
    """Return short facts of all runs, each with its class."""
    runs = comparison.runs
    seeds = {run.seed for run in runs if run.seed is not None}
    count = len(runs) + len(comparison.failed)
    badges = [(counted(count, "run"), ""), (counted(len(comparison.variants), "variant"), "")]
    if seeds:
        badges.append((counted(len(seeds), "seed"), ""))
    if comparison.failed:
        badges.append((f"{len(comparison.failed)} not completed", "bad"))
    names = dict.fromkeys(
        plain_name(device["name"]) for run in runs for device in run.summary.get("devices", ())
    )
    if names:
        badges.append(
            (" + ".join(list(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else ""), "")
        )
    for key in ("model", "data"):
        if key in comparison.common:
            badges.append((f"{key} {comparison.common[key]}", ""))
    return badges


def _failure(run: RunRecord, keys: Sequence[str]) -> dict[str, str]:
    """Return status, settings, error and folder of a run that did not complete."""
    error = run.summary.get("error") or "no reason is known"
    text = error.get("message", str(error)) if isinstance(error, dict) else str(error)
    logs = run.folder / "logs"
    return {
        "status": run.status,
        "what": label_of(run, keys) + ("" if run.seed is None else f", seed {run.seed}"),
        "error": text.strip(),
        "where": str(logs if logs.is_dir() else run.folder),
    }


def _sections(comparison: Comparison, shown: Sequence[Drawn]) -> list[Section]:
    """Return the sections that have figures."""
    colours = figures.device_colours(comparison, shown)
    over_time = figures.split_over_time(shown, colours)
    candidates: list[tuple[str, str, list[figures.Figure | None]]] = [
        ("throughput", "Throughput", [figures.throughput(comparison, shown)]),
        ("lost", "Where the devices' speed went", [figures.lost(shown)]),
        ("gain", "Gain", [figures.gains(shown)]),
        ("loss", "Loss", [*figures.loss(shown)]),
        ("split", "Split of the work", [figures.split_bars(shown, colours), *over_time]),
        ("curve", "Weights curve", [devices.weights_curve(comparison, shown)]),
        ("devices", "Predicted and measured", [
            figures.predicted(shown), devices.profiles(comparison, shown, colours)
        ]),
        ("cost", "Energy and exchange", [devices.energy(shown), devices.exchange(shown)]),
    ]  # fmt: skip
    sections = []
    for id_, name, drawings in candidates:
        present = tuple(figure for figure in drawings if figure is not None)
        if sum(not figure.full for figure in present) % 2:  # the last figure is alone in its row
            present = (*present[:-1], replace(present[-1], full=True))
        if present:
            live = any(figure.live for figure in present)
            sections.append(Section(id_, name, present, live))
    return sections


def _plan(comparison: Comparison) -> Markup | None:
    """Return the drawing of the best variant's plan, `None` if Graphviz is not installed."""
    best = comparison.best
    plan = best.runs[0].plan if best is not None else None
    drawing = svg_of(plan, prefix="plan") if plan is not None else None
    return None if drawing is None else Markup(drawing)


def _runs(comparison: Comparison) -> list[dict[str, str]]:
    """Return a row for each run, failed runs last."""
    rows = []
    completed = [(str(n), run) for n, variant in enumerate(comparison.variants, 1) for run in variant.runs]
    for variant, run in [*completed, *(("", run) for run in comparison.failed)]:
        speed = throughput(run)
        rows.append(
            {
                "variant": variant,
                "seed": "" if run.seed is None else str(run.seed),
                "status": run.status,
                "speed": "" if speed is None else number(speed, 4),
                "id": str(run.summary.get("run_id") or ""),
                "folder": str(run.folder),
            }
        )
    return rows
