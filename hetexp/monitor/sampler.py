"""Samples of all devices of this machine: cards of every vendor, the processor, the runs' emulated devices.

Each card is read by a thread of its own. A driver may hang on a card that has failed; the others are read in
time, and that one is reported as lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from hetexp.core.device import DeviceSpec
from hetexp.hardware.base import CardLostError, Gauge
from hetexp.hardware.detection.detected import DetectedCard, Reading
from hetexp.hardware.detection.inventory import detect, gauges
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.probe import torch_devices
from hetexp.monitor.processor import Processor
from hetexp.monitor.runs import RunWatch
from hetexp.monitor.sample import Device, Sample, User, of_reading

log = logging.getLogger(__name__)

LIST_SECONDS = 60.0
"""How often cards are listed again: one may have been added."""
LOST_SECONDS = 10.0
"""The same while one is lost: a reset may bring it back."""
PATIENCE_SECONDS = 0.5
"""Longest wait for a card's answer; a card without an answer for `HANGS_SECONDS` is lost."""
HANGS_SECONDS = 5.0


class Sampler:
    """Samples all devices of a machine.

    Args:
        machine: this machine by default.
        clock: returns seconds; for tests.
    """

    def __init__(self, machine: Machine | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        # The sampler does not wait for an interpreter's torch: its answer is there the next time.
        self._machine = machine or Machine(torch_sees=partial(torch_devices, wait=False))
        self._clock = clock
        self._open = ExitStack()
        self._readers: list[_Reader] = []
        self._cards: list[DetectedCard] = []
        self._listed_at = -LIST_SECONDS
        self._processor = Processor(self._machine)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def sample(self, runs: Sequence[RunWatch] = ()) -> list[Sample]:
        """Return one sample of each device, cards by their number.

        Args:
            runs: active runs, which use cards or have emulated devices.
        """
        self._list()
        for reader in self._readers:
            reader.ask()
        deadline = self._clock() + PATIENCE_SECONDS
        samples = [self._card(reader, runs, deadline - self._clock()) for reader in self._readers]
        on_cpu = [User(run.name, rank) for run in runs for spec, rank in run.devices if spec.backend == "cpu"]
        samples.append(self._processor.sample(tuple(on_cpu)))
        for run in runs:
            samples += [
                _modelled(run, spec, rank) for spec, rank in run.devices if spec.backend == "emulated"
            ]
        return samples

    def _list(self) -> None:
        """List the cards if that is due, and open their gauges."""
        lost = any(reader.lost is not None for reader in self._readers)
        if self._clock() - self._listed_at < (LOST_SECONDS if lost else LIST_SECONDS):
            return
        if any(reader.hangs for reader in self._readers):  # listing asks the same driver, and would wait, too
            return
        self._listed_at = self._clock()
        cards = [self._with_facts(card) for card in detect(self._machine, builds=[]).cards]
        before, now = (
            {card.spec.id: (card.spec.uuid, card.spec.pci, card.lost) for card in listed}
            for listed in (self._cards, cards)
        )
        if before and not lost and before == now:
            return
        self._close()
        self._cards = cards
        opened = self._open.enter_context(gauges(cards, self._machine))
        self._readers = [_Reader(card, gauge, self._clock) for card, gauge in zip(cards, opened, strict=True)]

    def _with_facts(self, card: DetectedCard) -> DetectedCard:
        """Return a lost card, whose driver reports hardly anything, with its earlier facts."""
        before = [old.spec for old in self._cards if old.spec.pci == card.spec.pci]
        if card.lost is None or card.spec.uuid is not None or card.spec.pci is None or len(before) != 1:
            return card
        return replace(card, spec=before[0])

    def _close(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.end()
        if not any(reader.hangs for reader in readers):  # closing a library may hang as well
            self._open.close()
        self._open = ExitStack()

    def _card(self, reader: _Reader, runs: Sequence[RunWatch], patience: float) -> Sample:
        spec = reader.card.spec
        ranks = [(run, device, rank) for run in runs for device, rank in run.devices]
        users = tuple(User(run.name, rank) for run, device, rank in ranks if _same(device, spec))
        reading = reader.answer(patience)
        reason = reader.card.undriven if reader.lost is None else reader.lost
        if reason is None:
            return of_reading(reader.device, reading or Reading(), spec.memory_bytes, users)
        state = "unusable" if reader.lost is None else "lost"
        return Sample(reader.device, state, reason, memory_total_bytes=spec.memory_bytes, users=users)


class _Reader:
    """Reads a card in a thread of its own.

    Args:
        gauge: gauge of the card; `None`: its driver reports nothing.
    """

    def __init__(self, card: DetectedCard, gauge: Gauge | None, clock: Callable[[], float]) -> None:
        self.card, self.device = card, Device.of(card.spec)
        self.lost = card.lost
        self._gauge, self._clock = gauge, clock
        self._reading: Reading | None = None
        self._failed: str | None = None
        self._asked, self._answered = threading.Event(), threading.Event()
        self._answered.set()
        self._asked_at = clock()
        self._ended = False
        self._thread: threading.Thread | None = None
        if gauge is not None:
            self._thread = threading.Thread(target=self._serve, name=f"reads {card.spec.id}", daemon=True)
            self._thread.start()

    @property
    def hangs(self) -> bool:
        """Whether its driver keeps it waiting."""
        return self._thread is not None and not self._answered.is_set()

    def ask(self) -> None:
        """Begin to read the card, unless its driver still owes an answer."""
        if self._gauge is not None and self._answered.is_set():
            self._asked_at = self._clock()
            self._answered.clear()
            self._asked.set()

    def answer(self, patience: float) -> Reading | None:
        """Return the card's answer, `None` if it has not answered yet."""
        if self._answered.wait(max(0.0, patience)):
            return self._reading
        silent = self._clock() - self._asked_at
        if silent >= HANGS_SECONDS:
            self.lost = f"its driver has not answered for {silent:.0f} s"
        return None

    def end(self) -> None:
        """Let the thread end; one that hangs in its driver stays behind."""
        self._ended = True
        self._asked.set()
        if self._thread is not None:
            self._thread.join(PATIENCE_SECONDS)

    def _serve(self) -> None:
        assert self._gauge is not None
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._ended:
                return
            try:
                self._reading, self.lost = self._gauge(), None
            except CardLostError as error:
                self._reading, self.lost = None, str(error)
            except Exception as error:  # a vendor's library raises anything: nothing is known of the card now
                self._reading = None
                if repr(error) != self._failed:
                    self._failed = repr(error)
                    log.warning("a card's sensors cannot be read: %s", self._failed)
            self._answered.set()


def _same(planned: DeviceSpec, card: DeviceSpec) -> bool:
    """Return whether a plan's device is a card of this machine."""
    if planned.backend != card.backend:
        return False
    if planned.uuid is not None or card.uuid is not None:
        return planned.uuid == card.uuid
    return (planned.pci or planned.id) == (card.pci or card.id)


def _modelled(run: RunWatch, spec: DeviceSpec, rank: int) -> Sample:
    """Return the sample of an emulated device by its run; its power is the limit while it computes."""
    modelled = run.modelled(spec)
    limit, use = spec.power_limit_watts, modelled.utilisation
    return Sample(
        Device.of(spec, run.name),
        utilisation=use,
        memory_used_bytes=modelled.memory_bytes,
        memory_total_bytes=spec.memory_bytes,
        power_watts=limit * use if limit is not None and use is not None else None,
        power_limit_watts=limit,
        users=(User(run.name, rank),),
    )
