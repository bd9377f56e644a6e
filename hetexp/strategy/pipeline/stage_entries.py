"""A `shard_plan` that names the device, the host and the layers of each stage.

    strategy.shard_plan:
      - {device: "cuda:0", host: one, blocks: 4}     # the next four layers, or
      - {device: "xpu:0", modules: [blocks.4..blocks.9, blocks.10]}     # by the names of modules, or
      - {device: "cpu:0", layers: [10, 12]}          # by numbers, [first, end)

All stages are given in one of these ways, in the order of the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import did_you_mean, must_be
from hetexp.strategy.pipeline.schedules import Schedule
from hetexp.strategy.pipeline.shard_plan import Ranges

Entry = Mapping[str, Any]
WAYS = ("blocks", "layers", "modules")
KEY = "strategy.shard_plan"
TO = ".."
"""Stands between the first and the last of consecutive modules."""


def check_entries(entries: Sequence[Entry], devices: Sequence[DeviceSpec], schedule: Schedule) -> list[str]:
    """Return the problems of a plan that need no model, one sentence each."""
    problems = [
        problem
        for place, entry in enumerate(entries)
        for problem in (*_check_form(f"{KEY}[{place}]", entry), *_check_device(place, entry, devices))
    ]
    ways = sorted({way for entry in entries for way in WAYS if way in entry})
    if len(ways) > 1 and not problems:
        problems.append(f"`{KEY}` must give all stages in one way, but has {' and '.join(ways)}.")
    return problems or _check_places(entries, devices, schedule)


def group_of(entries: Sequence[Entry], devices: Sequence[DeviceSpec]) -> list[int]:
    """Return the ranks of the stages' devices, each once, in the order of the stages."""
    return list(dict.fromkeys(_ranks(entry, devices)[0] for entry in entries))


def ranges_of(entries: Sequence[Entry]) -> Ranges | None:
    """Return the layers `[first, end)` of each stage; `None` if they depend on the model's names."""
    if any("modules" in entry for entry in entries):
        return None
    if all("layers" in entry for entry in entries):
        return [list(entry["layers"]) for entry in entries]
    ranges, end = [], 0
    for entry in entries:
        ranges.append([end, end + entry["blocks"]])
        end += entry["blocks"]
    return ranges


def ranges_by_name(entries: Sequence[Entry], layers: Sequence[str]) -> Ranges:
    """Return the layers `[first, end)` of each stage, of a plan without problems."""
    stages = [sorted(_places(entry["modules"], layers)[0]) for entry in entries]
    return [[places[0], places[-1] + 1] for places in stages]


def check_names(entries: Sequence[Entry], layers: Sequence[str]) -> list[str]:
    """Return the problems of a plan's modules for a model of these layers, one sentence each."""
    problems: list[str] = []
    holders: dict[int, list[int]] = {}
    for stage, entry in enumerate(entries):
        places, unknown = _places(entry["modules"], layers)
        key = f"{KEY}[{stage}].modules"
        for name in unknown:
            accepted = f"layers of the model ({layers[0]} to {layers[-1]}), or a prefix of several of them"
            problems.append(must_be(key, accepted, name, did_you_mean(name, layers).strip()))
        for place in places:
            holders.setdefault(place, []).append(stage)
        if places and sorted(places) != list(range(min(places), max(places) + 1)):
            gap = next(place for place in range(min(places), max(places)) if place not in places)
            problems.append(f"`{key}` must be layers that follow one another, but leaves out {layers[gap]}.")
    for place, name in enumerate(layers):
        stages = sorted(set(holders.get(place, [])))
        if len(stages) > 1:
            several = " and ".join(map(str, stages))
            problems.append(f"`{KEY}` must give each layer to one stage, but {name} is in stages {several}.")
    left_out = [name for place, name in enumerate(layers) if place not in holders]
    if left_out and not problems:
        names = ", ".join(left_out[:3]) + (", …" if len(left_out) > 3 else "")
        problems.append(f"`{KEY}` must hold all {len(layers)} layers of the model, but leaves out {names}.")
    held = (_places(entry["modules"], layers)[0] for entry in entries)
    firsts = [min(places) for places in held if places]
    if not problems and firsts != sorted(firsts):
        order = f"in the order of the model's layers ({layers[0]} first)"
        problems.append(f"`{KEY}` must have its stages {order}.")
    return problems


