"""`report.md`: the comparison as text, readable in a minute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetexp.core.summary import LOST_TO
from hetexp.report.results import Comparison, DeviceProfile, Interval, Variant, WeightsCurve
from hetexp.report.runs import TRACEBACK, RunRecord
from hetexp.report.variants import label_of, plain
from hetexp.report.words import UNKNOWN, interval_text, number, seconds

LONGEST = 300
"""Characters of an error; all of it is in the run's folder."""

HOW = """\
- **Variant**: runs that differ in their seed only. Intervals are Student's 95 % over its runs, [low–high].
- **samples/s**: samples ÷ seconds of training, waiting and logging included, evaluations and checkpoints not;
  the steps before the first log line, in which libraries start, are left out where others follow.
- **Emulated** runs: seconds are the modelled devices', wall-clock ÷ the run's time scale.
- **step, predicted**: mean seconds of a step; predicted by the calibration, else by the cost model.
- **Devices by themselves**: measured before the runs. **Devices in the runs**: their samples ÷ the seconds in
  which they computed, waiting for others left out; larger shares weigh fixed costs less.
- **efficiency**: samples/s ÷ the sum of what the devices that took part do alone. **Ceiling**: the most that
  fixed costs, rounding and the exchange allow. What was lost to each, and the efficiency, sum to 1.
- **× single**: samples/s ÷ those of the fastest device alone; **× equal**: ÷ those of `balancing=equal` with
  the same other settings. Seed by seed where both have it; geometric mean, interval of the logarithms.
- **loss**: of the last log line and the last evaluation; runs that diverged are left out and counted.
- **best**: highest samples/s of the variants that are valid, ran as asked for and did not diverge; where
  there are some whose steps are those of one device, of these."""


def render(comparison: Comparison) -> str:
    """Return the report as Markdown."""
    mark = " (emulated)" if comparison.emulated else ""
    parts = [f"# {comparison.title}{mark}", comparison.answer]
    if comparison.variants:
        parts += ["## Variants", _table(_variants(comparison))]
    sections = (
        ("Where the rest went", _losses(comparison.variants)),
        ("Weights curve", _curve(comparison.curve)),
        ("Devices by themselves", _profiles(comparison.profiles)),
        ("Devices in the runs", _device_speeds(comparison.variants)),
        ("Runs that did not complete", _failures(comparison)),
        ("Notes", "\n".join(f"- {note}" for note in comparison.notes)),
        ("In all runs", _common(comparison.common)),
        ("How each figure is computed", HOW if comparison.variants else ""),
    )
    for title, text in sections:
        if text:
            parts += [f"## {title}", text]
    return "\n\n".join(parts) + "\n"


def _variants(comparison: Comparison) -> list[list[str]]:
    """Return the main table; a column without values is left out."""
    header = [
        "variant",
        "devices, shares",
        "samples/s",
        "step",
        "predicted",
        "efficiency",
        "ceiling",
        "× single",
        "× equal",
        "train loss",
        "eval loss",
        "J/sample",
        "runs",
        "remarks",
    ]
    rows = [
        [
            _name(one, one is comparison.best),
            _devices(one),
            _with_bounds(one.samples_per_second),
            seconds(one.step_seconds.mean) if one.step_seconds is not None else UNKNOWN,
            seconds(one.predicted_step_seconds) if one.predicted_step_seconds is not None else UNKNOWN,
            _with_bounds(one.efficiency, 3),
            number(one.ceiling, 3),
            _with_bounds(one.gain_over_single, 3),
            _with_bounds(one.gain_over_equal, 3),
            _loss(one.train_loss, one),
            _loss(one.eval_loss, one),
            _with_bounds(one.joules_per_sample, 3),
            str(len(one.runs)),
            _remarks(one),
        ]
        for one in comparison.variants
    ]
    kept = [i for i in range(len(header)) if any(row[i] not in ("", UNKNOWN) for row in rows)]
    return [[row[i] for i in kept] for row in [header, *rows]]


def _name(one: Variant, best: bool) -> str:
    name = one.label.replace("|", "\\|")
    return f"**{name}** ← best" if best else name


def _devices(one: Variant) -> str:
    """Return each device with the share that it had, the mean over the runs of the same devices."""
    runs = [run for run in one.runs if run.device_names == one.devices]
    words = []
    for place, name in enumerate(one.devices):
        shares = [run.summary["devices"][place].get("share") for run in runs]
        known = [share for share in shares if share is not None]
        words.append(f"{plain(name)} {sum(known) / len(known):.3f}" if known else plain(name))
    return " + ".join(words)


