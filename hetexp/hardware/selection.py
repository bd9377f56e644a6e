"""From `hardware.devices` to the devices of a run: what was asked for, what is there, what stands in."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetexp.core.config import DeviceEntry, HardwareConfig
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, must_be
from hetexp.hardware.backend import backend_class
from hetexp.hardware.catalogue import card, catalogue
from hetexp.hardware.cpu import CpuBackend, cpu_count
from hetexp.hardware.emulated import EmulatedBackend

ACCELERATORS = ("cuda",)
"""Backends whose devices `auto` and a vendor's name look through, best first."""
_NAME = re.compile(r"(?P<backend>[a-z]+)(?::(?P<which>\w+))?")


@dataclass
class Selection:
    """The devices of a run in rank order, why they were chosen, and what is wrong with the request."""

    devices: list[DeviceSpec] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def detect_accelerators() -> list[DeviceSpec]:
    """Return every accelerator of this machine that a backend of hetexp can drive."""
    return [device for name in ACCELERATORS for device in backend_class(name).detect()]


def select_devices(
    config: HardwareConfig, found: Sequence[DeviceSpec], drivable: bool | None = None
) -> Selection:
    """Resolve `hardware.devices`.

    Args:
        config: the typed section.
        found: accelerators of this machine (`detect_accelerators`).
        drivable: whether the launcher's own torch is a build for these accelerators; `None`: not known.

    Returns:
        Devices, reasons and problems; with problems the devices are not to be used.
    """
    selection = Selection()
    missing = _missing_vendors(config, found)
    stand_in = config.missing == "emulate" or (
        config.missing == "auto" and len(missing) == sum(e.vendor is not None for e in config.devices)
    )
    for position, entry in enumerate(config.devices):
        key = f"hardware.devices[{position}]"
        if entry.python is not None and not Path(entry.python).is_file():
            selection.problems.append(must_be(f"{key}.python", "the path of an interpreter", entry.python))
        start = len(selection.devices)
        if entry.device is not None:
            _add_named(selection, key, entry, found, drivable)
        elif entry.vendor is None:
            continue  # neither: told by the configuration's own check
        elif position not in missing:
            _add_vendor(selection, key, entry, found, drivable)
        elif stand_in:
            _add_stand_in(selection, key, entry)
        elif config.missing == "drop":
            selection.reasons.append(f"No {entry.vendor} card was found: left out (hardware.missing=drop).")
        else:
            selection.problems.append(_absent(key, entry, found))
        selection.devices[start:] = [replace(d, python=entry.python) for d in selection.devices[start:]]
    _check_twice(selection)
    if not selection.devices and not selection.problems:
        selection.problems.append("`hardware.devices` must select at least one device, but none is left.")
    return selection


