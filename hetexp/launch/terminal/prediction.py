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

WIDE = 100
"""Fewest columns of a terminal for tables with all columns."""
LISTED = 8
"""Most devices with a row each; more devices have a row for each kind."""


ROWS = 10
"""Most rows of the short table."""


def show(prediction: RunPrediction, console: Console, details: bool = False) -> None:
    """Print the answer and the fastest rows of a run's predictions.

    Args:
        details: whether to print all rows, each device's samples and memory, and all reasons instead.
    """
    show_prediction(prediction.as_it_is, console, details)
    if prediction.what_if is not None:
        console.rule(Text(f"What if: {', '.join(map(str, prediction.changes))}"), align="left")
        show_prediction(prediction.what_if, console, details)
        _compare(prediction.as_it_is, prediction.what_if, console)
    if prediction.scaled is not None:
        base = prediction.what_if or prediction.as_it_is
        console.rule(Text(f"At scale: {prediction.scaled.num_devices:,} devices"), align="left")
        show_scaled(prediction.scaled, base.plan, console)


def show_prediction(prediction: Prediction, console: Console, details: bool = False) -> None:
    """Print the answer, a table, and the lines below it, as `show` does."""
    _line(console, prediction.answer)
    rows = [(row, [row.policy or ""]) for row in prediction.rows] if details else _fastest_rows(prediction)
    best, wide = prediction.best, console.width >= WIDE
    alone, num_devices = fastest_alone(prediction), len(prediction.plan.devices)
    lines = []
    for row, policies in rows:
        is_best = best is not None and (row.strategy, row.step_seconds) == (best.strategy, best.step_seconds)
        marked = row is best if details else is_best
        # A policy to type, and the number of others with the same split.
        policy = prediction.preferred if prediction.preferred in policies else policies[0]
        cells = {
            "strategy": f"{'→' if marked else ' '} {row.strategy or UNKNOWN}",
            "policy": f"{policy} (+{len(policies) - 1})" if len(policies) > 1 else policy or UNKNOWN,
            "step": duration(row.step_seconds),
            "samples/s": format_number(row.samples_per_second, ",.0f"),
        }
        if details:
            cells["efficiency"] = format_number(row.efficiency, ".1%")
            cells |= {"ceiling": format_number(row.ceiling, ".1%")} if wide else {}
            cells["energy"] = _energy(row.joules_per_sample, "/sample" if wide else "")
        else:
            gain = (alone.step_seconds or 0) / (row.step_seconds or 1) if alone is not None else None
            cells["× alone"] = format_number(gain, ".2f")
            if num_devices <= (4 if wide else 2):
                cells["split"] = _split(row, num_devices)
        lines.append((cells, "bold green" if marked else "dim" if row.problem is not None else ""))
    _table(_heading(prediction), lines, console)
    if details:
        _show_devices(prediction, console)
    # How to run it, and the first device that is left out, are enough below a short table.
    for reason in prediction.reasons if details else prediction.reasons[1:3]:
        _line(console, f"· {reason}")
    _line(console, f"· {prediction.ends}" if prediction.ends else "")
    inexact = ", ".join(dict.fromkeys(row.strategy for row, _ in rows if row.predicted and not row.exact))
    _line(console, f"· Not exact, and so not recommended by their speed: {inexact}." if inexact else "")
    if details:
        _show_problems(prediction, console)
        return
    failed = dict.fromkeys(
        row.strategy for row in prediction.rows if row.problem is not None and row.strategy
    )
    names = ", ".join(name for name in failed if all(name != row.strategy for row, _ in rows))
    _line(console, f"· Not predicted: {names}. hetexp plan --details says why." if names else "")


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


def _split(row: PredictedRun, num_devices: int) -> str:
    """Return each device's samples, or how many layers it has if the model is cut: `44 + 20`."""
    parts = dict(zip(row.ranks, row.counts, strict=True))
    if row.stages:
        pairs = zip(row.ranks, row.stages, strict=True)
        parts = {rank: sum(s.end_layer - s.first_layer for s in stages) for rank, stages in pairs}
    text = " + ".join(f"{parts[rank]:,}" if rank in parts else UNKNOWN for rank in range(num_devices))
    return f"{text} layers" if row.stages else text


def _show_problems(prediction: Prediction, console: Console) -> None:
    """Print how gradients are exchanged, and why rows are not predicted."""
    route = route_of_all(prediction.plan)
    _line(console, f"· {route_reason(route, prediction.plan.devices)}" if route.levels else "")
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
    lines = []
    for row in prediction.rows:
        exposed = None
        if row.step_seconds is not None and row.compute_seconds is not None:
            exposed = row.step_seconds - row.compute_seconds
        cells = {
            "policy": row.policy,
            "devices": f"{row.devices:,}" if row.devices else UNKNOWN,
            "step": duration(row.step_seconds),
            "exchange": duration(exposed),
            "samples/s": format_number(row.samples_per_second, ",.0f"),
            "efficiency": format_number(row.efficiency, ".2%"),
            **({"solved in": duration(row.solve_seconds)} if console.width >= WIDE else {}),
        }
        lines.append((cells, "dim" if row.problem else ""))
    _table(title, lines, console)
    for row in prediction.rows:
        kinds = [
            f"{k.devices:,} × {_range(k.fewest, k.most)} on {plan.devices[k.device].name}" for k in row.kinds
        ]
        text = (
            f"devices × samples: {', '.join(kinds)}" if row.problem is None else row.problem.removesuffix(".")
        )
        _line(console, f"· {row.policy}: {text}.")
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
    lines = []
    for row, policies in _merged(prediction.rows):
        samples = " + ".join(_cell(row, group) for group in groups.values())
        cells = {
            "strategy": row.strategy,
            "policy": ", ".join(policies) or UNKNOWN,
            "samples and memory": samples,
        }
        lines.append((cells, ""))
    _table("Samples a step, the devices in the order of above", lines, console, wrap=True)


def _table(
    title: str, lines: Sequence[tuple[dict[str, str], str]], console: Console, wrap: bool = False
) -> None:
    """Print a table, unless it is empty.

    Args:
        lines: cells by column, and style, of each row.
    """
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for name in lines[0][0] if lines else ():
        left = wrap or name in ("strategy", "policy", "split")
        table.add_column(name, justify="left" if left else "right", no_wrap=not wrap)
    for cells, style in lines:
        table.add_row(*map(Text, cells.values()), style=style)
    if lines:
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
    text += f" ({_gib(max(needs))})" if needs else ""
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


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


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
    """Print a text, if there is one."""
    if not text:
        return
    console.print(text, markup=False, highlight=False)
