"""Decides which cards of the machine a configuration may use, and why not the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetexp.core.config import HardwareConfig
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import must_be
from hetexp.hardware.backend import backend_class
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.backends.pci_names import WORDS
from hetexp.hardware.catalogue import Catalogue, Link, named
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.inventory import Inventory
from hetexp.hardware.selection.request import cpu_index, described, find_card, parse_card_request, rank_cards

_SHARING = "hardware.share_devices=true uses it all the same"


@dataclass
class Selection:
    """The devices of a run in rank order, the reasons for them, and the problems of the request."""

    devices: list[DeviceSpec] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    network: Link | None = None
    """Link between the hosts of emulated devices, if there are several hosts."""
    threads: tuple[int, ...] = ()
    """CPU threads of each device's rank, if several machines have reported them."""
    fallback: dict[str, str] | None = None
    """Why `strategy.fallback` left one device of several (`hetexp.plan.fallback`)."""


class CardPool:
    """The cards that a configuration may take.

    Args:
        config: the typed section.
        inventory: all cards of the machine.
        catalogue: source of the cards' speed.
        need_bytes: number of devices → memory that the run needs on each, `None` if it is not known.
    """

    def __init__(
        self,
        config: HardwareConfig,
        inventory: Inventory,
        catalogue: Catalogue,
        need_bytes: Callable[[int], int | None] | None = None,
    ) -> None:
        self.cards: Sequence[DetectedCard] = inventory.cards
        self._config, self._inventory, self._catalogue = config, inventory, catalogue
        self._need_bytes = need_bytes

    def why_not(self, card: DetectedCard, python: str | None = None, busy_too: bool = False) -> str | None:
        """Return why a card cannot be taken, `None` if it can.

        Args:
            python: the interpreter that the user named for the card.
            busy_too: whether the card may be busy.
        """
        if card.lost is not None:
            return f"lost ({card.lost})"
        if card.undriven is not None:
            return f"not usable: {card.undriven}"
        unusable = card.unusable if python is None else self._problem_under(card, python)
        if unusable is not None:
            return f"not usable: {unusable}"
        if card.hidden_by is not None:
            wrong = self._inventory.mask_problems.get(card.spec.backend, [])
            return " ".join([f"hidden by {card.hidden_by}", *(f"({problem})" for problem in wrong)])
        return self._too_hot(card) or self._too_hungry(card) or self._in_use(card, busy_too)

    def why_absent(self, name: str) -> str:
        """Return a sentence on a device that the machine does not have, named as `cuda:0`."""
        backend = name.partition(":")[0]
        present = f"This machine has {described(self.cards)}."
        if backend not in self._inventory.without_driver:
            return present
        return f"No {WORDS[backend_class(backend).vendor]} driver is loaded (see hetexp doctor). {present}"

    def spec(self, card: DetectedCard, python: str | None = None) -> DeviceSpec:
        """Return a card's facts for the plan."""
        return replace(
            card.spec,
            python=python or card.python,
            memory_free_bytes=card.reading.memory_free_bytes,
            power_limit_watts=card.reading.power_limit_watts,
            rates=self.rates(card),
        )

    def take_auto(self, selection: Selection, python: str | None = None) -> None:
        """Add the devices of `auto`: the cards of `hardware.default_gpu_selection`, or else the CPU."""
        mode = self._config.default_gpu_selection
        if mode == "manual" and self.cards:
            selection.problems.append(
                "`hardware.gpu_ids` must name the devices if `hardware.default_gpu_selection` is manual "
                f"(this machine's: {described(self.cards)})."
            )
            return
        chosen = self._eligible(selection, mode == "all", python)
        if selection.problems:
            return
        if chosen:
            selection.devices += [self.spec(card, python) for card in chosen]
            if len(chosen) == len(self.cards):
                every = f"Every accelerator of this machine takes part ({len(chosen)} found)."
                selection.reasons.insert(0, every)
            return
        busy = [
            card for card in self.cards if card.busy is not None and self.why_not(card, python, True) is None
        ]
        if busy:
            users = "; ".join(f"{card.spec}: {card.busy}" for card in busy)
            selection.problems.append(
                f"`hardware.devices` must find a free accelerator, but all are busy ({users}). "
                "Wait, share them (hardware.share_devices=true), or train on the CPU (hardware=cpu)."
            )
            return
        add_cpus(selection, None, 1)
        none = "No accelerator was found" if not self.cards else "No accelerator can be used"
        selection.reasons.append(f"{none}: the CPU trains alone.")

    def take_wish(self, selection: Selection, value: int | str | Sequence[int | str], key: str) -> None:
        """Add the devices that `hardware.gpu_ids` asks for, or a problem for each that cannot be had."""
        wish, problems = parse_card_request(value, key)
        selection.problems += problems
        if problems:
            return
        if wish.word == "recommend":
            assert wish.count is not None
            self._take_recommended(selection, wish.count, key)
        elif wish.word is not None:
            chosen = self._eligible(selection, wish.word == "all")
            selection.devices += [self.spec(card) for card in chosen]
            if not chosen and not selection.problems:
                reasons = "; ".join(selection.reasons) or "there is none"
                selection.problems.append(
                    f"`{key}` must find a usable accelerator, but '{wish.word}' finds none: {reasons}"
                )
        else:
            self._take_named(selection, wish.names, key)

    def of_vendor(self, vendor: str, match: str | None) -> list[DetectedCard]:
        """Return a vendor's cards as a mix counts them, usable or not.

        Cards that a visibility variable hides are left out, and integrated ones unless `match` has their
        name.
        """
        return [
            card
            for card in self.cards
            if card.spec.vendor == vendor
            and card.hidden_by is None
            and (not card.spec.integrated if match is None else named(match, card.spec.name))
        ]

    def rates(self, card: DetectedCard) -> dict[str, float] | None:
        """Return the catalogue's rates of a card by precision, `None` if it does not know the card."""
        entry = self._catalogue.real(card.spec)
        return dict(entry.tflops) if entry is not None else None

    def tflops(self, card: DetectedCard) -> float | None:
        """Return the catalogue's float32 rate of a card, `None` if the catalogue does not know it."""
        return (self.rates(card) or {}).get("float32")

    def _take_recommended(self, selection: Selection, count: int, key: str) -> None:
        eligible = self._eligible(selection, False, only_one=False)
        if selection.problems:
            return
        speed = {card.spec.id: rate for card in eligible if (rate := self.tflops(card)) is not None}
        need = self._need_bytes(count) if self._need_bytes is not None else None
        ranked = rank_cards(eligible, speed, need)
        if len(ranked) < count:
            reasons = "; ".join(selection.reasons)
            accepted = f"at most recommend:{len(ranked)}, the free cards here"
            selection.problems.append(must_be(key, accepted, f"recommend:{count}", reasons))
            return
        best = sorted(ranked[:count], key=lambda card: card.spec.number or 0)
        selection.devices += [self.spec(card) for card in best]
        names = ", ".join(f"{card.spec}" for card in ranked[:count])
        selection.reasons.append(f"Recommended by free memory and speed: {names}.")

    def _take_named(self, selection: Selection, names: Sequence[str], key: str) -> None:
        for name in names:
            index = cpu_index(name)
            if index is not None:
                selection.devices.append(CpuBackend.describe(index))
                continue
            card = find_card(name, self.cards)
            if isinstance(card, str):
                selection.problems.append(must_be(key, card, name, self.why_absent(name)))
                continue
            why = self.why_not(card)
            if why is not None:
                selection.problems.append(
                    f"`{key}` must name devices that can be used, but {card.spec} is {why}."
                )
                continue
            selection.devices.append(self.spec(card))
        if not self._config.multi_gpu_enabled and len(selection.devices) > 1:
            selection.problems.append(
                must_be(key, "one device if `hardware.multi_gpu_enabled` is false", list(names))
            )

    def _eligible(
        self,
        selection: Selection,
        busy_too: bool,
        python: str | None = None,
        only_one: bool = True,
    ) -> list[DetectedCard]:
        """Return the default choice of cards within the power budget, and report why not the others."""
        for problems in self._inventory.mask_problems.values():
            selection.problems += problems
        chosen = []
        for card in self.cards:
            why = self.why_not(card, python, busy_too)
            if why is None and card.spec.integrated:
                why = f"integrated graphics (hardware.gpu_ids=[{card.spec.number}] uses it)"
            if why is None:
                chosen.append(card)
            else:
                selection.reasons.append(f"{card.spec} is left out: {why}.")
        if only_one and not self._config.multi_gpu_enabled and len(chosen) > 1:
            speed = {card.spec.id: rate for card in chosen if (rate := self.tflops(card)) is not None}
            chosen = rank_cards(chosen, speed, None)[:1]
            selection.reasons.append(f"{chosen[0].spec} trains alone (hardware.multi_gpu_enabled=false).")
        return self._within_budget(selection, chosen)

    def _within_budget(self, selection: Selection, chosen: list[DetectedCard]) -> list[DetectedCard]:
        """Leave out the cards with the least work a watt until the others keep within the budget."""
        budget = self._config.power_budget_watts
        limits = {card.spec.id: card.reading.power_limit_watts for card in chosen}
        if budget is None or None in limits.values():
            return chosen  # `check_power` reports a limit that is not known
        kept = sorted(chosen, key=lambda card: (self.tflops(card) or 0.0) / (limits[card.spec.id] or 1.0))
        while kept and sum(limits[card.spec.id] or 0.0 for card in kept) > budget:
            left_out = kept.pop(0)
            selection.reasons.append(
                f"{left_out.spec} is left out: with its {limits[left_out.spec.id]:g} W the cards would be "
                f"above hardware.power_budget_watts ({budget:g} W)."
            )
        return [card for card in chosen if card in kept]

    def _problem_under(self, card: DetectedCard, python: str) -> str | None:
        """Return why the named interpreter cannot drive a card; its own errors appear when it is started."""
        path = Path(python).absolute()
        builds = [b for b in self._inventory.builds if b.python and Path(b.python).absolute() == path]
        if not builds or builds[0].problem is not None:
            return None
        return backend_class(card.spec.backend).build_problem(card.spec, builds[0])

    def _too_hot(self, card: DetectedCard) -> str | None:
        temperature, limit = card.reading.temperature_celsius, self._config.max_temperature_celsius
        if temperature is None or temperature <= limit:
            return None
        return f"at {temperature:.0f} °C, above hardware.max_temperature_celsius ({limit:g})"

    def _too_hungry(self, card: DetectedCard) -> str | None:
        limit, most = card.reading.power_limit_watts, self._config.device_power_watts
        if limit is None or most is None or limit <= most:
            return None
        return (
            f"limited to {limit:g} W, above hardware.device_power_watts ({most:g}); lower its limit with the "
            "vendor's tool (nvidia-smi -pl, amd-smi set --power-cap, xpu-smi config --powerlimit)"
        )

    def _in_use(self, card: DetectedCard, busy_too: bool) -> str | None:
        if card.busy is None or busy_too or self._config.share_devices:
            return None
        return f"busy: {card.busy}; {_SHARING}"


