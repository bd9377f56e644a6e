"""`report.md`: the comparison as text, readable in a minute."""

from __future__ import annotations

from collections.abc import Sequence

from hetexp.core.device import plain_name
from hetexp.core.summary import LOST_TO
from hetexp.report.results import Comparison, DeviceProfile, Interval, Variant, WeightsCurve
from hetexp.report.runs import TRACEBACK, RunRecord
from hetexp.report.variants import label_of
from hetexp.report.words import UNKNOWN, interval_text, number, seconds

LONGEST = 300
"""Characters shown of an error; the run's folder has the whole text."""

HOW = """\
- **Variant**: runs that differ in their seed only. Intervals are Student's 95 % over its runs, [low–high].
- **samples/s**: samples ÷ seconds of training, waiting and logging included, evaluations and checkpoints not.
  The steps before the first log line, in which libraries start, are left out if others follow.
- **Emulated** runs: seconds are the modelled devices', wall-clock ÷ the run's time scale.
- **step, predicted**: mean seconds of a step; predicted by the calibration, else by the cost model.
- **Devices by themselves**: measured before the runs. **Devices in the runs**: their samples ÷ the seconds in
  which they computed, waiting for others left out; larger shares weigh fixed costs less.
- **efficiency**: samples/s ÷ the sum of the participating devices' speeds alone. **Ceiling**: the most that
  fixed costs, rounding and the exchange allow. The losses and the efficiency sum to 1.
- **× single**: samples/s ÷ those of the fastest device alone; **× equal**: ÷ those of `balancing=equal` with
  the same other settings. Seed by seed if both have the seed; geometric mean, interval of the logarithms.
- **loss**: of the last log line and the last evaluation; runs that diverged are left out and counted.
- **best**: highest samples/s of the variants that are valid, ran as requested and did not diverge. Variants
  whose steps are those of one device take precedence."""


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
    """Return the rows of the main table, without empty columns."""
    rows = [
        {
            "variant": _name(variant, variant is comparison.best),
            "devices, shares": _devices(variant),
            "samples/s": _with_bounds(variant.samples_per_second),
            "step": seconds(variant.step_seconds.mean, 4) if variant.step_seconds is not None else UNKNOWN,
            "predicted": seconds(variant.predicted_step_seconds, 4),
            "efficiency": _with_bounds(variant.efficiency, 3),
            "ceiling": number(variant.ceiling, 3),
            "× single": _with_bounds(variant.gain_over_single, 3),
            "× equal": _with_bounds(variant.gain_over_equal, 3),
            "train loss": _loss(variant.train_loss, variant),
            "eval loss": _loss(variant.eval_loss, variant),
            "J/sample": _with_bounds(variant.joules_per_sample, 3),
            "runs": str(len(variant.runs)),
            "remarks": _remarks(variant),
        }
        for variant in comparison.variants
    ]
    header = [name for name in rows[0] if any(row[name] not in ("", UNKNOWN) for row in rows)]
    return [header, *([row[name] for name in header] for row in rows)]


def _name(variant: Variant, best: bool = False) -> str:
    name = cell(variant.label)
    return f"**{name}** ← best" if best else name


def _devices(variant: Variant) -> str:
    """Return each device with its share, the mean over the runs of the same devices."""
    runs = [run.summary["devices"] for run in variant.runs if run.device_names == variant.devices]
    words = []
    for place, name in enumerate(variant.devices):
        shares = [share for devices in runs if (share := devices[place].get("share")) is not None]
        words.append(f"{plain_name(name)} {sum(shares) / len(shares):.3f}" if shares else plain_name(name))
    return " + ".join(words)


def _with_bounds(value: Interval | None, digits: int = 4) -> str:
    if value is None:
        return UNKNOWN
    bounds = interval_text(value, digits)
    return f"{number(value.mean, digits)} [{bounds}]" if bounds else number(value.mean, digits)


def _loss(value: Interval | None, variant: Variant) -> str:
    return "diverged" if value is None and variant.num_diverged else _with_bounds(value)


