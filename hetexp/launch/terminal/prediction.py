"""Shows a prediction in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hetexp.core.device import GIB
from hetexp.core.plan import Plan
from hetexp.launch.prepare.planning import RunPrediction
from hetexp.launch.terminal.lines import UNKNOWN, format_number
from hetexp.plan.device_estimates import CATALOGUE, MEASURED, NOTHING
from hetexp.plan.predict.answer import fastest_alone
from hetexp.plan.predict.inputs import PredictedRun
from hetexp.plan.predict.runs import Prediction
from hetexp.plan.predict.scale import Scaled
from hetexp.plan.routes import route_of_all, route_reason
from hetexp.plan.stages.assign import layer_range

MIB = 2**20
WIDE = 100
"""Fewest columns of a terminal for tables with all columns."""
LISTED = 8
"""Most devices with a row each; more devices have a row for each kind."""


ROWS = 10
"""Most rows of the short table."""
SPLIT, WIDE_SPLIT = 2, 4
"""Most devices whose samples the short table shows, in a narrow and in a wide terminal."""


def show(prediction: RunPrediction, console: Console, details: bool = False) -> None:
    """Print the answer and the fastest rows of a run's predictions.

    Args:
        details: whether to print all rows, each device's samples and memory, and all reasons instead.
    """
    show_one = show_details if details else show_prediction
    show_one(prediction.as_it_is, console)
    if prediction.what_if is not None:
        console.rule(Text(f"What if: {', '.join(map(str, prediction.changes))}"), align="left")
        show_one(prediction.what_if, console)
        _compare(prediction.as_it_is, prediction.what_if, console)
    if prediction.scaled is not None:
        base = prediction.what_if or prediction.as_it_is
        console.rule(Text(f"At scale: {prediction.scaled.num_devices:,} devices"), align="left")
        show_scaled(prediction.scaled, base.plan, console)


def show_prediction(prediction: Prediction, console: Console) -> None:
    """Print the answer, the fastest row of each strategy, and how to train like the recommended one."""
    if prediction.answer:
        _line(console, prediction.answer)
    rows, devices = _fastest_rows(prediction), prediction.plan.devices
    with_split = len(devices) <= (SPLIT if console.width < WIDE else WIDE_SPLIT)
    columns = ["strategy", "policy", "step", "samples/s", "× alone", *(["split"] if with_split else [])]
    table = Table(title=Text(_heading(prediction)), title_justify="left", title_style="bold")
    for name in columns:
        left = name in ("strategy", "policy", "split")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    alone = fastest_alone(prediction)
    for row, policies in rows:
        best, gain = prediction.best, None
        if alone is not None and alone.step_seconds and row.step_seconds:
            gain = alone.step_seconds / row.step_seconds
        marked = best is not None and row.step_seconds == best.step_seconds and row.strategy == best.strategy
        cells = [
            f"{'→' if marked else ' '} {row.strategy}{'' if row.exact else ' *'}",
            _policies(policies, prediction.preferred),
            duration(row.step_seconds),
            format_number(row.samples_per_second, ",.0f"),
            format_number(gain, ".2f"),
            *([_split(row, len(devices))] if with_split else []),
        ]
        table.add_row(*map(Text, cells), style="bold green" if marked else "")
    if rows:
        console.print(table)
    if any(not row.exact for row, _ in rows):
        _line(console, "* learns differently from one device, and so is not recommended by its speed.")
    for reason in prediction.reasons[1:3]:  # how to run it, and the first device that is left out
        _line(console, f"· {reason}")
    if prediction.ends:
        _line(console, f"· {prediction.ends}")
    failed = [row.strategy for row in prediction.rows if row.problem is not None]
    unable = [name for name in dict.fromkeys(failed) if all(name != row.strategy for row, _ in rows)]
    if unable:
        _line(console, f"· Not predicted: {', '.join(filter(None, unable))}. hetexp plan --details says why.")


def _fastest_rows(prediction: Prediction) -> list[tuple[PredictedRun, list[str]]]:
    """Return the rows of the short table, each with its policies: exact strategies first, then by speed.

    Of each strategy it has the fastest row, of the recommended one all rows. A row whose devices but one are
    left out is that of the device alone.
    """
    several = len(prediction.plan.devices) > 1
    rows = [
        (row, policies)
        for row, policies in _merged(prediction.rows)
        if row.predicted and not (several and row.policy is not None and len(row.ranks) == 1)
    ]
    rows.sort(key=lambda pair: (not pair[0].exact, pair[0].step_seconds or 0.0))
    whole = prediction.best.strategy if prediction.best is not None else prediction.plan.strategy
    names = [row.strategy for row, _ in rows]
    kept = [pair for at, pair in enumerate(rows) if names[at] == whole or names.index(names[at]) == at]
    return kept[:ROWS]


def _merged(rows: Sequence[PredictedRun]) -> list[tuple[PredictedRun, list[str]]]:
    """Return the rows with their policies; rows of a strategy with equal splits are one row."""
    merged: dict[tuple[object, ...], tuple[PredictedRun, list[str]]] = {}
    for row in rows:
        if row.counts:
            key = (row.strategy, row.ranks, row.counts, row.stages)
            merged.setdefault(key, (row, []))[1].append(row.policy or "")
    return list(merged.values())


def _policies(policies: Sequence[str], preferred: str | None) -> str:
    """Return a policy to type, the run's if possible, and the number of others with the same split."""
    name = preferred if preferred is not None and preferred in policies else policies[0]
    return f"{name} (+{len(policies) - 1})" if len(policies) > 1 else name or UNKNOWN


