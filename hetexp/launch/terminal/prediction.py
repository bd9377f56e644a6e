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
from hetexp.plan.predict.inputs import PredictedRun
from hetexp.plan.predict.runs import Prediction
from hetexp.plan.predict.scale import Scaled, ScaledRow
from hetexp.plan.routes import route_of_all, route_reason
from hetexp.plan.stages.assign import layer_range

MIB = 2**20
WIDE = 100
"""Fewest columns of a terminal for tables with all columns."""
LISTED = 8
"""Most devices with a row each; more devices have a row for each kind."""


def show(prediction: RunPrediction, console: Console) -> None:
    """Print the predictions of a run."""
    show_prediction(prediction.as_it_is, console)
    if prediction.what_if is not None:
        console.rule(Text(f"What if: {', '.join(map(str, prediction.changes))}"), align="left")
        show_prediction(prediction.what_if, console)
        _compare(prediction.as_it_is, prediction.what_if, console)
    if prediction.scaled is not None:
        base = prediction.what_if or prediction.as_it_is
        console.rule(Text(f"At scale: {prediction.scaled.num_devices:,} devices"), align="left")
        show_scaled(prediction.scaled, base.plan, console)


def show_prediction(prediction: Prediction, console: Console) -> None:
    """Print the table of strategies and policies, the table of devices, and the recommendation."""
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
    solved = [row for row in prediction.rows if row.kinds]
    kinds = sorted({share.device for row in solved for share in row.kinds})
    names = [[plan.devices[kind].name] for kind in kinds]
    body = [[_kind_cell(row, kind) for row in solved] for kind in kinds]
    _chunked(["kind"], names, [row.policy for row in solved], body, "Devices × samples", console)
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
    """Print the samples and memory of each device by policy; of more than a few devices by kind."""
    rows = _rows_of_devices(prediction)
    devices = prediction.plan.devices
    groups = [[rank] for rank in range(len(devices))]
    if len(devices) > LISTED:
        kinds: dict[str, list[int]] = {}
        for rank, device in enumerate(devices):
            kinds.setdefault(device.name, []).append(rank)
        groups = list(kinds.values())
    several = len(set(prediction.estimates.sources)) > 1  # else the heading says it
    names = []
    for group in groups:
        device, speed = devices[group[0]], prediction.estimates.sources[group[0]]
        who = device.id if len(group) == 1 else f"{len(group)} ×"
        alone = format_number(prediction.solo_samples_per_second[group[0]], ",.0f", "/s")
        source = [speed.removeprefix("from the ")] if several else []
        names.append([f"{who}\n{device.name}", *source, alone])
    body = [[_cell(row, group) for row in rows] for group in groups]
    labels = [row.policy or row.strategy for row in rows]
    if len({row.strategy for row in rows}) > 1:
        labels, body = _alike(rows, body)
    title = "Samples a step, and the memory that they need"
    fixed = ["device", *(["speed"] if several else []), "alone"]
    _chunked(fixed, names, labels, body, title, console)


def _rows_of_devices(prediction: Prediction) -> list[PredictedRun]:
    """Return all rows of the plan's and the recommended strategy, and the fastest row of each other one."""
    rows = [row for row in prediction.rows if row.counts and row.policy is not None]
    whole = {prediction.plan.strategy, prediction.best.strategy if prediction.best is not None else None}
    fastest: dict[str, PredictedRun] = {}
    for row in rows:
        if row.predicted:
            best = fastest.setdefault(row.strategy, row)
            if (row.step_seconds or 0.0) < (best.step_seconds or 0.0):
                fastest[row.strategy] = row
    return [row for row in rows if row.strategy in whole or row is fastest.get(row.strategy)]


def _alike(rows: Sequence[PredictedRun], body: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return labels and cells with one column for all policies of a strategy with equal cells."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for number, row in enumerate(rows):
        key = (row.strategy, *(cells[number] for cells in body))
        columns.setdefault(key, []).append(row.policy or "")
    labels = ["\n".join((strategy, *policies)) for (strategy, *_), policies in columns.items()]
    cells = [list(column[1:]) for column in columns]
    return labels, [list(line) for line in zip(*cells, strict=True)]


def _cell(row: PredictedRun, group: Sequence[int]) -> str:
    """Return a group's samples under a row, and below them the memory; of a pipeline also the layers."""
    memory = row.memory_bytes or (None,) * len(row.ranks)
    pairs = [(c, m) for rank, c, m in zip(row.ranks, row.counts, memory, strict=True) if rank in group]
    if not pairs:
        return "left out"
    counts = [count for count, _ in pairs]
    text = _range(min(counts), max(counts))
    text += f" of {len(pairs)}" if len(pairs) < len(group) else ""
    if row.stages:
        text = f"{_layers(row, group)}\n{text}"
    needs = [need for _, need in pairs if need is not None]
    return f"{text}\n{_memory(max(needs))}" if needs else text


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


def _kind_cell(row: ScaledRow, place: int) -> str:
    share = next((kind for kind in row.kinds if kind.device == place), None)
    return f"{share.devices:,} × {_range(share.fewest, share.most)}" if share is not None else "left out"


def _range(fewest: int, most: int) -> str:
    return f"{fewest:,}" if fewest == most else f"{fewest:,}–{most:,}"


def _chunked(
    fixed: Sequence[str],
    names: Sequence[Sequence[str]],
    labels: Sequence[str],
    body: Sequence[Sequence[str]],
    title: str,
    console: Console,
) -> None:
    """Print a table; if it is too wide, print several that repeat the fixed columns."""

    def width(texts: Sequence[str]) -> int:
        return 3 + max((len(line) for text in texts for line in text.split("\n")), default=0)

    left = 1 + sum(width([name, *(row[at] for row in names)]) for at, name in enumerate(fixed))
    widths = [width([label, *(row[at] for row in body)]) for at, label in enumerate(labels)]
    start = 0
    while start < len(labels):
        end, used = start + 1, left + widths[start]
        while end < len(labels) and used + widths[end] <= console.width:
            used += widths[end]
            end += 1
        table = Table(title=Text(title), title_justify="left", title_style="bold")
        for name in fixed:
            table.add_column(name, justify="right" if name == "alone" else "left")
        for label in labels[start:end]:
            table.add_column(label, justify="right")
        for row_names, cells in zip(names, body, strict=True):
            table.add_row(*map(Text, row_names), *map(Text, cells[start:end]))
        console.print(table)
        start = end


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