def _places(modules: str | Sequence[str], layers: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the numbers of the named layers, and the names of no layer."""
    places: dict[int, None] = {}
    unknown = []
    for text in [modules] if isinstance(modules, str) else modules:
        first, _, last = str(text).partition(TO)
        ends = [_named(name, layers) for name in ((first, last) if last else (first,))]
        if not all(ends):
            unknown += [name for name, named in zip((first, last), ends, strict=False) if not named]
            continue
        places |= dict.fromkeys(range(ends[0][0], ends[-1][-1] + 1) if last else ends[0])
    return list(places), unknown


def _named(name: str, layers: Sequence[str]) -> list[int]:
    """Return the layer of this name, or all layers inside the module of this name."""
    return [place for place, layer in enumerate(layers) if layer == name or layer.startswith(f"{name}.")]


def _check_form(key: str, entry: Entry) -> list[str]:
    keys = ("device", "host", *WAYS)
    problems = [
        f"`{key}` may have {', '.join(keys)}, but has `{name}`.{did_you_mean(str(name), keys)}"
        for name in entry
        if name not in keys
    ]
    given = [way for way in WAYS if entry.get(way) is not None]
    if len(given) != 1:
        ways = " and ".join(given) or "none of them"
        return [*problems, f"`{key}` must have one of blocks, layers and modules, but has {ways}."]
    value = entry[given[0]]
    if given[0] == "blocks" and (type(value) is not int or value < 1):
        problems.append(must_be(f"{key}.blocks", "a number of layers, 1 or more", value))
    if given[0] == "modules":
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) for n in names):
            problems.append(must_be(f"{key}.modules", "a list of names of modules", value))
    if given[0] == "layers" and (not isinstance(value, (list, tuple)) or len(value) != 2):
        problems.append(must_be(f"{key}.layers", "two numbers of layers, the first one and the end", value))
    return problems


def _check_device(place: int, entry: Entry, devices: Sequence[DeviceSpec]) -> list[str]:
    key, name, host = f"{KEY}[{place}].device", entry.get("device"), entry.get("host")
    ranks = _ranks(entry, devices)
    if len(ranks) == 1 or not devices:
        return []
    ids = list(dict.fromkeys(device.id for device in devices))
    if not ranks and host is not None and name in ids:
        hosts = ", ".join(sorted({str(device.host) for device in devices if device.id == name}))
        return [must_be(f"{KEY}[{place}].host", f"a host that has {name} ({hosts})", host)]
    if not ranks:
        fix = did_you_mean(str(name), ids).strip()
        return [must_be(key, f"one of the run's devices ({', '.join(ids)})", name, fix)]
    hosts = ", ".join(str(devices[rank].host) for rank in ranks)
    return [must_be(f"{KEY}[{place}].host", f"given if several hosts have {name} ({hosts})", host)]


def _ranks(entry: Entry, devices: Sequence[DeviceSpec]) -> list[int]:
    host = entry.get("host")
    return [
        rank
        for rank, device in enumerate(devices)
        if device.id == entry.get("device") and (host is None or device.host == host)
    ]


def _check_places(entries: Sequence[Entry], devices: Sequence[DeviceSpec], schedule: Schedule) -> list[str]:
    """Return the problems of the stages' devices."""
    if not devices:
        return []
    group = group_of(entries, devices)
    idle = [str(devices[rank].id) for rank in range(len(devices)) if rank not in group]
    if idle:
        fix = "Leave unused devices out of `hardware.devices`."
        return [f"`{KEY}` must use each of the run's devices, but leaves out {', '.join(idle)}. {fix}"]
    wanted = schedule.stages_problem(len(entries), len(group))
    if wanted is not None:
        return [f"`{KEY}` must have one entry a stage, which are {wanted}, but has {len(entries)} instead."]
    problems = []
    for stage, entry in enumerate(entries):
        rank, expected = _ranks(entry, devices)[0], group[schedule.rank_of(stage, len(group))]
        if rank != expected:
            accepted = f"{devices[expected].id}, to which schedule {schedule.name} assigns stage {stage}"
            problems.append(must_be(f"{KEY}[{stage}].device", accepted, entry["device"]))
    return problems
