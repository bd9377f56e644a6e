"""Charts: scales, lengths, positions, and numbers as text."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.report import words
from hetexp.report.charts import lines as charts_lines
from hetexp.report.charts import svg as charts
from hetexp.report.charts.bars import Bar, Part, Row, bars, dots, stacked
from hetexp.report.charts.lines import Line, Spot
from hetexp.report.charts.svg import Scale, scale
from hetexp.report.results import Interval

ROWS = [Row(f"ddp, policy {place}", place, f"v{place}", emulated=place == 2) for place in (1, 2, 3)]


def elements(svg: str, name: str, class_: str = "") -> list[ET.Element]:
    found = ET.fromstring(svg).iter(name)
    return [one for one in found if class_ in (one.get("class") or "").split() or not class_]


def number(element: ET.Element, name: str) -> float:
    return float(element.get(name) or "nan")


@pytest.mark.parametrize("width", [1000.0, 322.0])
def test_bars_are_as_long_as_their_values(width: float) -> None:
    values = [90_000.0, 60_000.0, 15_000.0]
    whiskers = [(80_000.0, 100_000.0), (None, None), (-10_000.0, 40_000.0)]
    svg = bars(
        [Bar(row, v, *w, words.number(v)) for row, v, w in zip(ROWS, values, whiskers, strict=True)],
        width,
        "Samples a second",
        "samples / s",
        (45_000.0, "Fastest device alone"),
    )
    found = elements(svg, "rect", "bar")
    lengths = [number(one, "width") for one in found]
    assert lengths == pytest.approx([v * lengths[0] / values[0] for v in values], abs=0.02)
    start = number(found[0], "x")
    reference = elements(svg, "line", "reference")[0]
    assert number(reference, "x1") == pytest.approx(start + lengths[0] / 2, abs=0.02)
    assert len(elements(svg, "rect", "hatch")) == 1, "the emulated row alone"
    cut = elements(svg, "path", "open")
    assert len(cut) == 1, "the interval that goes below 0 ends in an arrow"
    assert all(0 <= number(line, at) <= width for line in elements(svg, "line") for at in ("x1", "x2"))


def test_a_whisker_far_beyond_the_bars_does_not_shrink_them() -> None:
    rows = [Bar(ROWS[0], 100.0, -900.0, 1100.0, "100"), Bar(ROWS[1], 90.0, None, None, "90")]
    longest = max(number(one, "width") for one in elements(bars(rows, 1000.0, "t", "u"), "rect", "bar"))
    assert longest > 450


def test_parts_add_up_and_negative_ones_lie_left_of_zero() -> None:
    parts = [
        Part("efficiency", 0.8, "useful"),
        Part("imbalance", 0.25, "imbalance"),
        Part("other", -0.05, "other"),
    ]
    svg = stacked([(ROWS[0], parts)], 1000.0, "Where it went", "of it")
    useful, imbalance, other = elements(svg, "rect", "part")
    whole = number(useful, "width") / 0.8
    assert number(imbalance, "width") == pytest.approx(0.25 * whole, abs=0.02)
    assert number(imbalance, "x") == pytest.approx(number(useful, "x") + number(useful, "width"), abs=0.02)
    assert number(other, "x") + number(other, "width") == pytest.approx(number(useful, "x"), abs=0.02)
    assert number(other, "width") == pytest.approx(0.05 * whole, abs=0.02)
    zero, one = number(useful, "x"), number(elements(svg, "line", "reference")[0], "x1")
    assert one - zero == pytest.approx(whole, abs=0.02)
    assert "−5" in svg
    assert len(elements(svg, "rect", "hatch")) == 1


@pytest.mark.parametrize("width", [1000.0, 322.0])
def test_dots_lie_on_their_side_of_one(width: float) -> None:
    panels = [("over equal", [Bar(ROWS[0], 1.4, 1.3, 1.5), Bar(ROWS[1], 0.7, None, None)])]
    svg = dots([*panels, ("over single", [Bar(ROWS[0], 2.0, None, None)])], width, "Gain")
    first, second, third = (number(one, "cx") for one in elements(svg, "circle"))
    ones = [number(line, "x1") for line in elements(svg, "line", "reference")]
    assert second < ones[0] < first
    assert ones[1] < third
    assert len(elements(svg, "circle", "hollow")) == 1


def test_lines_bands_and_points_that_no_logarithm_has() -> None:
    line = Line("ddp", "v1", (0.0, 10.0, 20.0), (4.0, 2.0, 0.0), (3.5, 1.5, 0.1), (4.5, 2.5, 0.2))
    svg = charts_lines.lines([line], 470.0, "Loss", ("samples", "loss"), log=True)
    curve = elements(svg, "path", "curve")[0]
    assert (curve.get("d") or "").count("L") == 1, "a loss of 0 has no place on a logarithmic axis"
    assert len(elements(svg, "path", "band")) == 1
    assert "nan" not in svg


def test_both_axes_of_the_scatter_are_one_scale() -> None:
    spots = [Spot(1e-3, 1e-3, "v1", "same"), Spot(1e-2, 2e-2, "v2", "slower")]
    svg = charts_lines.scatter(spots, 1000.0, "Steps", ("predicted", "measured"))
    diagonal = elements(svg, "line", "reference")[0]
    (x1, y1), (x2, y2) = ((number(diagonal, f"x{i}"), number(diagonal, f"y{i}")) for i in (1, 2))

    def above(circle: ET.Element) -> float:
        part = (number(circle, "cx") - x1) / (x2 - x1)
        return (y1 + part * (y2 - y1)) - number(circle, "cy")

    equal, slower = elements(svg, "circle")
    assert above(equal) == pytest.approx(0.0, abs=0.05)
    assert above(slower) > 10


def test_optimum_is_marked_at_its_share() -> None:
    spots = [
        Spot(share, 100 * share, "v1", f"{share}", low=90 * share, high=110 * share)
        for share in (0.2, 0.6, 0.8)
    ]
    svg = charts_lines.weights_curve(
        spots,
        [(0.1, 10.0), (0.9, 90.0)],
        [(0.8, "reference", "best")],
        1000.0,
        "Curve",
        ("share", "samples / s"),
    )
    assert elements(svg, "line", "reference")[0].get("x1") == elements(svg, "circle")[2].get("cx")
    assert len(elements(svg, "path", "model")) == 1


def test_profiles_draw_the_fitted_line() -> None:
    found = [(Line("a card", "d1", (10.0, 20.0), (0.3, 0.5)), 0.1, 0.02)]
    svg = charts_lines.profiles(found, 470.0, "Profiles")
    line = elements(svg, "path", "curve")[0].get("d") or ""
    start, end = ([float(v) for v in point.split()] for point in line.removeprefix("M").split("L"))
    for circle in elements(svg, "circle"):
        part = (number(circle, "cx") - start[0]) / (end[0] - start[0])
        assert number(circle, "cy") == pytest.approx(start[1] + part * (end[1] - start[1]), abs=0.05)


def test_areas_fill_the_whole() -> None:
    svg = charts_lines.areas([1, 2], [("a", "d1", [0.5, 0.7]), ("b", "d2", [0.5, 0.3])], 470.0, "Shares")
    upper = elements(svg, "path", "area")[1].get("d") or ""
    heights = {float(point.split()[1]) for point in upper.strip("MZ").split("L")}
    assert min(heights) == 10.0


def test_what_people_typed_is_escaped_and_cut_in_the_middle() -> None:
    row = Row("<script>alert(1)</script> & a very long name that goes on and on, and on=[0.1,0.9]", 1, "v1")
    svg = bars([Bar(row, 1.0, None, None, "1")], 322.0, "<b>", "u")
    assert "<script" not in svg and "<b>" not in svg
    labels = [one.text or "" for one in elements(svg, "text", "label")]
    assert "…" in labels[0] and labels[0].startswith("<script>") and labels[0].endswith("0.9]")
    assert charts.text_width(labels[0]) <= 322.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_scales_hold_their_values(values: list[float], zero: bool, log: bool, tight: bool) -> None:
    found: Scale = scale(values, 10.0, 110.0, zero=zero, log=log, tight=tight)
    for value in values:
        assert 10.0 - 1e-6 <= found(value) <= 110.0 + 1e-6
    assert 1 <= len(found.ticks) <= 12
    assert all(math.isfinite(tick) for tick in found.ticks)
    if zero and not log:
        assert found(0.0) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("131,400", words.number(131_412.0, 4)),
        ("0.0123", words.number(0.01234)),
        ("10.0", words.number(9.996)),
        ("0", words.number(0.0)),
        ("1.50 ms", words.seconds(0.0015)),
        ("1.5 ms", charts.tick_seconds(0.0015)),
        ("478 µs", words.seconds(478e-6)),
        ("50k", charts.tick(50_000.0)),
        ("0.25", charts.tick(0.25)),
        ("−12.3 %", charts.percent(-0.123)),
        ("+25.0 %", charts.deviation(1.25, 1.0)),
        ("263 kB", charts.size(263_336)),
        ("± 2", charts.bounds(Interval(10.0, 8.0, 12.0, 3), charts.tick)),
        ("9–12", charts.bounds(Interval(10.0, 9.0, 12.0, 3), charts.tick)),
        ("", charts.bounds(Interval(10.0, None, None, 1), charts.tick)),
    ],
)
def test_numbers_as_text(text: str, value: str) -> None:
    assert value == text
