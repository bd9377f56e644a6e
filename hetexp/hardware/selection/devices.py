"""Resolves `hardware.devices` to the devices of a run: the machine's, or emulated ones in their place."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hetexp.core.config import DeviceEntry, HardwareConfig
from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.errors import ConfigError, must_be
from hetexp.hardware.backend import accelerators, backend_class
from hetexp.hardware.backends.cpu import CpuBackend, cpu_count
from hetexp.hardware.catalogue import Catalogue, load_catalogue, named
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.inventory import Inventory
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.hardware.selection.pool import CardPool, Selection, add_cpus, check_power

CARD_THREADS = 4
"""Most CPU threads of a card's rank by default, which prepares batches on them. Ranks with more threads than
cores wait for each other: ResNet-50 on two ranks was 8 times slower so (docs/reference/benchmarks.md)."""

_NAME = re.compile(r"(?P<backend>[a-z]+)(?::(?P<which>\w+))?")


def select_devices(
    config: HardwareConfig, inventory: Inventory, need_bytes: Callable[[int], int | None] | None = None
) -> Selection:
    """Resolve `hardware.gpu_ids`, `hardware.devices` or `hardware.cards`.

    Args:
        config: the typed section; `catalogue` in it is relative to the working directory.
        inventory: the cards of this machine (`hetexp.hardware.detection.inventory.detect`).
        need_bytes: number of devices → memory that the run needs on each of them, if that is known.

    Returns:
        Devices, reasons and problems; the devices must not be used if there are problems.
    """
    selection = Selection(problems=list(inventory.problems))
    if selection.problems:
        return selection
    try:
        catalogue = load_catalogue(config.catalogue)
    except ConfigError as error:  # the entries mean nothing without it
        selection.problems += error.problems
        return selection
    pool = CardPool(config, inventory, catalogue, need_bytes)
    wish = config.gpu_ids if config.gpu_ids is not None else config.cuda_ids
    if wish is not None:
        key = "hardware.gpu_ids" if config.gpu_ids is not None else "hardware.cuda_ids"
        pool.take_wish(selection, wish, key)
    else:
        _take_entries(config, selection, pool, catalogue)
    _name_shared(selection, config.share_devices)
    versions = {build.python: build.version for build in inventory.builds}
    selection.devices = [replace(d, torch=versions.get(d.python)) for d in selection.devices]
    _report_throttled(selection, inventory)
    _check_hosts(config, selection, catalogue)
    check_power(config, selection)
    if not selection.devices and not selection.problems:
        selection.problems.append("`hardware.devices` must select at least one device, but none is left.")
    return selection


def _take_entries(config: HardwareConfig, selection: Selection, pool: CardPool, catalogue: Catalogue) -> None:
    entries = _entries(config, catalogue, selection)
    real = _real_cards(entries, pool)
    missing = [position for position, cards in real.items() if not cards]
    if config.missing == "emulate_all":
        missing = _all_unless_complete(entries, real, pool)
    stand_in = config.missing in ("emulate", "emulate_all") or (
        config.missing == "auto" and len(missing) == len(real)
    )
    for position, (key, entry) in enumerate(entries):
        if entry.python is not None and not Path(entry.python).is_file():
            selection.problems.append(must_be(f"{key}.python", "the path of an interpreter", entry.python))
        start = len(selection.devices)
        if entry.device is not None:
            _add_named(selection, key, entry, pool, catalogue)
        elif entry.vendor is None:
            continue  # the configuration's own check reports it
        elif position not in missing:
            _add_vendor(selection, key, entry, real[position], pool)
            _report_left_out(selection, entry, real[position], pool)
        elif stand_in:
            _add_stand_in(selection, key, entry, catalogue, real[position])
        elif config.missing == "drop":
            selection.reasons.append(f"No {_kind(entry)} was found: left out (hardware.missing=drop).")
        else:
            selection.problems.append(_absent(key, entry, pool, entries if config.cards else ()))
        selection.devices[start:] = [_altered(d, key, entry, selection) for d in selection.devices[start:]]
    usable = [str(card.spec) for cards in real.values() for card in cards if pool.why_not(card) is None]
    if usable and config.missing == "emulate_all" and missing:
        selection.reasons.append(
            f"`python train.py` without hardware= trains on this machine's own {', '.join(usable)}."
        )


def _altered(device: DeviceSpec, key: str, entry: DeviceEntry, selection: Selection) -> DeviceSpec:
    """Apply an entry's slow-down, memory limit, host and interpreter, and label the altered device."""
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
        python=entry.python or device.python,
    )


