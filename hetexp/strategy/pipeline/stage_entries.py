"""A `shard_plan` that says of each stage on which device it is, on which host, and what it has of the model.

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
"""Between the first and the last of modules that follow one another."""


def check_entries(entries: Sequence[Entry], devices: Sequence[DeviceSpec], schedule: Schedule) -> list[str]:
    """Return what is wrong with a plan whatever the model, one sentence a mistake."""
    problems = [
        problem
        for place, entry in enumerate(entries)
        for problem in (*_check_form(f"{KEY}[{place}]", entry), *_check_device(place, entry, devices))
    ]
    ways = sorted({way for entry in entries for way in WAYS if way in entry})
    if len(ways) > 1 and not problems:
        problems.append(f"`{KEY}` must tell all stages in one way, but has {' and '.join(ways)}.")
    return problems or _check_places(entries, devices, schedule)


def group_of(entries: Sequence[Entry], devices: Sequence[DeviceSpec]) -> list[int]:
    """Return the ranks of the stages' devices, each once, in the order of the stages."""
    return list(dict.fromkeys(_ranks(entry, devices)[0] for entry in entries))


def ranges_of(entries: Sequence[Entry]) -> Ranges | None:
    """Return the layers `[first, end)` of each stage; `None` where only the model's names tell them."""
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
    """Return the layers `[first, end)` of each stage, of a plan with nothing against it."""
    found = [sorted(_places(entry["modules"], layers)[0]) for entry in entries]
    return [[places[0], places[-1] + 1] for places in found]


def check_names(entries: Sequence[Entry], layers: Sequence[str]) -> list[str]:
    """Return what is wrong with the modules of a plan for a model of these layers, one sentence a mistake."""
    problems: list[str] = []
    holders: dict[int, list[int]] = {}
    for stage, entry in enumerate(entries):
        places, unknown = _places(entry["modules"], layers)
        key = f"{KEY}[{stage}].modules"
        for name in unknown:
            known = f"layers of the model ({layers[0]} to {layers[-1]}), or what several of them begin with"
            problems.append(must_be(key, known, name, did_you_mean(name, layers).strip()))
        for place in places:
            holders.setdefault(place, []).append(stage)
        if places and sorted(places) != list(range(min(places), max(places) + 1)):
            gap = next(one for one in range(min(places), max(places)) if one not in places)
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
    firsts = [min(holds) for holds in (_places(one["modules"], layers)[0] for one in entries) if holds]
    if not problems and firsts != sorted(firsts):
        order = f"in the order of the model's layers ({layers[0]} first)"
        problems.append(f"`{KEY}` must have its stages {order}.")
    return problems


def _places(modules: str | Sequence[str], layers: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the numbers of the layers that are meant, and names that mean none."""
    places: dict[int, None] = {}
    unknown = []
    for text in [modules] if isinstance(modules, str) else modules:
        first, _, last = str(text).partition(TO)
        ends = [_meant(name, layers) for name in ((first, last) if last else (first,))]
        if not all(ends):
            unknown += [name for name, meant in zip((first, last), ends, strict=False) if not meant]
            continue
        places |= dict.fromkeys(range(ends[0][0], ends[-1][-1] + 1) if last else ends[0])
    return list(places), unknown


def _meant(name: str, layers: Sequence[str]) -> list[int]:
    """Return the layers of a name: that one, or all that are inside of it."""
    return [place for place, one in enumerate(layers) if one == name or one.startswith(f"{name}.")]


def _check_form(key: str, entry: Entry) -> list[str]:
    known = ("device", "host", *WAYS)
    problems = [
        f"`{key}` may have {', '.join(known)}, but has `{name}`.{did_you_mean(str(name), known)}"
        for name in entry
        if name not in known
    ]
    given = [way for way in WAYS if entry.get(way) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        return [*problems, f"`{key}` must have one of blocks, layers and modules, but has {found}."]
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
    found = _ranks(entry, devices)
    if len(found) == 1 or not devices:
        return []
    ids = list(dict.fromkeys(device.id for device in devices))
    if not found and host is not None and name in ids:
        hosts = ", ".join(sorted({str(device.host) for device in devices if device.id == name}))
        return [must_be(f"{KEY}[{place}].host", f"a host that has {name} ({hosts})", host)]
    if not found:
        fix = did_you_mean(str(name), ids).strip()
        return [must_be(key, f"one of the run's devices ({', '.join(ids)})", name, fix)]
    hosts = ", ".join(str(devices[rank].host) for rank in found)
    return [must_be(f"{KEY}[{place}].host", f"given where several hosts have {name} ({hosts})", host)]


def _ranks(entry: Entry, devices: Sequence[DeviceSpec]) -> list[int]:
    host = entry.get("host")
    return [
        rank
        for rank, device in enumerate(devices)
        if device.id == entry.get("device") and (host is None or device.host == host)
    ]


def _check_places(entries: Sequence[Entry], devices: Sequence[DeviceSpec], schedule: Schedule) -> list[str]:
    """Return what speaks against the devices that the stages are on."""
    if not devices:
        return []
    group = group_of(entries, devices)
    idle = [str(devices[rank].id) for rank in range(len(devices)) if rank not in group]
    if idle:
        fix = "Leave out of `hardware.devices` what is to do nothing."
        return [f"`{KEY}` must use each of the run's devices, but leaves out {', '.join(idle)}. {fix}"]
    wanted = schedule.stages_problem(len(entries), len(group))
    if wanted is not None:
        return [f"`{KEY}` must have one entry a stage, which are {wanted}, but has {len(entries)} instead."]
    problems = []
    for stage, entry in enumerate(entries):
        own, due = _ranks(entry, devices)[0], group[schedule.rank_of(stage, len(group))]
        if own != due:
            accepted = f"{devices[due].id}, where schedule {schedule.name} has stage {stage}"
            problems.append(must_be(f"{KEY}[{stage}].device", accepted, entry["device"]))
    return problems