def _with_bounds(value: Interval | None, digits: int = 4) -> str:
    if value is None:
        return UNKNOWN
    bounds = interval_text(value, digits)
    return f"{number(value.mean, digits)} [{bounds}]" if bounds else number(value.mean, digits)


def _loss(value: Interval | None, one: Variant) -> str:
    if value is None and one.num_diverged:
        return "diverged"
    return _with_bounds(value)


def _remarks(one: Variant) -> str:
    remarks = [
        "emulated" if one.emulated else "",
        f"{one.num_invalid} of {len(one.runs)} invalid" if one.num_invalid else "",
        f"fell back: {one.fallback}" if one.fallback else _picked(one),
        f"{one.num_diverged} of {len(one.runs)} diverged" if one.num_diverged else "",
        "" if one.exact else "not one device's steps",
    ]
    return ", ".join(text for text in remarks if text)


def _picked(one: Variant) -> str:
    """Return what `strategy=auto` took."""
    if one.runs[0].setting("strategy") != "auto":
        return ""
    return "took " + ", ".join(dict.fromkeys(str(run.summary["strategy"]) for run in one.runs))


def _losses(variants: Sequence[Variant]) -> str:
    """Return the table of what was lost to what, of variants that know it."""
    rows = [
        [
            _name(one, False),
            number(one.efficiency.mean, 3),
            *(f"{100 * one.lost_to[name]:.1f} %" for name in LOST_TO),
        ]
        for one in variants
        if one.efficiency is not None and one.lost_to is not None
    ]
    return _table([["variant", "efficiency", *LOST_TO], *rows]) if rows else ""


def _curve(curve: WeightsCurve | None) -> str:
    if curve is None:
        return ""
    rows = [
        [point.label.replace("|", "\\|"), number(point.share, 3), _with_bounds(point.samples_per_second)]
        for point in curve.points
    ]
    text = (
        f"Of the splits tried, {plain(curve.device)} with a share of {number(curve.optimum_share, 3)} is the "
        f"fastest: {number(curve.optimum_samples_per_second)} samples/s."
    )
    if curve.predicted_optimum_share is not None:
        text += (
            f" Predicted from {curve.predicted_source}: {number(curve.predicted_optimum_share, 3)}, "
            f"{number(max(speed for _, speed in curve.predicted))} samples/s."
        )
    return f"{text}\n\n{_table([['split', f'share of {plain(curve.device)}', 'samples/s'], *rows])}"


def _profiles(profiles: Sequence[DeviceProfile]) -> str:
    rows = [
        [
            plain(one.device) + (" (emulated)" if one.emulated else ""),
            number(one.samples_per_second),
            f"{one.relative_speed:.3f}",
            seconds(one.fixed_seconds),
            seconds(one.seconds_per_sample),
            one.fault or "",
        ]
        for one in profiles
    ]
    header = [
        "device",
        "samples/s alone",
        "of the fastest",
        "fixed, a pass",
        "a sample more",
        "ordered fault",
    ]
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return _table([header, *rows]) if rows else ""


def _device_speeds(variants: Sequence[Variant]) -> str:
    """Return what each device did while it computed, of variants with several."""
    rows = [
        [
            _name(one, False),
            plain(device) + (" (emulated)" if one.emulated else ""),
            number(speed),
            f"{speed / max(one.device_speeds.values()):.3f}",
        ]
        for one in variants
        if len(one.device_speeds) > 1
        for device, speed in one.device_speeds.items()
    ]
    return _table([["variant", "device", "samples/s while it computes", "÷ fastest"], *rows]) if rows else ""


def _failures(comparison: Comparison) -> str:
    return "\n".join(_failure(run, comparison.keys) for run in comparison.failed)


def _failure(run: RunRecord, keys: Sequence[str]) -> str:
    error = " ".join(str(run.summary["error"] or "no reason is known").split())
    short = error if len(error) <= LONGEST else f"{error[:LONGEST]}…"
    seed = "" if run.seed is None else f", seed {run.seed}"
    more = f" Traceback: `{run.folder / TRACEBACK}`." if (run.folder / TRACEBACK).exists() else ""
    return f"- `{label_of(run, keys)}`{seed}: **{run.status}** in `{run.folder.name}`. {short}{more}"


def _common(common: dict[str, str]) -> str:
    return " ".join(f"`{key}={value}`" for key, value in common.items())


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row is the header; columns of figures stand to the right."""

    def lines() -> Iterator[str]:
        header, *body = rows
        yield f"| {' | '.join(header)} |"
        right = [all(row[i][:1] in "–0123456789-" for row in body if row[i]) for i in range(len(header))]
        yield f"|{'|'.join('---:' if figures else '---' for figures in right)}|"
        for row in body:
            yield f"| {' | '.join(row)} |"

    return "\n".join(lines())