def _remarks(variant: Variant) -> str:
    count = len(variant.runs)
    remarks = [
        "emulated" if variant.emulated else "",
        f"{variant.num_invalid} of {count} invalid" if variant.num_invalid else "",
        f"fell back: {variant.fallback}" if variant.fallback else _selected(variant),
        f"{variant.num_diverged} of {count} diverged" if variant.num_diverged else "",
        "" if variant.exact else "not one device's steps",
    ]
    return ", ".join(text for text in remarks if text)


def _selected(variant: Variant) -> str:
    """Return which strategies `strategy=auto` selected."""
    if variant.runs[0].setting("strategy") != "auto":
        return ""
    return "took " + ", ".join(dict.fromkeys(str(run.summary["strategy"]) for run in variant.runs))


def _losses(variants: Sequence[Variant]) -> str:
    """Return the table of lost speed by cause, of the variants that have it."""
    rows = [
        [
            _name(variant),
            number(variant.efficiency.mean, 3),
            *(f"{100 * variant.lost_to[name]:.1f} %" for name in LOST_TO),
        ]
        for variant in variants
        if variant.efficiency is not None and variant.lost_to is not None
    ]
    return _table([["variant", "efficiency", *LOST_TO], *rows]) if rows else ""


def _curve(curve: WeightsCurve | None) -> str:
    if curve is None:
        return ""
    rows = [
        [cell(point.label), number(point.share, 3), _with_bounds(point.samples_per_second)]
        for point in curve.points
    ]
    text = (
        f"Of the splits tried, {plain_name(curve.device)} with a share of {number(curve.optimum_share, 3)} "
        f"is the fastest: {number(curve.optimum_samples_per_second, 4)} samples/s."
    )
    if curve.predicted_optimum_share is not None:
        text += (
            f" Predicted from {curve.predicted_source}: {number(curve.predicted_optimum_share, 3)}, "
            f"{number(max(speed for _, speed in curve.predicted), 4)} samples/s."
        )
    return f"{text}\n\n{_table([['split', f'share of {plain_name(curve.device)}', 'samples/s'], *rows])}"


def _profiles(profiles: Sequence[DeviceProfile]) -> str:
    header = ["device", "samples/s alone", "of the fastest", "fixed, a pass", "a sample more"]
    rows = [
        [
            plain_name(profile.device) + (" (emulated)" if profile.emulated else ""),
            number(profile.samples_per_second, 4),
            f"{profile.relative_speed:.3f}",
            seconds(profile.fixed_seconds, 4),
            seconds(profile.seconds_per_sample, 4),
        ]
        for profile in profiles
    ]
    if any(profile.fault for profile in profiles):
        header.append("ordered fault")
        for row, profile in zip(rows, profiles, strict=True):
            row.append(profile.fault or "")
    return _table([header, *rows]) if rows else ""


def _device_speeds(variants: Sequence[Variant]) -> str:
    """Return the table of device speeds, of the variants with several devices."""
    rows = [
        [
            _name(variant),
            plain_name(device) + (" (emulated)" if variant.emulated else ""),
            number(speed, 4),
            f"{speed / max(variant.device_speeds.values()):.3f}",
        ]
        for variant in variants
        if len(variant.device_speeds) > 1
        for device, speed in variant.device_speeds.items()
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


def cell(text: str) -> str:
    """Return a text for a cell of a table, with `|` escaped."""
    return text.replace("|", "\\|")


def table_row(cells: Sequence[str]) -> str:
    """Return the line of a table's row."""
    return f"| {' | '.join(cells)} |"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row is the header; columns of figures are aligned to the right."""
    header, *body = rows
    right = [all(row[i][:1] in "–0123456789-" for row in body if row[i]) for i in range(len(header))]
    line = f"|{'|'.join('---:' if figures else '---' for figures in right)}|"
    return "\n".join([table_row(header), line, *map(table_row, body)])