def _split(row: PredictedRun, num_devices: int) -> str:
    """Return each device's samples, or how many layers it has if the model is cut: `44 + 20`."""
    parts = dict(zip(row.ranks, row.counts, strict=True))
    if row.stages:
        pairs = zip(row.ranks, row.stages, strict=True)
        parts = {rank: sum(s.end_layer - s.first_layer for s in stages) for rank, stages in pairs}
    text = " + ".join(f"{parts[rank]:,}" if rank in parts else UNKNOWN for rank in range(num_devices))
    return f"{text} layers" if row.stages else text


def show_details(prediction: Prediction, console: Console) -> None:
    """Print the table of strategies and policies, the table of devices, and the recommendation."""
    if prediction.answer:
        _line(console, prediction.answer)
    table = Table(title=Text(_heading(prediction)), title_justify="left", title_style="bold")
    columns = ["strategy", "policy", "step", "samples/s", "efficiency", "ceiling", "energy"]
    columns = [name for name in columns if console.width >= WIDE or name != "ceiling"]
    for name in columns:
        table.add_column(name, justify="left" if name in ("strategy", "policy") else "right", no_wrap=True)
    for row in prediction.rows:
        cells = {
            "strategy": row.strategy or UNKNOWN,
            "policy": row.policy or UNKNOWN,
            "step": duration(row.step_seconds),
            "samples/s": format_number(row.samples_per_second, ",.0f"),
            "efficiency": format_number(row.efficiency, ".1%"),
            "ceiling": format_number(row.ceiling, ".1%"),
            "energy": _energy(row.joules_per_sample, "/sample" if console.width >= WIDE else ""),
        }
        style = "bold green" if row is prediction.best else "dim" if row.problem is not None else ""
        marked = "→ " if row is prediction.best else "  "
        cells["strategy"] = marked + cells["strategy"]
        table.add_row(*(Text(cells[name]) for name in columns), style=style)
    console.print(table)
    _show_devices(prediction, console)
    for reason in prediction.reasons:
        _line(console, f"→ {reason}" if reason is prediction.reasons[0] else f"· {reason}")
    if prediction.ends:
        _line(console, f"· {prediction.ends}")
    route = route_of_all(prediction.plan)
    if route.levels:
        _line(console, f"· {route_reason(route, prediction.plan.devices)}")
    inexact = dict.fromkeys(row.strategy for row in prediction.rows if row.predicted and not row.exact)
    if inexact:
        _line(console, f"· Not exact, and so not recommended by their speed: {', '.join(inexact)}.")
    problems: dict[tuple[str, str], list[str]] = {}
    for row in prediction.rows:
        if row.problem is not None:
            problems.setdefault((row.strategy, row.problem), []).append(row.policy or "")
    for (strategy, problem), policies in problems.items():
        name = " + ".join(part for part in (strategy, ", ".join(filter(None, policies))) if part)
        _line(console, f"· {name}: {problem.removesuffix('.')}.")
    if not prediction.estimates.complete and prediction.estimates.reason is not None:
        _line(console, f"· Nothing is predicted: {prediction.estimates.reason}.")


def show_scaled(prediction: Scaled, plan: Plan, console: Console) -> None:
    """Print the table of the policies on a cluster."""
    network = plan.config["hardware"]["network"]
    boxes = f"{prediction.num_hosts:,} boxes of these {len(plan.devices)} devices on {network}"
    title = f"{boxes}, {prediction.total:,} samples a step"
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    columns = ["policy", "devices", "step", "of it exchange", "samples/s", "efficiency", "solved in"]
    columns = [name for name in columns if console.width >= WIDE or name != "solved in"]
    for name in columns:
        table.add_column(
            name, justify="left" if name == "policy" else "right", no_wrap=name != "of it exchange"
        )
    for row in prediction.rows:
        exposed = None
        if row.step_seconds is not None and row.compute_seconds is not None:
            exposed = row.step_seconds - row.compute_seconds
        cells = {
            "policy": row.policy,
            "devices": f"{row.devices:,}" if row.devices else UNKNOWN,
            "step": duration(row.step_seconds),
            "of it exchange": duration(exposed),
            "samples/s": format_number(row.samples_per_second, ",.0f"),
            "efficiency": format_number(row.efficiency, ".2%"),
            "solved in": duration(row.solve_seconds),
        }
        table.add_row(*(Text(cells[name]) for name in columns), style="dim" if row.problem else "")
    console.print(table)
    for row in prediction.rows:
        kinds = [
            f"{k.devices:,} × {_range(k.fewest, k.most)} on {plan.devices[k.device].name}" for k in row.kinds
        ]
        if kinds:
            _line(console, f"· {row.policy}, devices × samples: {', '.join(kinds)}.")
    for row in prediction.rows:
        if row.problem is not None:
            _line(console, f"· {row.policy}: {row.problem.removesuffix('.')}.")
    _line(console, "· Boxes are joined by one flat ring; rings within rings are not modelled.")