def add_cpus(selection: Selection, first: int | None, count: int) -> None:
    """Add the CPU as `count` devices, numbered from `first` on or by the lowest free numbers."""
    taken = {device.index for device in selection.devices if device.backend == "cpu"}
    free = (i for i in itertools.count() if i not in taken)
    numbers = itertools.count(first) if first is not None else free
    selection.devices += [CpuBackend.describe(i) for i in itertools.islice(numbers, count)]


def check_power(config: HardwareConfig, selection: Selection) -> None:
    """Check the chosen devices against `hardware.power_budget_watts`, and report what they may draw."""
    budget = config.power_budget_watts
    drawing = [device for device in selection.devices if device.backend != "cpu"]
    if budget is None or not drawing:
        return
    key = "hardware.power_budget_watts"
    unknown = [str(device) for device in drawing if device.power_limit_watts is None]
    if unknown:
        accepted = f"null: the power limit of {', '.join(unknown)} is not known"
        selection.problems.append(must_be(key, accepted, budget))
        return
    cards = {device.uuid or device.id: device for device in drawing}.values()
    total = sum(device.power_limit_watts or 0.0 for device in cards)
    limits = " + ".join(f"{device.power_limit_watts:g} W" for device in cards)
    if total > budget:
        accepted = f"at least {total:g}, the limits of the chosen devices together ({limits})"
        selection.problems.append(must_be(key, accepted, budget))
    else:
        selection.reasons.append(f"The devices may draw {limits} of the {budget:g} W allowed.")
