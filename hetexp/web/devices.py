"""The devices that a request may name, with the facts that samples lack: interpreter and usability."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from hetexp.core.device import GIB
from hetexp.core.errors import did_you_mean, must_be
from hetexp.hardware.catalogue import load_catalogue
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.web.job import Card

LIST_SECONDS = 60.0
"""Seconds after which cards are listed again."""
_EMULATED = "emulated:"


class Machine:
    """The cards of this machine as `hetexp gpus` lists them, cached for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cards: dict[str, DetectedCard] = {}
        self._listed_at: float | None = None

    def cards(self) -> dict[str, DetectedCard]:
        """Return the cards by id."""
        from hetexp.commands.gpus import inspect

        with self._lock:
            if self._listed_at is None or time.monotonic() - self._listed_at > LIST_SECONDS:
                self._cards = {card.spec.id: card for card in inspect().cards}
                self._listed_at = time.monotonic()
            return self._cards

    def shown(self, device: dict[str, Any]) -> dict[str, Any]:
        """Return a device as the API shows it, with its interpreter and whether it can be chosen.

        This machine knows its own cards only; another machine's device may have the id of one of them.
        """
        card = self.cards().get(device["id"]) if device["here"] else None
        if card is None or device["emulated"]:
            return device
        usable = card.unusable is None and card.undriven is None and card.hidden_by is None
        reason = device["reason"] or (card.why_not if not usable else None)
        selectable = device["selectable"] and usable and card.lost is None
        busy = device["busy"] or card.busy is not None
        return device | {"environment": card.python, "selectable": selectable, "reason": reason, "busy": busy}

    def problems(self, gpu_ids: Sequence[str]) -> list[tuple[str | None, str]]:
        """Return key and message of each wrong device of a request."""
        names = [*self.cards(), "cpu", *(card["id"] for card in emulated_cards())]
        problems: list[tuple[str | None, str]] = []
        for place, name in enumerate(gpu_ids):
            key = f"gpu_ids[{place}]"
            if name not in names:
                fix = did_you_mean(name, names).strip()
                accepted = "a device of this machine, cpu, or an emulated card of GET /api/v1/options"
                problems.append((key, must_be(key, accepted, name, fix)))
            elif gpu_ids.index(name) < place and name in self.cards():
                problems.append((key, must_be(key, "another card than those before it", name)))
        return problems

    def real(self, gpu_ids: Sequence[str]) -> tuple[Card, ...]:
        """Return the real cards among the devices of a request."""
        cards = [self.cards()[name].spec for name in gpu_ids if name in self.cards()]
        return tuple(Card(spec.id, spec.backend, spec.uuid, spec.pci) for spec in cards)


@cache
def emulated_cards() -> list[dict[str, Any]]:
    """Return the cards that can be emulated, as `GET /options` shows them."""
    return [
        {
            "id": f"{_EMULATED}{name}",
            "name": card.name,
            "vendor": card.vendor,
            "memory_total_bytes": round(card.memory_gib * GIB),
            "tflops": card.tflops.get("float32"),
        }
        for name, card in sorted(load_catalogue(None).cards.items())
    ]