def threads_for(
    devices: Sequence[DeviceSpec], wanted: int | None, cores: int | None = None, loaders: int = 0
) -> tuple[int, ...]:
    """Return the CPU threads of each rank of one host.

    All ranks share the host's cores. A card's rank takes at most `CARD_THREADS` of those that its loader
    processes leave, and the ranks that compute on the CPU share the rest.

    Args:
        devices: all devices of the host, one a rank.
        wanted: `hardware.threads_per_rank`, the threads of each rank; `None`: as above.
        cores: cores of the host; by default those that this process may use.
        loaders: `trainer.num_workers`, the loader processes of each rank.
    """
    if wanted is not None:
        return (wanted,) * len(devices)
    cores = cpu_count() if cores is None else cores
    on_cpu = [backend_class(device.backend).computes_on_cpu for device in devices]
    card = max(1, min(CARD_THREADS, cores // max(len(devices), 1) - loaders))
    left = cores - card * on_cpu.count(False)
    return tuple(max(1, left // on_cpu.count(True)) if computes else card for computes in on_cpu)


def _entries(
    config: HardwareConfig, catalogue: Catalogue, selection: Selection
) -> list[tuple[str, DeviceEntry]]:
    """Return the entries with their keys; each of `hardware.cards` becomes an entry of one card."""
    if config.devices or config.cards is None:
        return [
            (f"hardware.devices[{i}]", _with_defaults(entry, config))
            for i, entry in enumerate(config.devices)
        ]
    entries = []
    for i, name in enumerate(config.cards):
        try:
            card = catalogue.card(name, f"`hardware.cards[{i}]`")
        except ConfigError as error:
            selection.problems += error.problems
            continue
        match = card.match or card.name
        entry = DeviceEntry(vendor=card.vendor, match=match, emulate_as=card.key, count=1)
        entries.append((f"hardware.cards[{i}]", _with_defaults(entry, config)))
    return entries


def _with_defaults(entry: DeviceEntry, config: HardwareConfig) -> DeviceEntry:
    """Return an entry with the configuration's figures for emulated cards, if it has none of its own."""
    figures = ("efficiency", "overhead_seconds")
    defaults = {name: getattr(config, name) for name in figures if getattr(entry, name) is None}
    return entry.model_copy(update=defaults)


def _real_cards(entries: Sequence[tuple[str, DeviceEntry]], pool: CardPool) -> dict[int, list[DetectedCard]]:
    """Return, by position of each entry with a vendor, the cards of this machine that it may take.

    An entry with a count leaves out cards that others name, or take before it, so that two entries can share
    the cards of one vendor. A present card that cannot be used counts: it is reported, not replaced.
    """
    taken = {entry.device for _, entry in entries}
    real: dict[int, list[DetectedCard]] = {}
    for position, (_, entry) in enumerate(entries):
        if entry.vendor is None or entry.device is not None:
            continue
        if entry.vendor == "cpu":
            cpu = CpuBackend.describe(0)
            matches = entry.match is None or named(entry.match, cpu.name)
            real[position] = [DetectedCard(cpu)] if matches else []
            continue
        present = pool.of_vendor(entry.vendor, entry.match)
        usable = [card for card in present if pool.why_not(card, entry.python) is None]
        real[position] = [
            card for card in usable or present if entry.count is None or card.spec.id not in taken
        ]
        taken |= {card.spec.id for card in real[position][: entry.count]}
    return real


def _all_unless_complete(
    entries: Sequence[tuple[str, DeviceEntry]], real: dict[int, list[DetectedCard]], pool: CardPool
) -> list[int]:
    """Return the positions of all entries for cards, unless this machine can drive the cards of each."""
    positions = [position for position in real if entries[position][1].vendor != "cpu"]
    for position in positions:
        entry = entries[position][1]
        usable = [card for card in real[position] if pool.why_not(card, entry.python) is None]
        if len(usable) < (entry.count or 1):
            return positions
    return []


def _kind(entry: DeviceEntry) -> str:
    return f"{entry.vendor} card" if entry.match is None else entry.match


def _add_named(
    selection: Selection, key: str, entry: DeviceEntry, pool: CardPool, catalogue: Catalogue
) -> None:
    assert entry.device is not None
    parsed = _NAME.fullmatch(entry.device)
    backend, which = (parsed["backend"], parsed["which"]) if parsed else ("", None)
    cards = {card.spec.id: card for card in pool.cards}
    if entry.device == "auto":
        pool.take_auto(selection, entry.python)
    elif backend == "cpu" and (which is None or which.isdigit()):
        add_cpus(selection, int(which) if which else None, entry.count or 1)
        return
    elif backend == "emulated" and which is not None:
        _add_emulated(selection, f"`{key}` (emulated:<card>)", which, entry, catalogue)
        return
    elif entry.device in cards:
        _add_real(selection, key, [cards[entry.device]], entry, pool)
    else:
        accepted = f"one of {', '.join(['auto', 'cpu', *cards])} or emulated:CARD"
        fix = pool.why_absent(entry.device) if backend in accelerators() else ""
        fix = fix or f"CARD is one of {', '.join(sorted(catalogue.cards))}."
        selection.problems.append(must_be(f"{key}.device", accepted, entry.device, fix))
    if entry.count is not None:
        selection.problems.append(must_be(f"{key}.count", "absent for a single named device", entry.count))


def _add_vendor(
    selection: Selection, key: str, entry: DeviceEntry, cards: Sequence[DetectedCard], pool: CardPool
) -> None:
    if entry.vendor == "cpu":
        add_cpus(selection, None, entry.count or 1)
        return
    if entry.count is not None and entry.count > len(cards):
        kind = _kind(entry).removesuffix(" card")
        accepted = f"at most {len(cards)}, the {kind} cards found here"
        selection.problems.append(must_be(f"{key}.count", accepted, entry.count))
    _add_real(selection, key, cards[: entry.count], entry, pool)


def _report_left_out(
    selection: Selection, entry: DeviceEntry, cards: Sequence[DetectedCard], pool: CardPool
) -> None:
    """Report the cards of the vendor that cannot take part."""
    for card in pool.of_vendor(entry.vendor or "", entry.match):
        why = pool.why_not(card, entry.python)
        if why is not None and card not in cards:
            selection.reasons.append(f"{card.spec} is left out: {why}.")


def _add_real(
    selection: Selection, key: str, cards: Sequence[DetectedCard], entry: DeviceEntry, pool: CardPool
) -> None:
    for card in cards:
        why = pool.why_not(card, entry.python)
        if why is not None:
            selection.problems.append(f"`{key}` must be a device that can be used, but {card.spec} is {why}.")
        selection.devices.append(pool.spec(card, entry.python))


def _add_stand_in(
    selection: Selection, key: str, entry: DeviceEntry, catalogue: Catalogue, present: Sequence[DetectedCard]
) -> None:
    """Emulate an entry's card.

    Args:
        present: the entry's cards in this machine, which the run does not take.
    """
    if entry.emulate_as is None:
        selection.problems.append(
            f"`{key}.emulate_as` must name the card that stands in for the missing {_kind(entry)}, "
            "but is missing."
        )
        return
    _add_emulated(selection, f"`{key}.emulate_as`", entry.emulate_as, entry, catalogue)
    if present:
        selection.reasons.append(
            f"This machine cannot drive the whole mix: {entry.emulate_as} is emulated instead of "
            f"{present[0].spec} (hardware.missing=emulate_all)."
        )
    else:
        selection.reasons.append(f"No {_kind(entry)} was found: {entry.emulate_as} is emulated instead.")


def _add_emulated(
    selection: Selection, subject: str, name: str, entry: DeviceEntry, catalogue: Catalogue
) -> None:
    try:
        card = catalogue.card(name, subject)
    except ConfigError as error:
        selection.problems += error.problems
        return
    for figure, words in (("efficiency", "at efficiency {:g}"), ("overhead_seconds", "with {:g} s a pass")):
        value, usual = getattr(entry, figure), getattr(card, figure)
        if value is not None:
            selection.reasons.append(
                f"{card.name} is emulated {words.format(value)} instead of the catalogue's {usual:g}."
            )
            card = card.model_copy(update={figure: value})
    first = sum(d.backend == "emulated" for d in selection.devices)
    numbers = range(first, first + (entry.count or 1))
    selection.devices += [EmulatedBackend.describe_card(number, card) for number in numbers]


def _absent(key: str, entry: DeviceEntry, pool: CardPool, mix: Sequence[tuple[str, DeviceEntry]]) -> str:
    """Return the problem that this machine lacks an entry's card.

    Args:
        mix: all entries, if they come from `hardware.cards`.
    """
    reasons = ((card, pool.why_not(card)) for card in pool.cards)
    listed = ", ".join(str(card.spec) if why is None else f"{card.spec}, {why}" for card, why in reasons)
    present = f"(found: {listed or 'no accelerator'})"
    fix = (
        "Use hardware.missing=emulate to emulate the missing card beside the real ones, or "
        "hardware.missing=drop to go without it. hardware.missing=emulate_all emulates the whole mix."
    )
    if mix:
        names = ",".join(f"emulated:{other.emulate_as}" for _, other in mix)
        return (
            f"`{key}` must be a card that hetexp can drive in this machine and that no other entry takes, "
            f"but is '{entry.emulate_as}' instead {present}. {fix} To emulate all of them: "
            f"hardware=auto 'hardware.devices=[{names}]'."
        )
    if entry.match is not None:
        return (
            f"`{key}.match` must be in the name of a free {entry.vendor} card that hetexp can drive in this "
            f"machine, but is '{entry.match}' instead {present}. {fix}"
        )
    return (
        f"`{key}.vendor` must be a vendor whose card hetexp can drive in this machine, but is "
        f"'{entry.vendor}' instead {present}. {fix}"
    )


def _name_shared(selection: Selection, shared: bool) -> None:
    """Give ranks that share a card different ids (`cuda:0`, `cuda:0.1`), or refuse the second rank."""
    counts: dict[str, int] = {}
    devices = []
    for device in selection.devices:
        count = counts.get(device.id, 0)
        counts[device.id] = count + 1
        if count and (not shared or backend_class(device.backend).computes_on_cpu):
            share = " hardware.share_devices=true lets several ranks share a card."
            fix = share if device.number is not None else ""
            selection.problems.append(
                f"`hardware.devices` must name each device once, but names {device.id} twice.{fix}"
            )
        devices.append(replace(device, id=f"{device.id}.{count}") if count else device)
    selection.devices = devices


def _report_throttled(selection: Selection, inventory: Inventory) -> None:
    """Report the chosen cards whose clocks are held back at the moment."""
    chosen = {device.id for device in selection.devices}
    for card in inventory.cards:
        if card.spec.id in chosen and card.reading.throttled:
            why = ", ".join(card.reading.throttled)
            selection.reasons.append(f"{card.spec} is throttled at the moment: {why}.")


def network_between(config: HardwareConfig, selection: Selection) -> None:
    """Look up the network between emulated devices in several hosts."""
    if any(device.backend == "emulated" for device in selection.devices):
        with suppress(ConfigError):  # a catalogue that cannot be read was reported already
            _check_hosts(config, selection, load_catalogue(config.catalogue))


def _check_hosts(config: HardwareConfig, selection: Selection, catalogue: Catalogue) -> None:
    """Look up the network between hosts, if emulated devices are in several hosts."""
    if len({device.host for device in selection.devices}) < 2:
        return
    selection.network = catalogue.links.get(config.network)
    if selection.network is None:
        accepted = f"one of {', '.join(sorted(catalogue.links))}"
        selection.problems.append(must_be("hardware.network", accepted, config.network))
