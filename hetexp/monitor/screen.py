"""What `hetexp top` shows, as lines that fit a terminal of any size; 80 columns and 24 lines suffice."""

from __future__ import annotations

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
"""Most lines about what is wrong with devices."""
WIDE = 116
"""Columns from which on a device's clocks, fan and reasons fit as well."""
STATE_STYLES = {
    "pending": "yellow",
    "running": "bold green",
    "completed": "green",
    "failed": "bold red",
    "stopped": "magenta",
}
KEYS = {
    "aggregated": "a each device",
    "per_gpu": "a all together",
}


@dataclass
class Shown:
    """What the screen shows at one moment."""

    host: str
    now: float
    """Seconds since the epoch."""
    mode: View
    devices: list[dict[str, Any]] = field(default_factory=list)
    """As `Store.latest` returns them."""
    history: dict[str | None, Series] = field(default_factory=dict)
    """By device; `None`: all together."""
    trainings: list[dict[str, Any]] = field(default_factory=list)
    chosen: str | None = None
    """Id of the training that a key would stop."""
    message: str | None = None
    """A question, or what became of a key."""


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
    """Return one line a device, without what was before.

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
        most: what the highest column means; the largest value by default.
    """
    kept = list(values)[-width:]
    known = [value for value in kept if value is not None]
    top = most or max(known, default=0.0) or 1.0
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
    keys += ["↑↓ choose a run", "s stop it"] if _stoppable(shown) else []
    return Text("   ".join([*keys, "q quit"])[:width], style="dim")


def _stoppable(shown: Shown) -> bool:
    return any(one["state"] in ("pending", "running") for one in shown.trainings)


def _together(shown: Shown, width: int) -> list[Text]:
    """Return a few lines about all devices; the processor counts where there is no other."""
    cards = [one for one in shown.devices if one["backend"] != "cpu"] or shown.devices
    ok = [one for one in cards if one["state"] == "ok"]
    series = shown.history.get(None)
    values = series.values if series is not None else {}
    bar = 20
    spark = max(10, width - 13 - bar - 2 - 19 - 2)

    use = _mean(ok, "utilisation")
    used, total = _sum(ok, "memory_used_bytes"), _sum(ok, "memory_total_bytes", beside="memory_used_bytes")
    watts, limit = _sum(ok, "power_watts"), _sum(ok, "power_limit_watts", beside="power_watts")
    heat = max(
        (one["temperature_celsius"] for one in ok if one["temperature_celsius"] is not None), default=None
    )
    rows = [
        ("utilisation", use, _number(use, ".0%"), sparkline(values.get("utilisation", ()), spark, 1.0)),
        (
            "memory",
            _ratio(used, total),
            _pair(used, total, GIB, "GiB"),
            _spark(values, "memory_used_bytes", spark, total),
        ),
        (
            "power",
            _ratio(watts, limit),
            _pair(watts, limit, 1, "W"),
            _spark(values, "power_watts", spark, limit),
        ),
        (
            "hottest",
            _ratio(heat, 100.0),
            _number(heat, ".0f", " °C"),
            _spark(values, "temperature_celsius", spark, 100.0),
        ),
    ]
    lines = [_count(cards)]
    for name, fraction, reading, history in rows:
        if name == "hottest" and heat is None:
            continue
        line = Text(f" {name:<12}") + meter(fraction, bar, _fill(name, fraction)) + Text(f"  {reading:<19}  ")
        lines.append(line + history)
    return lines + _troubles(cards, width)


def _troubles(cards: Sequence[dict[str, Any]], width: int) -> list[Text]:
    """Say what is wrong with cards, and why clocks are held back; a few lines at most."""
    troubles = [
        Text(f" {one['device']} is {one['state']}: {one['reason']}"[:width], style="bold red")
        for one in cards
        if one["state"] != "ok"
    ]
    troubles += [
        Text(f" {one['device']} holds its clocks back: {', '.join(one['throttled'])}"[:width], style="yellow")
        for one in cards
        if one["throttled"]
    ]
    return troubles[:TROUBLES]


def _short(name: str) -> str:
    """Return a name without what all of a vendor's have."""
    for word in (
        "NVIDIA ",
        "AMD ",
        "Intel ",
        "Intel(R) ",
        "GeForce ",
        " Graphics",
        " Processor",
        " (emulated)",
    ):
        name = name.replace(word, "")
    return name


def _count(cards: Sequence[dict[str, Any]]) -> Text:
    emulated = sum(one["emulated"] for one in cards)
    text = f" {len(cards)} device{'s' if len(cards) != 1 else ''}"
    text += f", {emulated} of them emulated" if 0 < emulated < len(cards) else ""
    text += ", emulated" if emulated == len(cards) else ""
    states = {state: sum(one["state"] == state for one in cards) for state in ("lost", "unusable")}
    line = Text(text, style="bold")
    for state, number in states.items():
        if number:
            line += Text(f"   {number} {state}", style="bold red")
    return line


