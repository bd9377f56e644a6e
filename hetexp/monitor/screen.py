"""Renders the screen of `hetexp top` for a terminal of any size; 80 columns and 24 lines suffice."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetexp.core.device import GIB
from hetexp.monitor.history import Series, View

UNKNOWN = "n/a"
LEVELS = "▁▂▃▄▅▆▇█"
TROUBLES = 3
"""Most lines about problems of devices."""
WIDE = 116
"""Columns from which on a device's clock, fan and runs fit."""
STATE_STYLES = {
    "pending": "yellow",
    "running": "bold green",
    "completed": "green",
    "failed": "bold red",
    "stopped": "magenta",
}
KEYS = {"aggregated": "a each device", "per_gpu": "a all together"}
COMMON_WORDS = re.compile(r"NVIDIA |AMD |Intel |Intel\(R\) |GeForce | Graphics| Processor| \(emulated\)")
"""Words that are left out of names."""


@dataclass
class Shown:
    """The content of the screen at one moment."""

    host: str
    now: float
    """Seconds since the epoch."""
    mode: View
    devices: list[dict[str, Any]] = field(default_factory=list)
    """Rows of `hetexp.monitor.store.with_ages`."""
    history: dict[str | None, Series] = field(default_factory=dict)
    """Key of a device → its history; `None`: all devices together."""
    trainings: list[dict[str, Any]] = field(default_factory=list)
    chosen: str | None = None
    """Id of the training that a key would stop."""
    message: str | None = None
    """A question, or the result of a key."""


def rendered(shown: Shown, width: int, height: int) -> Group:
    """Return the whole screen.

    Args:
        width, height: of the terminal, in characters.
    """
    parts: list[RenderableType] = [_head(shown, width), Text("")]
    room = height - 4  # head, foot and the blank lines
    if not shown.devices:
        parts.append(Text("Waiting for samples …", style="dim"))
        room -= 1
    elif shown.mode == "aggregated":
        lines = _together(shown, width)
        parts += lines
        room -= len(lines)
    else:
        troubles = _troubles(shown.devices, width)
        count, table = _each(shown, width, room - len(troubles) - (5 if shown.trainings else 2))
        parts += [table, *troubles]
        room -= count + len(troubles)
    parts.append(Text(""))
    parts += _trainings(shown, width, room)
    parts.append(_foot(shown, width))
    return Group(*parts)


def table_of(devices: list[dict[str, Any]], width: int) -> RenderableType:
    """Return a table with a line for each device, without history.

    Args:
        devices: as `Store.latest` returns them.
    """
    table = _each(Shown("", 0.0, "per_gpu", devices), width, len(devices) + 2)[1]
    return Group(table, *_troubles(devices, width))


def meter(fraction: float | None, width: int, style: str) -> Text:
    """Return a bar that is full at 1; dots if the fraction is not known."""
    if fraction is None:
        return Text("·" * width, style="dim")
    full = round(max(0.0, min(1.0, fraction)) * width)
    return Text("█" * full, style=style) + Text("░" * (width - full), style="dim")


def sparkline(values: Sequence[float | None], width: int, most: float | None = None) -> Text:
    """Return the newest values as small columns.

    Args:
        most: value of the highest column; the largest value by default.
    """
    kept = list(values)[-width:]
    top = most or max((value for value in kept if value is not None), default=0.0) or 1.0
    line = "".join(
        LEVELS[min(len(LEVELS) - 1, int(max(0.0, value) / top * len(LEVELS)))] if value is not None else " "
        for value in kept
    )
    return Text(line.rjust(width), style="cyan")


def _head(shown: Shown, width: int) -> Text:
    what = "all devices together" if shown.mode == "aggregated" else "each device"
    clock = time.strftime("%H:%M:%S", time.localtime(shown.now))
    text = f" hetexp top   {shown.host}   {what}"
    return Text(text[: width - 10].ljust(width - 10) + f"{clock} ", style="reverse")


