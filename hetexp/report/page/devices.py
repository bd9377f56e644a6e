"""The figures of devices and of what they spend: weights curve, profiles, energy, exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetexp.report.charts import bars as charts_bars
from hetexp.report.charts import lines as charts_lines
from hetexp.report.charts.bars import Bar
from hetexp.report.charts.lines import Line, Spot
from hetexp.report.charts.svg import number, percent, size
from hetexp.report.page.data import Drawn, profile_names
from hetexp.report.page.figures import Figure, bar, figure, row, with_interval
from hetexp.report.results import Comparison, DeviceProfile


def curve(comparison: Comparison, shown: Sequence[Drawn]) -> Figure | None:
    """Return the throughput over the share of one of two devices."""
    found = comparison.curve
    if found is None or not found.points:
        return None
    emulated = any(one.emulated for one in comparison.variants if one.num_devices == 2)
    spots = []
    for point in found.points:
        speed = point.samples_per_second
        own = next((one for one in shown if one.variant.samples_per_second is speed), None)
        tip = f"{point.label}: {percent(point.share)} → {with_interval(speed)} samples / s"
        colour = own.colour if own else "plain"
        spots.append(Spot(point.share, speed.mean, colour, tip, point.label, speed.low, speed.high, emulated))
    best = found.optimum_share
    marked = [
        (
            best,
            "reference",
            f"measured optimum {percent(best)}: {number(found.optimum_samples_per_second, 4)}/s",
        )
    ]
    if found.predicted_optimum_share is not None:
        share = found.predicted_optimum_share
        marked.append((share, "model-line", f"predicted optimum {percent(share)}"))
    caption = "Points: measured splits, with the policies that found one of their own."
    if found.predicted:
        source = f" from {found.predicted_source}" if found.predicted_source else ""
        caption += f" Dashed: what the cost model predicts{source}."
    id_, _, name = found.device.partition(" · ")
    device = name if name and not found.other_device.endswith(f" · {name}") else id_
    axes = (f"share of {device}", "samples / s")
    title = f"Throughput over the share of {device}"
    return figure(
        "curve",
        caption,
        shown,
        lambda w: charts_lines.weights_curve(spots, found.predicted, marked, w, title, axes),
    )


def profiles(comparison: Comparison, shown: Sequence[Drawn], colours: dict[str, str]) -> Figure | None:
    """Return what calibration measured of each device."""
    found = [
        (Line(name, colours[name], one.samples, one.seconds), one.fixed_seconds, one.seconds_per_sample)
        for name, one in zip(profile_names(comparison), comparison.profiles, strict=True)
        if one.samples
    ]
    if not found:
        return None
    caption = "Points: measured before the runs, in the device's own time. Dashed: the fitted line."
    legend = [
        (colours[name], _profile(name, one))
        for name, one in zip(profile_names(comparison), comparison.profiles, strict=True)
    ]
    title = "Device profiles"

    def draw(width: float) -> str:
        return charts_lines.profiles(found, width, f"{title}: seconds over samples")

    drawn_ = figure("profiles", caption, shown, draw, full=False, name=title, legend=legend)
    return replace(drawn_, emulated=any(one.emulated for one in comparison.profiles))


def _profile(name: str, one: DeviceProfile) -> str:
    """Return what a legend says of a device."""
    speed = f"{number(one.samples_per_second)} samples / s alone, " if one.samples_per_second else ""
    fault = f" (ordered: {one.fault})" if one.fault else ""
    return f"{name}: {speed}{percent(one.relative_speed)} of the fastest{fault}"


def energy(shown: Sequence[Drawn]) -> Figure | None:
    """Return the energy a sample of each variant."""
    found = [
        bar(one, one.variant.joules_per_sample, f"{with_interval(one.variant.joules_per_sample, 3)} J")
        for one in shown
        if one.variant.joules_per_sample is not None
    ]
    if not found:
        return None
    sources = dict.fromkeys(one.variant.energy_source for one in shown if one.variant.energy_source)
    caption = "Of all devices; shorter is better." + (f" Source: {'; '.join(sources)}." if sources else "")
    title = "Energy a sample"
    return figure(
        "energy",
        caption,
        shown,
        lambda w: charts_bars.bars(found, w, title, "joules a sample"),
        full=False,
        name=title,
    )


def exchange(shown: Sequence[Drawn]) -> Figure | None:
    """Return the bytes a step that each variant's ranks hand to the exchange."""
    found = [
        Bar(row(one), one.variant.bytes_per_step / 1e6, None, None, size(one.variant.bytes_per_step))
        for one in shown
        if one.variant.bytes_per_step is not None
    ]
    if len(found) < 2 or all(bar.value == 0 for bar in found):
        return None
    caption = "What the rank with the most of it hands to the exchange, in the form in which it travels."
    title = "Bytes exchanged a step"

    def draw(width: float) -> str:
        return charts_bars.bars(found, width, title, "MB a step")

    return figure("exchange", caption, shown, draw, full=False, name=title)