def _each(shown: Shown, width: int, room: int) -> tuple[int, Table]:
    """Return how many lines there are, and a line a device."""
    wide = width >= WIDE
    hosts = len({one["host"] for one in shown.devices}) > 1
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
    for one in kept:
        label = f" {one['host']}/{one['device']}" if hosts else f" {one['device']}"
        table.add_row(*_cells(one, shown, label, bar, spark, wide))
    lines = len(kept) + 1
    if len(kept) < len(shown.devices):
        table.add_row(Text(f" … {len(shown.devices) - len(kept)} more", style="dim"))
        lines += 1
    return lines, table


def _cells(
    one: dict[str, Any], shown: Shown, label: str, bar: int, spark: int, wide: bool
) -> list[RenderableType]:
    name = Text(one["name"] if wide else _short(one["name"]))
    if one["state"] != "ok":
        return [Text(label, style="bold red"), name, Text(one["state"], style="bold red")]
    series = shown.history.get(one["key"])
    use, used, total = one["utilisation"], one["memory_used_bytes"], one["memory_total_bytes"]
    heat = one["temperature_celsius"]
    hot = "bold red" if heat is not None and heat >= 85 else ""
    held = "bold yellow" if one["throttled"] else ""
    cells: list[RenderableType] = [
        Text(label, style="yellow" if one["emulated"] else "bold"),
        name,
        meter(use, bar, _fill("utilisation", use)) + Text(f"{_number(use, '.0%'):>5}"),
        sparkline(series.values["utilisation"] if series is not None else (), spark, 1.0),
        Text(
            _pair(used, total, GIB, "GiB" if wide else "G"),
            style=_fill("memory", _ratio(used, total), text=True),
        ),
        Text(_number(heat, ".0f", "°"), style=hot),
        Text(_number(one["power_watts"], ".0f", " W"), style=held),
    ]
    if wide:
        clock = Text(_number(one["clock_mhz"], ".0f"), style=held)
        users = ", ".join(f"{short_id(user['run'])}{_rank(user)}" for user in one["users"])
        cells += [clock, Text(_fan(one)), Text(users or "–", style="dim" if not users else "")]
    return cells


def short_id(run: str) -> str:
    """Return the end of a run's id, which tells it from others of its folder."""
    return run.rpartition("-")[2][-8:]


def _rank(user: dict[str, Any]) -> str:
    return f" #{user['rank']}" if user["rank"] is not None else ""


def _fan(one: dict[str, Any]) -> str:
    if one["fan"] is None and one["fan_rpm"] is not None:
        return f"{one['fan_rpm']:.0f}/min"
    return _number(one["fan"], ".0%")


def _trainings(shown: Shown, width: int, room: int) -> list[RenderableType]:
    """Return the runs that go on and the newest that have ended, as far as there is room."""
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
    chosen = next((one for one in shown.trainings if one["id"] == shown.chosen), None)
    error = chosen["error"] if chosen is not None else None
    kept = shown.trainings[: max(1, room - 3)]
    for one in kept:
        mark = "› " if one["id"] == shown.chosen else "  "
        state = Text(one["state"], style=STATE_STYLES[one["state"]])
        steps = f"{one['step']:,}" if one["step"] is not None else "–"
        steps += f"/{one['steps']:,}" if one["steps"] is not None else ""
        bar = meter(one["progress"], 8, "green") + Text(f"{_number(one['progress'], '.0%'):>5}")
        speed, loss = _number(one["samples_per_second"], ",.0f"), _number(one["loss"], ".4f")
        cells = [Text(mark + one["name"]), state, bar, Text(steps), Text(speed), Text(loss)]
        if width >= WIDE:
            cells += [Text(short_id(one["id"])), Text(",".join(one["gpu_ids"]))]
        table.add_row(*cells, style="bold" if one is chosen else "")
    reason = Text(f"   {error}"[:width], style="red") if error else Text("")
    return [table, reason]


def _fill(what: str, fraction: float | None, text: bool = False) -> str:
    """Return the colour of a meter: a full memory and a hot card are worth a look; busy is what one wants."""
    if what in ("memory", "hottest") and fraction is not None:
        if fraction >= 0.95:
            return "bold red"
        if fraction >= 0.85:
            return "yellow"
    return "" if text else "green"


def _spark(values: dict[str, list[float | None]], name: str, width: int, most: float | None) -> Text:
    return sparkline(values.get(name, ()), width, most)


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    return sum(known) / len(known) if known else None


def _sum(rows: Sequence[dict[str, Any]], name: str, beside: str | None = None) -> float | None:
    """Add up what is known; `beside` leaves out rows that do not tell that one."""
    known = [row[name] for row in rows if row[name] is not None and row[beside or name] is not None]
    return sum(known) if known else None


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