def duration(seconds: float | None) -> str:
    """Return seconds with a unit that fits: `12.3 ms`, `1.23 s`."""
    if seconds is None:
        return UNKNOWN
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:,.4g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _energy(joules: float | None, unit: str) -> str:
    if joules is None:
        return UNKNOWN
    return f"{joules:,.3g} J{unit}" if joules >= 1.0 else f"{joules * 1e3:.3g} mJ{unit}"


def _heading(prediction: Prediction) -> str:
    sources = dict.fromkeys(prediction.estimates.sources)
    texts = {MEASURED: "from measurements", CATALOGUE: CATALOGUE, NOTHING: "where it can be"}
    return f"Predicted {', '.join(texts[source] for source in sources)}: {prediction.total:,} samples a step"


def _show_devices(prediction: Prediction, console: Console) -> None:
    """Print each device's speed alone, and its samples and memory in each row; of many devices by kind."""
    devices = prediction.plan.devices
    groups: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        groups.setdefault(device.name if len(devices) > LISTED else device.id, []).append(rank)
    for ranks in groups.values():
        name = f"{len(ranks)} × {devices[ranks[0]].name}" if len(devices) > LISTED else f"{devices[ranks[0]]}"
        alone = format_number(prediction.solo_samples_per_second[ranks[0]], ",.0f", " samples/s alone, ")
        _line(console, f"· {name}: {alone.strip(UNKNOWN)}{prediction.estimates.sources[ranks[0]]}")
    table = Table(
        "strategy",
        "policy",
        "samples a step, and their memory",
        title="Devices in this order, joined by +",
        title_justify="left",
        title_style="bold",
    )
    for row, policies in _merged(prediction.rows):
        cells = " + ".join(_cell(row, group) for group in groups.values())
        table.add_row(*map(Text, (row.strategy, ", ".join(policies) or UNKNOWN, cells)))
    console.print(table)


def _cell(row: PredictedRun, group: Sequence[int]) -> str:
    """Return a group's samples under a row with their memory; of a pipeline also the layers."""
    memory = row.memory_bytes or (None,) * len(row.ranks)
    pairs = [(c, m) for rank, c, m in zip(row.ranks, row.counts, memory, strict=True) if rank in group]
    if not pairs:
        return UNKNOWN
    counts = [count for count, _ in pairs]
    text = _range(min(counts), max(counts))
    text += f" of {len(pairs)}" if len(pairs) < len(group) else ""
    needs = [need for _, need in pairs if need is not None]
    text += f" ({_memory(max(needs))})" if needs else ""
    return f"{_layers(row, group)}: {text}" if row.stages else text


def _layers(row: PredictedRun, group: Sequence[int]) -> str:
    """Return the layers of a group's devices, and their pipelines if there are several."""
    pairs = zip(row.ranks, row.stages, strict=True)
    stages = [stage for rank, stages_of_rank in pairs if rank in group for stage in stages_of_rank]
    text = ", ".join(layer_range(stage.first_layer, stage.end_layer) for stage in stages[:LISTED])
    if len({stage.replica for stages in row.stages for stage in stages}) == 1:
        return text
    pipelines = sorted({stage.replica for stage in stages})
    return f"{text} of pipeline {', '.join(map(str, pipelines))}"


def _memory(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def _range(fewest: int, most: int) -> str:
    return f"{fewest:,}" if fewest == most else f"{fewest:,}–{most:,}"


def _compare(now: Prediction, then: Prediction, console: Console) -> None:
    before, after = (p.best.step_seconds if p.best is not None else None for p in (now, then))
    if before is None or after is None:
        _line(console, "· No comparison: not both are predicted.")
        return
    words = f"{before / after:.2f}× the speed of now" if after < before * 0.999 else "no quicker than now"
    change = f"a step takes {duration(after)} instead of {duration(before)}"
    _line(console, f"→ With these changes {change}: {words}.")


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)
