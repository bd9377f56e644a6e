"""From `hardware.devices` to the devices of a run: what was asked for, what is there, what stands in."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetexp.core.config import DeviceEntry, HardwareConfig
from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.errors import ConfigError, must_be
from hetexp.hardware.backend import backend_class
from hetexp.hardware.catalogue import Catalogue, Link, load_catalogue, named
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
    undriven: tuple[str, ...] = ()
    """Cards that are in the machine and that nothing here drives, in words."""
    network: Link | None = None
    """Link between the hosts of emulated devices, where they are in several."""


def detect_accelerators() -> list[DeviceSpec]:
    """Return every accelerator of this machine that a backend of hetexp can drive."""
    return [device for name in ACCELERATORS for device in backend_class(name).detect()]


def select_devices(
    config: HardwareConfig,
    found: Sequence[DeviceSpec],
    drivable: bool | None = None,
    undriven: Sequence[str] = (),
) -> Selection:
    """Resolve `hardware.devices` or `hardware.cards`.

    Args:
        config: the typed section; `catalogue` in it is relative to the working directory.
        found: accelerators of this machine (`detect_accelerators`).
        drivable: whether the launcher's own torch is a build for these accelerators; `None`: not known.
        undriven: what to say of cards that are there and that no backend drives (`undriven_cards`).

    Returns:
        Devices, reasons and problems; with problems the devices are not to be used.
    """
    selection = Selection(undriven=tuple(undriven))
    try:
        known = load_catalogue(config.catalogue)
    except ConfigError as error:  # what the entries mean is not known without it
        selection.problems += error.problems
        return selection
    entries = _entries(config, known, selection)
    real = _real_cards(entries, found)
    missing = [position for position, cards in real.items() if not cards]
    stand_in = config.missing == "emulate" or (config.missing == "auto" and len(missing) == len(real))
    for position, (key, entry) in enumerate(entries):
        if entry.python is not None and not Path(entry.python).is_file():
            selection.problems.append(must_be(f"{key}.python", "the path of an interpreter", entry.python))
        start = len(selection.devices)
        if entry.device is not None:
            _add_named(selection, key, entry, found, drivable, known)
        elif entry.vendor is None:
            continue  # neither: told by the configuration's own check
        elif position not in missing:
            _add_vendor(selection, key, entry, real[position], drivable)
        elif stand_in:
            _add_stand_in(selection, key, entry, known)
        elif config.missing == "drop":
            selection.reasons.append(f"No {_wanted(entry)} was found: left out (hardware.missing=drop).")
        else:
            selection.problems.append(_absent(selection, key, entry, found, entries if config.cards else ()))
        selection.devices[start:] = [_as_ordered(d, key, entry, selection) for d in selection.devices[start:]]
    _check_twice(selection)
    if len({device.host for device in selection.devices}) > 1:
        selection.network = known.links.get(config.network)
        if selection.network is None:
            accepted = f"one of {', '.join(sorted(known.links))}"
            selection.problems.append(must_be("hardware.network", accepted, config.network))
    if not selection.devices and not selection.problems:
        selection.problems.append("`hardware.devices` must select at least one device, but none is left.")
    return selection


def _as_ordered(device: DeviceSpec, key: str, entry: DeviceEntry, selection: Selection) -> DeviceSpec:
    """Apply what an entry says of its devices beside which they are, and label what is not as it is."""
    name, memory = device.name, device.memory_bytes
    limited = False
    if entry.slow is not None:
        name += f" (slowed {entry.slow:g}×)"
    if entry.memory_gib is not None:
        memory = int(entry.memory_gib * GIB)
        name += f" (limited to {entry.memory_gib:g} GiB)"
        limited = device.backend != "emulated"
        if limited and device.memory_bytes is not None and memory > device.memory_bytes:
            has = f"at most the {device.memory_bytes / GIB:.1f} GiB of {device}"
            selection.problems.append(must_be(f"{key}.memory_gib", has, entry.memory_gib))
    if entry.host is not None and device.backend != "emulated":
        selection.problems.append(must_be(f"{key}.host", f"absent: {device} is in this machine", entry.host))
    return replace(
        device,
        name=name,
        memory_bytes=memory,
        limited=limited,
        slow=entry.slow or 1.0,
        host=entry.host,
        python=entry.python,
    )


def threads_for(devices: Sequence[DeviceSpec], wanted: int | None) -> tuple[int, ...]:
    """Return each rank's CPU threads: as wanted, else the cores shared by the ranks that compute on them."""
    if wanted is not None:
        return (wanted,) * len(devices)
    computing = sum(backend_class(d.backend).computes_on_cpu for d in devices)
    return (max(1, cpu_count() // max(computing, 1)),) * len(devices)


def _entries(config: HardwareConfig, known: Catalogue, selection: Selection) -> list[tuple[str, DeviceEntry]]:
    """The entries with their keys; each of `hardware.cards` becomes one that asks for one such card."""
    if config.devices or config.cards is None:
        return [(f"hardware.devices[{i}]", entry) for i, entry in enumerate(config.devices)]
    entries = []
    for i, name in enumerate(config.cards):
        try:
            card = known.card(name, f"`hardware.cards[{i}]`")
        except ConfigError as error:
            selection.problems += error.problems
            continue
        match = card.match or card.name
        entry = DeviceEntry(vendor=card.vendor, match=match, emulate_as=card.key, count=1)
        entries.append((f"hardware.cards[{i}]", entry))
    return entries


def _real_cards(
    entries: Sequence[tuple[str, DeviceEntry]], found: Sequence[DeviceSpec]
) -> dict[int, list[DeviceSpec]]:
    """For each entry that names a vendor, by position: the cards of this machine that it may take.

    An entry with a count leaves out what other entries name or take before it, so that two entries can
    share the cards of one vendor.
    """
    taken = {entry.device for _, entry in entries}
    real: dict[int, list[DeviceSpec]] = {}
    for position, (_, entry) in enumerate(entries):
        if entry.vendor is None or entry.device is not None:
            continue
        pool = [CpuBackend.describe(0)] if entry.vendor == "cpu" else found
        real[position] = [
            device
            for device in pool
            if device.vendor == entry.vendor
            and (entry.match is None or named(entry.match, device.name))
            and (entry.count is None or entry.vendor == "cpu" or device.id not in taken)
        ]
        taken |= {device.id for device in real[position][: entry.count]}
    return real


def _wanted(entry: DeviceEntry) -> str:
    return f"{entry.vendor} card" if entry.match is None else entry.match


def _add_named(
    selection: Selection,
    key: str,
    entry: DeviceEntry,
    found: Sequence[DeviceSpec],
    drivable: bool | None,
    catalogue: Catalogue,
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
        _add_emulated(selection, f"`{key}` (emulated:<card>)", which, entry, catalogue)
        return
    elif entry.device in known:
        _add_real(selection, key, [known[entry.device]], entry, drivable)
    else:
        accepted = ["auto", "cpu", *known, *(f"emulated:{name}" for name in sorted(catalogue.cards))]
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
    selection.reasons += [f"{card}." for card in selection.undriven]


def _add_vendor(
    selection: Selection, key: str, entry: DeviceEntry, cards: Sequence[DeviceSpec], drivable: bool | None
) -> None:
    if entry.vendor == "cpu":
        _add_cpus(selection, None, entry.count or 1)
        return
    if entry.count is not None and entry.count > len(cards):
        what = _wanted(entry).removesuffix(" card")
        selection.problems.append(
            must_be(f"{key}.count", f"at most {len(cards)}, the {what} cards found here", entry.count)
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


def _add_stand_in(selection: Selection, key: str, entry: DeviceEntry, catalogue: Catalogue) -> None:
    wanted = _wanted(entry)
    if entry.emulate_as is None:
        selection.problems.append(
            f"`{key}.emulate_as` must name the card that stands in for the missing {wanted}, but is missing."
        )
        return
    _add_emulated(selection, f"`{key}.emulate_as`", entry.emulate_as, entry, catalogue)
    selection.reasons.append(f"No {wanted} was found: {entry.emulate_as} is emulated instead.")


def _add_emulated(
    selection: Selection, subject: str, name: str, entry: DeviceEntry, catalogue: Catalogue
) -> None:
    try:
        card = catalogue.card(name, subject)
    except ConfigError as error:
        selection.problems += error.problems
        return
    if entry.efficiency is not None:
        selection.reasons.append(
            f"{card.name} is emulated at efficiency {entry.efficiency:g} instead of the catalogue's "
            f"{card.efficiency:g}."
        )
        card = card.model_copy(update={"efficiency": entry.efficiency})
    first = sum(d.backend == "emulated" for d in selection.devices)
    numbers = range(first, first + (entry.count or 1))
    selection.devices += [EmulatedBackend.describe_card(number, card) for number in numbers]


def _absent(
    selection: Selection,
    key: str,
    entry: DeviceEntry,
    found: Sequence[DeviceSpec],
    mix: Sequence[tuple[str, DeviceEntry]],
) -> str:
    """Say that a card of the request is not there.

    Args:
        mix: all entries, where they come from `hardware.cards`.
    """
    there = ", ".join([*map(str, found), *selection.undriven]) or "no accelerator"
    fix = (
        "Use hardware.missing=emulate to emulate the missing card beside the real ones, or "
        "hardware.missing=drop to go without it."
    )
    if mix:
        names = ",".join(f"emulated:{other.emulate_as}" for _, other in mix)
        return (
            f"`{key}` must be a card that hetexp can drive in this machine and that no other entry takes, "
            f"but is '{entry.emulate_as}' instead (found: {there}). {fix} To emulate all of them: "
            f"hardware=auto 'hardware.devices=[{names}]'."
        )
    if entry.match is not None:
        return (
            f"`{key}.match` must be in the name of a free {entry.vendor} card that hetexp can drive in this "
            f"machine, but is '{entry.match}' instead (found: {there}). {fix}"
        )
    return (
        f"`{key}.vendor` must be a vendor whose card hetexp can drive in this machine, but is "
        f"'{entry.vendor}' instead (found: {there}). {fix}"
    )


def _check_twice(selection: Selection) -> None:
    seen: set[str] = set()
    for device in selection.devices:
        if device.id in seen:
            selection.problems.append(
                f"`hardware.devices` must name each device once, but names {device.id} twice."
            )
        seen.add(device.id)
