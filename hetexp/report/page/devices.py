"""The page's figures of devices: weights curve, profiles, energy and exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hetexp.report.charts import bars as charts_bars
from hetexp.report.charts import lines as charts_lines
from hetexp.report.charts.bars import Bar
from hetexp.report.charts.lines import Line, Spot
from hetexp.report.charts.svg import percent, size
from hetexp.report.page.data import Drawn, profile_names
from hetexp.report.page.figures import Figure, bars, figure, row, with_interval
from hetexp.report.results import Comparison, DeviceProfile
from hetexp.report.words import number


def weights_curve(comparison: Comparison, shown: Sequence[Drawn]) -> Figure | None:
    """Return the throughput over the share of one of two devices."""
    curve = comparison.curve
    if curve is None or not curve.points:
        return None
    emulated = any(variant.emulated for variant in comparison.variants if variant.num_devices == 2)
    spots = []
    for point in curve.points:
        speed = point.samples_per_second
        colours = (drawn.colour for drawn in shown if drawn.variant.samples_per_second is speed)
        colour = next(colours, "plain")
        tip = f"{point.label}: {percent(point.share)} → {with_interval(speed)} samples / s"
        spots.append(Spot(point.share, speed.mean, colour, tip, point.label, speed.low, speed.high, emulated))
    best = curve.optimum_share
    measured = f"measured optimum {percent(best)}: {number(curve.optimum_samples_per_second, 4)}/s"
    marked = [(best, "reference", measured)]
    if curve.predicted_optimum_share is not None:
        share = curve.predicted_optimum_share
        marked.append((share, "model-line", f"predicted optimum {percent(share)}"))
    caption = "Points: measured splits, those that policies chose included."
    if curve.predicted:
        source = f" from {curve.predicted_source}" if curve.predicted_source else ""
        caption += f" Dashed: the cost model's prediction{source}."
    id_, _, name = curve.device.partition(" · ")
    device = name if name and not curve.other_device.endswith(f" · {name}") else id_
    draw = partial(
        charts_lines.weights_curve,
        spots,
        curve.predicted,
        marked,
        title=f"Throughput over the share of {device}",
        axes=(f"share of {device}", "samples / s"),
    )
    return figure("curve", caption, shown, draw)


def profiles(comparison: Comparison, shown: Sequence[Drawn], colours: dict[str, str]) -> Figure | None:
    """Return the seconds over samples that calibration measured of each device."""
    named = list(zip(profile_names(comparison), comparison.profiles, strict=True))
    lines = [
        (
            Line(name, colours[name], profile.samples, profile.seconds),
            profile.fixed_seconds,
            profile.seconds_per_sample,
        )
        for name, profile in named
        if profile.samples
    ]
    if not lines:
        return None
    caption = "Points: measured before the runs, in the device's own time. Dashed: the fitted line."
    legend = [(colours[name], _legend_entry(name, profile)) for name, profile in named]
    title = "Device profiles"
    draw = partial(charts_lines.profiles, lines, title=f"{title}: seconds over samples")
    profiled = figure("profiles", caption, shown, draw, full=False, name=title, legend=legend)
    return replace(profiled, emulated=any(profile.emulated for profile in comparison.profiles))


def _legend_entry(name: str, profile: DeviceProfile) -> str:
    alone = profile.samples_per_second
    speed = f"{number(alone)} samples / s alone, " if alone else ""
    fault = f" (ordered: {profile.fault})" if profile.fault else ""
    return f"{name}: {speed}{percent(profile.relative_speed)} of the fastest{fault}"


def energy(shown: Sequence[Drawn]) -> Figure | None:
    """Return the energy of each variant, in joules a sample."""
    joules = bars(shown, "joules_per_sample", 3, " J")
    if not joules:
        return None
    sources = dict.fromkeys(drawn.variant.energy_source for drawn in shown if drawn.variant.energy_source)
    caption = "Of all devices; shorter is better." + (f" Source: {'; '.join(sources)}." if sources else "")
    title = "Energy a sample"
    draw = partial(charts_bars.bars, joules, title=title, axis="joules a sample")
    return figure("energy", caption, shown, draw, full=False, name=title)


def exchange(shown: Sequence[Drawn]) -> Figure | None:
    """Return the bytes of a step that each variant's ranks hand to the exchange."""
    sent = [
        Bar(row(drawn), drawn.variant.bytes_per_step / 1e6, None, None, size(drawn.variant.bytes_per_step))
        for drawn in shown
        if drawn.variant.bytes_per_step is not None
    ]
    if len(sent) < 2 or all(bar.value == 0 for bar in sent):
        return None
    caption = "Bytes that the rank with the most hands to the exchange, after compression."
    title = "Bytes exchanged a step"
    draw = partial(charts_bars.bars, sent, title=title, axis="MB a step")
    return figure("exchange", caption, shown, draw, full=False, name=title)
