"""The report's page: whole, escaped, marked, and with the comparison's own numbers."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import compared
import pytest
from markupsafe import escape

from hetexp.core.plan import Plan
from hetexp.report.comparison import compare
from hetexp.report.diagram.files import has_dot
from hetexp.report.page.data import MOST_DRAWN, MOST_POINTS
from hetexp.report.page.html import render
from hetexp.report.page.table import EMULATED
from hetexp.report.results import Comparison

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHOICES = {"strategy": "ddp", "balancing": "equal", "model": "convnet", "data": "digits"}
EVERY = {
    "failures",
    "variants",
    "throughput",
    "lost",
    "gain",
    "loss",
    "split",
    "curve",
    "devices",
    "cost",
    "about",
}


class Reader(HTMLParser):
    """Sections, figures with their text, and what elements refer to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.figures: dict[str, str] = {}
        self.references: list[str] = []
        self.scripts = 0
        self._figure: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        if tag == "section":
            self.sections.append(known["id"])
        elif tag == "figure":
            self._figure = known["id"]
            self.figures[self._figure] = ""
        elif tag == "script":
            self.scripts += 1
        self.references += [
            known[name] for name in ("src", "href", "xlink:href", "action", "data") if name in known
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag == "figure":
            self._figure = None

    def handle_data(self, data: str) -> None:
        if self._figure is not None:
            self.figures[self._figure] += data


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compared.rich(tmp_path_factory.mktemp("rich"))


@pytest.fixture(scope="module")
def page(rich: Comparison) -> str:
    return render(rich)


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found


def test_needs_nothing_from_outside(page: str) -> None:
    assert Reader(page).references == []
    assert not re.search(r"@import|@font-face|url\((?!#hatching\))", page)
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, which nobody loads
    outside = set(re.findall(r"https?:[^\s\"'<>)]+", page)) - namespaces
    assert outside == {"https://github.com/leeoniya/uPlot"}, "the licence note of the chart library alone"
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket", page)


def test_every_section_where_there_is_something_to_show(rich: Comparison, page: str) -> None:
    assert set(Reader(page).sections) == EVERY | ({"plan"} if has_dot() else set())
    without = {
        "failures": replace(rich, failed=()),
        "curve": replace(rich, curve=None),
        "gain": _variants(rich, gain_over_equal=None, gain_over_single=None),
        "lost": _variants(rich, lost_to=None),
        "devices": replace(_variants(rich, predicted_step_seconds=None), profiles=()),
        "cost": _variants(rich, joules_per_sample=None, bytes_per_step=None),
        "throughput": _variants(rich, samples_per_second=None),
    }
    for section, comparison in without.items():
        assert section not in Reader(render(comparison)).sections, section


def test_the_best_plan_is_drawn_where_it_can_be(rich: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rich.best is not None
    drawn: list[Plan] = []

    def svg_of(plan: Plan, prefix: str) -> str:
        drawn.append(plan)
        return f'<svg id="{prefix}-drawing"></svg>'

    monkeypatch.setattr("hetexp.report.page.html.svg_of", svg_of)
    page = render(rich)
    assert '<svg id="plan-drawing"></svg>' in page
    assert f"Plan of {rich.best.label}" in page
    assert drawn == [rich.best.runs[0].plan]
    monkeypatch.setattr("hetexp.report.page.html.svg_of", lambda plan, prefix: None)  # no Graphviz
    assert "plan" not in Reader(render(rich)).sections


def _variants(comparison: Comparison, **fields: Any) -> Comparison:
    return replace(comparison, variants=tuple(replace(one, **fields) for one in comparison.variants))


def test_emulated_in_every_figure_and_nowhere_else(page: str, tmp_path: Path) -> None:
    figures = Reader(page).figures
    assert len(figures) >= 12
    for name, text in figures.items():
        assert "emulated · modelled time" in text, name
    assert escape(EMULATED) in page
    real = render(compared.rich(tmp_path / "real", emulated=False))
    assert all("modelled time" not in text for text in Reader(real).figures.values())
    assert escape(EMULATED) not in real


def test_data_are_the_comparison(rich: Comparison, page: str) -> None:
    data = data_of(page)
    assert data["title"] == rich.title and data["answer"] == rich.answer and data["notes"] == list(rich.notes)
    assert [one["label"] for one in data["variants"]] == [one.label for one in rich.variants]
    for told, one in zip(data["variants"], rich.variants, strict=True):
        speed = one.samples_per_second
        assert speed is not None
        assert told["samples_per_second"] == {
            "mean": speed.mean,
            "low": speed.low,
            "high": speed.high,
            "count": speed.count,
        }
        assert told["lost_to"] == one.lost_to
        assert [run["run_id"] for run in told["runs"]] == [run.summary["run_id"] for run in one.runs]
    assert rich.best is not None and data["best"] == rich.best.label
    assert rich.curve is not None
    assert data["curve"]["points"][2]["share"] == rich.curve.points[2].share
    assert data["profiles"][1]["seconds"] == list(rich.profiles[1].seconds)
    assert data["failed"][0]["error"] == rich.failed[0].summary["error"]


def test_curves_are_means_over_seeds_of_the_log(rich: Comparison, page: str) -> None:
    told = data_of(page)["variants"][0]
    logs = [[line for line in run.metrics if "train/loss" in line] for run in rich.variants[0].runs]
    curve = told["drawn"]["train"]
    for place, lines in enumerate(zip(*logs, strict=True)):
        losses = [line["train/loss"] for line in lines]
        assert curve["mean"][place] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
        assert (curve["low"][place], curve["high"][place]) == (min(losses), max(losses))
        assert curve["samples"][place] == lines[0]["train/samples"]
    windows = [
        3 * log[0]["step_seconds"] / run.scale for run, log in zip(rich.variants[0].runs, logs, strict=True)
    ]
    assert curve["seconds"][1] == pytest.approx(2 * sum(windows) / len(windows), rel=1e-12)


def test_answer_best_and_marks(rich: Comparison, page: str) -> None:
    first = re.sub("<.*?>", "", page.split('<p class="answer">')[1].split("</p>")[0])
    assert html.unescape(first).strip() and html.unescape(first) in rich.answer.replace("`", "")
    rows = re.findall(
        r"<tr.*?</tr>", page.split('<table class="sortable">')[1].split("</table>")[0], re.DOTALL
    )[1:]
    assert ['class="best"' in row for row in rows] == [one is rich.best for one in rich.variants]
    assert ["! invalid" in row for row in rows] == [not one.valid for one in rich.variants]
    assert ["not exact" in row for row in rows] == [not one.exact for one in rich.variants]
    assert "<code>hardware.time_scale</code>" in page, "why a variant is invalid"


def test_invalid_speeds_are_called_so_in_every_chart(rich: Comparison, page: str) -> None:
    (outrun,) = (one for one in rich.variants if not one.valid)
    found = dict(re.findall(r'<figure id="figure-([\w-]+)"(.*?)</figure>', page, re.DOTALL))
    shown = {name for name, text in found.items() if outrun.label in text}
    assert {"throughput", "split", "predicted", "loss-seconds", "energy"} <= shown
    for name in shown:
        titled = re.findall(rf"{re.escape(outrun.label)}( \(invalid\))?", found[name])
        assert all(titled), name


def test_what_people_typed_stays_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    runs = [
        compared.record(
            tmp_path / str(place),
            CHOICES,
            speed=1000.0 + place,
            overrides=(f"name={evil}", f"model.note={evil}{place}"),
            status="failed" if place == 2 else "completed",
            error=evil if place == 2 else None,
        )
        for place in range(3)
    ]
    found = compare(runs, evil)
    page = render(replace(found, notes=(evil, "`code` is code")))
    assert "<img" not in page and "alert(1)</script>" not in page
    assert Reader(page).scripts == Reader(render(compare(runs[:1], "plain"))).scripts
    assert data_of(page)["title"] == evil and data_of(page)["notes"][0] == evil
    assert "<li><code>code</code> is code</li>" in page


def test_one_run(tmp_path: Path) -> None:
    page = render(compare([compared.record(tmp_path / "a", CHOICES, speed=500.0, later=(0.7, 0.3))], "one"))
    sections = set(Reader(page).sections)
    assert {"variants", "throughput", "lost", "loss", "split", "about"} <= sections
    assert not {"failures", "gain", "curve"} & sections
    assert "The run</h2>" in page
    assert "nan" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_none_completed(tmp_path: Path) -> None:
    runs = [
        compared.record(tmp_path / str(n), CHOICES, speed=1.0, seed=n, status="failed", error=f"broke {n}")
        for n in range(6)
    ]
    page = render(compare(runs, "none"))
    assert Reader(page).sections == ["failures", "about"]
    assert all(f"broke {n}" in page for n in range(6))
    assert "2 more</summary>" in page
    assert Reader(page).figures == {}


def test_a_loss_that_diverged(tmp_path: Path) -> None:
    good = compared.record(tmp_path / "good", CHOICES, speed=900.0)
    bad = compared.record(
        tmp_path / "bad",
        CHOICES | {"balancing": "profiled"},
        speed=1000.0,
        final={"train_loss": float("nan"), "eval": None},
    )
    log = tmp_path / "bad" / "metrics.jsonl"
    text = log.read_text(encoding="utf-8").replace('"train/loss": 1', '"train/loss": NaN, "was": 1')
    log.write_text(text, encoding="utf-8")
    page = render(compare([good, bad], "diverged"))
    assert "1 of 1 diverged" in page
    assert not re.search(r'"[^"]*\bnan\b[^"]*"', " ".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL)))
    assert data_of(page)["best"] == data_of(page)["variants"][1]["label"]