def threads_for(devices: Sequence[DeviceSpec], wanted: int | None) -> tuple[int, ...]:
    """Return each rank's CPU threads: as wanted, else the cores shared by the ranks that compute on them."""
    if wanted is not None:
        return (wanted,) * len(devices)
    computing = sum(backend_class(d.backend).computes_on_cpu for d in devices)
    return (max(1, cpu_count() // max(computing, 1)),) * len(devices)


def _missing_vendors(config: HardwareConfig, found: Sequence[DeviceSpec]) -> set[int]:
    """Positions of the entries whose vendor has no card in this machine."""
    present = {device.vendor for device in found}
    return {
        i for i, e in enumerate(config.devices) if e.device is None and e.vendor and e.vendor not in present
    }


def _add_named(
    selection: Selection, key: str, entry: DeviceEntry, found: Sequence[DeviceSpec], drivable: bool | None
) -> None:
    assert entry.device is not None
    parsed = _NAME.fullmatch(entry.device)
    backend, which = (parsed["backend"], parsed["which"]) if parsed else ("", None)
    known = {device.id: device for device in found}
    if entry.device == "auto":
        _add_auto(selection, found, drivable is not False or entry.python is not None)
    elif backend == "cpu" and (which is None or which.isdigit()):
        _add_cpus(selection, int(which) if which else None, entry.count or 1)
        return
    elif backend == "emulated" and which is not None:
        _add_cards(selection, key, which, entry.count or 1)
        return
    elif entry.device in known:
        _add_real(selection, key, [known[entry.device]], entry, drivable)
    else:
        accepted = ["auto", "cpu", *known, *(f"emulated:{name}" for name in sorted(catalogue()))]
        selection.problems.append(must_be(f"{key}.device", "one of " + ", ".join(accepted), entry.device))
    if entry.count is not None:
        selection.problems.append(must_be(f"{key}.count", "absent for a single named device", entry.count))


def _add_cpus(selection: Selection, first: int | None, count: int) -> None:
    """Add the CPU as so many devices, numbered from `first` on or by the lowest free numbers."""
    taken = {device.index for device in selection.devices if device.backend == "cpu"}
    free = (i for i in itertools.count() if i not in taken)
    numbers = itertools.count(first) if first is not None else free
    selection.devices += [CpuBackend.describe(i) for i in itertools.islice(numbers, count)]


def _add_auto(selection: Selection, found: Sequence[DeviceSpec], drivable: bool) -> None:
    if found and drivable:
        selection.devices += found
        selection.reasons.append(f"Every accelerator of this machine takes part ({len(found)} found).")
        return
    _add_cpus(selection, None, 1)
    if found:
        names = ", ".join(device.name for device in found)
        selection.reasons.append(
            f"{names}: found, but this interpreter's torch is not built for it, so the CPU trains alone. "
            "Install a CUDA build of torch to use it."
        )
    else:
        selection.reasons.append("No accelerator was found: the CPU trains alone.")


def _add_vendor(
    selection: Selection, key: str, entry: DeviceEntry, found: Sequence[DeviceSpec], drivable: bool | None
) -> None:
    cards = [device for device in found if device.vendor == entry.vendor]
    if entry.count is not None and entry.count > len(cards):
        selection.problems.append(
            must_be(f"{key}.count", f"at most {len(cards)}, the {entry.vendor} cards found here", entry.count)
        )
    _add_real(selection, key, cards[: entry.count], entry, drivable)


def _add_real(
    selection: Selection,
    key: str,
    cards: Sequence[DeviceSpec],
    entry: DeviceEntry,
    drivable: bool | None,
) -> None:
    if drivable is False and entry.python is None:
        selection.problems.append(
            f"`{key}` must be drivable by this interpreter's torch, but that is not built for "
            f"{cards[0].name}. Install a CUDA build of torch, or name an interpreter that has one "
            f"(`python:` beside the device)."
        )
    selection.devices += cards


def _add_stand_in(selection: Selection, key: str, entry: DeviceEntry) -> None:
    if entry.emulate_as is None:
        selection.problems.append(
            f"`{key}.emulate_as` must name the card that stands in for the missing {entry.vendor} card, "
            "but is missing."
        )
        return
    _add_cards(selection, f"{key}.emulate_as", entry.emulate_as, entry.count or 1)
    selection.reasons.append(f"No {entry.vendor} card was found: {entry.emulate_as} is emulated instead.")


def _add_cards(selection: Selection, key: str, name: str, count: int) -> None:
    try:
        card(name)
    except ConfigError as error:
        selection.problems += [f"`{key}`: {problem}" for problem in error.problems]
        return
    first = sum(d.backend == "emulated" for d in selection.devices)
    selection.devices += [EmulatedBackend.describe_card(i, name) for i in range(first, first + count)]


def _absent(key: str, entry: DeviceEntry, found: Sequence[DeviceSpec]) -> str:
    there = ", ".join(str(device) for device in found) or "no accelerator"
    return (
        f"`{key}.vendor` must be a vendor whose card hetexp can drive in this machine, but is "
        f"'{entry.vendor}' instead (found: {there}). Use hardware.missing=emulate to emulate the missing "
        "card beside the real ones, or hardware.missing=drop to go without it."
    )


def _check_twice(selection: Selection) -> None:
    seen: set[str] = set()
    for device in selection.devices:
        if device.id in seen:
            selection.problems.append(
                f"`hardware.devices` must name each device once, but names {device.id} twice."
            )
        seen.add(device.id)
