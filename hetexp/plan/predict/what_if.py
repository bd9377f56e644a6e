"""Changes of a plan's devices for `--what-if`: cards added or removed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, must_be
from hetexp.hardware.catalogue import Catalogue
from hetexp.hardware.emulation.emulated import EmulatedBackend

_CHANGE = re.compile(r"(?P<sign>[+-])(?:(?P<count>\d+)\*)?(?P<name>[^\s*,+-][^\s*,+]*)")
GRAMMAR = "+card, -card or -device, with a number before it where there are several (+2*rtx_3060)"
HYPOTHETICAL = "what if"
MOST = 10_000
"""Cards that one change may add."""


@dataclass(frozen=True)
class Change:
    """Devices to add or to remove."""

    count: int
    """Number of devices; below 0: to remove."""
    name: str
    """Card of the catalogue, or a device to remove (`cuda:1`)."""

    def __str__(self) -> str:
        many = f"{abs(self.count)}*" if abs(self.count) != 1 else ""
        return f"{'+' if self.count > 0 else '-'}{many}{self.name}"


def parse_changes(texts: Sequence[str]) -> list[Change]:
    """Read the words after `--what-if`, which may have several changes with commas between them.

    Raises:
        ConfigError: every change that cannot be read.
    """
    changes, problems = [], []
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        found = _CHANGE.fullmatch(text)
        count = int(found["count"] or 1) if found else 0
        if found is None or not 1 <= count <= MOST:
            fix = f"The number goes from 1 to {MOST}." if found is not None else ""
            problems.append(must_be("--what-if", GRAMMAR, text, fix))
        else:
            changes.append(Change(count if found["sign"] == "+" else -count, found["name"]))
    if problems:
        raise ConfigError(problems)
    return changes


def changed(
    devices: Sequence[DeviceSpec], changes: Sequence[Change], catalogue: Catalogue
) -> tuple[list[DeviceSpec], list[int | None]]:
    """Return the devices after the changes, and each device's old place (`None`: it is new).

    If a name means several devices, the last is removed first. A new card is in the host of the first device.

    Raises:
        ConfigError: every change that cannot be made.
    """
    problems: list[str] = []
    now: list[tuple[DeviceSpec, int | None]] = [(device, place) for place, device in enumerate(devices)]
    for change in changes:
        if change.count > 0:
            try:
                card = catalogue.card(change.name, "`--what-if` +card")
            except ConfigError as error:
                problems += error.problems
                continue
            first = 1 + max((d.index for d, _ in now if d.backend == "emulated"), default=-1)
            for number in range(first, first + change.count):
                one = replace(EmulatedBackend.describe_card(number, card), host=devices[0].host)
                now.append((replace(one, name=f"{card.name} ({HYPOTHETICAL})"), None))
            continue
        meant = [place for place, (device, _) in enumerate(now) if _means(change.name, device, catalogue)]
        if len(meant) < -change.count:
            names = ", ".join(_known_as(device, catalogue) for device, _ in now) or "none"
            found = f"{len(meant)} of them" if meant else "none"
            problems.append(
                must_be("--what-if", f"a change to the devices ({names})", str(change), f"It finds {found}.")
            )
            continue
        for place in reversed(meant[change.count :]):
            del now[place]
    if not now and not problems:
        problems.append(must_be("--what-if", "a change that leaves a device", ",".join(map(str, changes))))
    if problems:
        raise ConfigError(problems)
    return [device for device, _ in now], [place for _, place in now]


def _means(name: str, device: DeviceSpec, catalogue: Catalogue) -> bool:
    if name == device.id:
        return True
    key = _card_key(device, catalogue)
    return key is not None and name in (key, *catalogue.cards[key].aliases)


def _card_key(device: DeviceSpec, catalogue: Catalogue) -> str | None:
    if device.card is not None:
        return device.card if device.card in catalogue.cards else None
    card = catalogue.real(device)
    return card.key if card is not None else None


def _known_as(device: DeviceSpec, catalogue: Catalogue) -> str:
    key = _card_key(device, catalogue)
    return f"{device.id} = {key}" if key is not None else device.id