def _foot(shown: Shown, width: int) -> Text:
    if shown.message is not None:
        return Text(shown.message[:width], style="bold yellow")
    keys = [KEYS[shown.mode]]
    stoppable = any(row["state"] in ("pending", "running") for row in shown.trainings)
    keys += ["↑↓ choose a run", "s stop it"] if stoppable else []
    return Text("   ".join([*keys, "q quit"])[:width], style="dim")


def _together(shown: Shown, width: int) -> list[Text]:
    """Return a few lines about all devices; the processor counts if there is no other."""
    cards = [row for row in shown.devices if row["backend"] != "cpu"] or shown.devices
    ok = [row for row in cards if row["state"] == "ok" and not row.get("stale")]
    series = shown.history.get(None)
    values = series.values if series is not None else {}
    bar = 20
    use = _mean(ok, "utilisation")
    used, total = _sum(ok, "memory_used_bytes"), _sum(ok, "memory_total_bytes", beside="memory_used_bytes")
    watts, limit = _sum(ok, "power_watts"), _sum(ok, "power_limit_watts", beside="power_watts")
    heat = max(
        (row["temperature_celsius"] for row in ok if row["temperature_celsius"] is not None), default=None
    )
    rows: list[tuple[str, str, float | None, str, float | None]] = [
        ("utilisation", "utilisation", use, _number(use, ".0%"), 1.0),
        ("memory", "memory_used_bytes", _ratio(used, total), _pair(used, total, GIB, "GiB"), total),
        ("power", "power_watts", _ratio(watts, limit), _pair(watts, limit, 1, "W"), limit),
    ]
    if heat is not None:
        rows.append(("hottest", "temperature_celsius", heat / 100, _number(heat, ".0f", " °C"), 100.0))
    lines = [_count(cards)]
    readings = [reading + _reported(ok, name, len(cards)) for _, name, _, reading, _ in rows]
    column = max(19, *map(len, readings))
    spark = max(10, width - 13 - bar - 2 - column - 2)
    for (label, name, fraction, _, most), reading in zip(rows, readings, strict=True):
        line = Text(f" {label:<12}") + meter(fraction, bar, _fill(label, fraction))
        line += Text(f"  {reading:<{column}}  ")
        lines.append(line + sparkline(values.get(name, ()), spark, most))
    return lines + _troubles(cards, width)


def _troubles(cards: Sequence[dict[str, Any]], width: int) -> list[Text]:
    """Return a few lines about lost, unusable and silent cards, and about clocks that are held back."""
    names = _names(cards)
    news = [row for row in cards if not row.get("stale")]
    silent = {(row["host"], _age(row)) for row in cards if row.get("stale")}
    troubles = [
        Text(f" {host} reports nothing since {age}: its devices are stale"[:width], style="bold red")
        for host, age in sorted(silent)
    ]
    troubles += [
        Text(f" {names[row['key']]} is {row['state']}: {row['reason']}"[:width], style="bold red")
        for row in news
        if row["state"] != "ok"
    ]
    troubles += [
        Text(
            f" {names[row['key']]} holds its clocks back: {', '.join(row['throttled'])}"[:width],
            style="yellow",
        )
        for row in news
        if row["throttled"]
    ]
    return troubles[:TROUBLES]


def _count(cards: Sequence[dict[str, Any]]) -> Text:
    emulated = sum(row["emulated"] for row in cards)
    text = f" {len(cards)} device{'s' if len(cards) != 1 else ''}"
    text += f", {emulated} of them emulated" if 0 < emulated < len(cards) else ""
    text += ", emulated" if emulated == len(cards) else ""
    hosts = len({row["host"] for row in cards})
    text += f" of {hosts} machines" if hosts > 1 else ""
    news = [row for row in cards if not row.get("stale")]
    states = {state: sum(row["state"] == state for row in news) for state in ("lost", "unusable")}
    states["stale"] = len(cards) - len(news)
    line = Text(text, style="bold")
    for state, number in states.items():
        if number:
            line += Text(f"   {number} {state}", style="bold red")
    return line