def test_two_hundred_runs(tmp_path: Path) -> None:
    found = compared.many(tmp_path)
    page = render(found)
    assert len(page) < 2_000_000
    assert f"Charts show {MOST_DRAWN} of 100 variants" in page
    variants = data_of(page)["variants"]
    assert len(variants) == 100 and sum(one["drawn"] is not None for one in variants) == MOST_DRAWN
    assert all(len(one["drawn"]["train"]["mean"]) <= MOST_POINTS for one in variants if one["drawn"])
    assert page.count('<th class="name" scope="row"') == 100


WRAPPER = """<!doctype html><pre id="told">never</pre>
<iframe width="{width}" height="3000" srcdoc="{page}"></iframe>
<script>
document.querySelector("iframe").addEventListener("load", (event) => {{
  const inner = event.target.contentWindow, page = inner.document;
  const heads = [...page.querySelectorAll("table.sortable th button")];
  heads[heads.length - 1].click(); heads[1].click(); heads[1].click();
  const rows = [...page.querySelectorAll("table.sortable tbody tr")];
  page.querySelector("[data-option=log] [data-value=log]").click();
  page.querySelector(".toggle").click();
  page.getElementById("theme").click();
  document.getElementById("told").textContent = JSON.stringify({{
    errors: inner.errors,
    width: page.documentElement.scrollWidth,
    speeds: rows.map((row) => Number(row.cells[1].dataset.value)),
    charts: page.querySelectorAll(".uplot canvas").length,
    shown: [...page.querySelectorAll("figure svg")].filter((svg) => svg.clientWidth > 0).length,
  }});
}});
</script>"""
ERRORS = """<script>window.errors = []; addEventListener("error", (event) => errors.push(event.message));
console.error = console.warn = (...words) => errors.push(words.join(" "));</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_in_a_browser(rich: Comparison, page: str, tmp_path: Path) -> None:
    """On a phone nothing is wider than the screen, charts are drawn, sorting sorts, and no script fails."""
    inner = page.replace("<head>", f"<head>{ERRORS}", 1)
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(WRAPPER.format(width=390, page=html.escape(inner)), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
    command = [str(CHROMIUM), *options, "--virtual-time-budget=3000", "--dump-dom", wrapper.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    match = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr
    told = json.loads(html.unescape(match[1]))
    assert told["errors"] == []
    assert told["width"] <= 390
    assert told["speeds"] == sorted(told["speeds"]) and len(told["speeds"]) == len(rich.variants)
    assert told["charts"] == 2
    assert told["shown"] == len(Reader(page).figures) - 2