def _each(shown: Shown, width: int, room: int) -> tuple[int, Table]:
    """Return the number of lines and a table with a line for each device."""
    wide = width >= WIDE
    names = _names(shown.devices)
    table = Table(box=None, padding=(0, 1), expand=True, show_edge=False, pad_edge=False)
    bar, spark = (10, min(40, 14 + max(0, width - 120) // 2)) if wide else (6, 10)
    table.add_column(" device", no_wrap=True)
    table.add_column("name", no_wrap=True, ratio=1, overflow="ellipsis", min_width=8)
    table.add_column("utilisation" if wide else "use", no_wrap=True, width=bar + 5)
    table.add_column("5 minutes", no_wrap=True, width=spark)
    table.add_column("memory", justify="right", no_wrap=True, width=12 if wide else 10)
    table.add_column("heat", justify="right", no_wrap=True)
    table.add_column("power", justify="right", no_wrap=True)
    if wide:
        table.add_column("clock", justify="right", no_wrap=True)
        table.add_column("fan", justify="right", no_wrap=True)
        table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=16)
    kept = shown.devices[: max(1, room - 2)]
    for row in kept:
        table.add_row(*_cells(row, shown, f" {names[row['key']]}", bar, spark, wide))
    lines = len(kept) + 1
    if len(kept) < len(shown.devices):
        table.add_row(Text(f" … {len(shown.devices) - len(kept)} more", style="dim"))
        lines += 1
    return lines, table


def _cells(
    row: dict[str, Any], shown: Shown, label: str, bar: int, spark: int, wide: bool
) -> list[RenderableType]:
    name = Text(row["name"] if wide else COMMON_WORDS.sub("", row["name"]))
    if row.get("stale"):
        return [Text(label, style="dim"), name, Text(f"stale {_age(row)}", style="bold red")]
    if row["state"] != "ok":
        return [Text(label, style="bold red"), name, Text(row["state"], style="bold red")]
    series = shown.history.get(row["key"])
    use, used, total = row["utilisation"], row["memory_used_bytes"], row["memory_total_bytes"]
    heat = row["temperature_celsius"]
    hot = "bold red" if heat is not None and heat >= 85 else ""
    held = "bold yellow" if row["throttled"] else ""
    cells: list[RenderableType] = [
        Text(label, style="yellow" if row["emulated"] else "bold"),
        name,
        meter(use, bar, _fill("utilisation", use)) + Text(f"{_number(use, '.0%'):>5}"),
        sparkline(series.values["utilisation"] if series is not None else (), spark, 1.0),
        Text(
            _pair(used, total, GIB, "GiB" if wide else "G"),
            style=_fill("memory", _ratio(used, total), text=True),
        ),
        Text(_number(heat, ".0f", "°"), style=hot),
        Text(_number(row["power_watts"], ".0f", " W"), style=held),
    ]
    if wide:
        clock = Text(_number(row["clock_mhz"], ".0f"), style=held)
        users = ", ".join(f"{short_id(user['run'])}{_rank(user)}" for user in row["users"])
        cells += [clock, Text(_fan(row)), Text(users or "–", style="dim" if not users else "")]
    return cells


def _names(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the name of each device by its key, with its machine if there are several."""
    several = len({row["host"] for row in rows}) > 1
    return {row["key"]: f"{row['host']}/{row['device']}" if several else row["device"] for row in rows}


def _age(row: dict[str, Any]) -> str:
    seconds = row["age_seconds"]
    return f"{seconds:.0f}s" if seconds < 60 else f"{seconds / 60:.0f}m"


def _reported(rows: Sequence[dict[str, Any]], name: str, of: int) -> str:
    """Return of how many devices a value is known, if it is not known of all."""
    count = sum(row[name] is not None for row in rows)
    return f" ({count} of {of})" if 0 < count < of else ""


def short_id(run: str) -> str:
    """Return the end of a run's id, which is unique in its folder."""
    return run.rpartition("-")[2][-8:]


def _rank(user: dict[str, Any]) -> str:
    return f" #{user['rank']}" if user["rank"] is not None else ""


def _fan(row: dict[str, Any]) -> str:
    if row["fan"] is None and row["fan_rpm"] is not None:
        return f"{row['fan_rpm']:.0f}/min"
    return _number(row["fan"], ".0%")


def _trainings(shown: Shown, width: int, room: int) -> list[RenderableType]:
    """Return the active runs and the newest ended ones, as far as they fit."""
    if not shown.trainings:
        return [Text(" No run is known yet.", style="dim"), Text("")]
    table = Table(box=None, padding=(0, 1), expand=True, show_edge=False, pad_edge=False)
    table.add_column("  run", no_wrap=True, ratio=1, overflow="ellipsis")
    table.add_column("state", no_wrap=True, width=9)
    table.add_column("progress", no_wrap=True, width=14)
    table.add_column("step", no_wrap=True, justify="right")
    table.add_column("samples/s", no_wrap=True, justify="right", width=9)
    table.add_column("loss", no_wrap=True, justify="right", width=7)
    if width >= WIDE:
        table.add_column("id", no_wrap=True)
        table.add_column("devices", no_wrap=True, overflow="ellipsis", max_width=28)
    chosen = next((row for row in shown.trainings if row["id"] == shown.chosen), None)
    error = chosen["error"] if chosen is not None else None
    kept = shown.trainings[: max(1, room - 3)]
    for row in kept:
        mark = "› " if row["id"] == shown.chosen else "  "
        state = Text(row["state"], style=STATE_STYLES[row["state"]])
        steps = f"{row['step']:,}" if row["step"] is not None else "–"
        steps += f"/{row['steps']:,}" if row["steps"] is not None else ""
        bar = meter(row["progress"], 8, "green") + Text(f"{_number(row['progress'], '.0%'):>5}")
        speed, loss = _number(row["samples_per_second"], ",.0f"), _number(row["loss"], ".4f")
        cells = [Text(mark + row["name"]), state, bar, Text(steps), Text(speed), Text(loss)]
        if width >= WIDE:
            cells += [Text(short_id(row["id"])), Text(",".join(row["gpu_ids"]))]
        table.add_row(*cells, style="bold" if row is chosen else "")
    reason = Text(f"   {error}"[:width], style="red") if error else Text("")
    return [table, reason]


def _fill(what: str, fraction: float | None, text: bool = False) -> str:
    """Return the colour of a meter; full memory and heat are highlighted, a high load is not."""
    if what in ("memory", "hottest") and fraction is not None:
        if fraction >= 0.95:
            return "bold red"
        if fraction >= 0.85:
            return "yellow"
    return "" if text else "green"


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return sum(values) / len(values) if values else None


def _sum(rows: Sequence[dict[str, Any]], name: str, beside: str | None = None) -> float | None:
    """Return the sum of the known values, `None` if there are none.

    Args:
        beside: a second value; rows without it are left out.
    """
    values = [row[name] for row in rows if row[name] is not None and row[beside or name] is not None]
    return sum(values) if values else None


def _ratio(value: float | None, most: float | None) -> float | None:
    return value / most if value is not None and most else None


def _pair(value: float | None, most: float | None, unit: float, name: str) -> str:
    if value is None:
        return UNKNOWN
    digits = ".1f" if unit != 1 and value < 100 * unit else ".0f"
    of = f"/{most / unit:,.0f}" if most is not None else ""
    return f"{format(value / unit, digits)}{of} {name}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:{form}}{unit}"
