"""Intel cards: found by the kernel and Sysman without torch, driven by an XPU build of torch as `xpu`.

torch drives them natively. intel-extension-for-pytorch came before that; it was archived upstream in March
2026, and 2.8 is its last version. If an XPU build of it that fits this torch is installed, its `optimize`
is applied.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.backends import sysfs, sysman, xpu_mask
from hetexp.hardware.backends.accelerator import AcceleratorBackend
from hetexp.hardware.backends.pci_names import Chip, chip
from hetexp.hardware.base import CardLostError, Counter, Gauge
from hetexp.hardware.detection.detected import DetectedCard, Process, Reading
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import PciCard
from hetexp.hardware.detection.probe import torch_sees

if TYPE_CHECKING:
    import torch
    from torch import nn

DRIVERS = ("xe", "i915")
EXTENSION = "intel_extension_for_pytorch"
_PRECISIONS = {
    "xe-lp": ("float32", "float16"),
    "xe-lpg": ("float64", "float32", "float16"),
    "xe-lpg+": ("float64", "float32", "bfloat16", "float16"),
    "xe-hpg": ("float32", "bfloat16", "float16"),
    "xe-hpc": ("float64", "float32", "bfloat16", "float16"),
    "xe2-lpg": ("float64", "float32", "bfloat16", "float16"),
    "xe2-hpg": ("float64", "float32", "bfloat16", "float16"),
    "xe3-lpg": ("float64", "float32", "bfloat16", "float16"),
}
"""float64: `ftrSupportsFP64` in compute-runtime's hw_info_*.cpp (that of Arc A cards can be imitated only);
bfloat16: chips with matrix engines (XMX)."""
_TOO_OLD = ("gen9", "gen11")
"""Graphics before Xe: no XPU build of torch has code for them, and newer drivers do not list them."""
_HELD_BACK = (
    ("pl1", "power cap"),
    ("pl2", "power cap"),
    ("pl4", "power cap"),
    ("thermal", "too hot"),
    ("prochot", "too hot"),
    ("ratl", "too hot"),
    ("vr_thermalert", "too hot"),
    ("vr_tdc", "current limit"),
)
"""File names of reasons for a low clock, of i915 and xe, with their meaning."""
_CONTAINER = "--device /dev/dri"

_LOG = logging.getLogger(__name__)


class XpuBackend(AcceleratorBackend):
    """Drives one Intel card, the only one that its process sees."""

    name: ClassVar[str] = "xpu"
    platform: ClassVar[str] = "XPU"
    torch_type: ClassVar[str] = "xpu"
    vendor: ClassVar[str] = "intel"
    drivers = (*(f"/sys/module/{name}" for name in DRIVERS), "/dev/dxg")
    wheel: ClassVar[str] = "xpu"
    native_collective: ClassVar[str | None] = "xccl" if sys.platform == "linux" else None
    """torch 2.8 and newer have it built in on Linux (`torch.distributed.is_xccl_available`)."""

    @classmethod
    def cards(cls, machine: Machine, on_bus: Sequence[PciCard]) -> list[DetectedCard]:
        driven = any(card.driver in DRIVERS for card in on_bus)
        # Windows has no list of the bus that could be read.
        reported = sysman.cards(machine) if driven or machine.platform == "win32" else {}
        holders = sysfs.drm_processes(machine) if driven else None
        by_address = {card.address: card for card in on_bus}
        cards = [
            _detected(
                _Facts(machine, address, by_address.get(address), reported.get(address)),
                holders.get(address, ()) if holders is not None else None,
            )
            for address in sorted({*by_address, *reported})
        ]
        return _with_masks(_with_memory(cards, machine))

    @classmethod
    def hide(cls, cards: Sequence[DetectedCard], machine: Machine) -> tuple[list[DetectedCard], list[str]]:
        counted = _counted(cards)
        if not counted:  # Level Zero sees no card whatever the variables say
            return list(cards), []
        tiles = {spec.id: _tiles(spec) for spec in counted}
        hidden, problems = xpu_mask.hidden(counted, machine.environ, tiles)
        unclear = _unclear_count(cards, machine)
        if unclear is not None:
            mask, problem = unclear
            hidden, problems = {spec.id: f"{mask}={machine.environ[mask]}" for spec in counted}, [problem]
        return [replace(card, hidden_by=hidden.get(card.spec.id)) for card in cards], problems

    @classmethod
    def environment(cls, spec: DeviceSpec) -> dict[str, str]:
        # The mask counts whole cards, discrete ones first: their numbers do not depend on whether this
        # version of the driver lists old graphics in the processor, as numbers along the bus do.
        return {
            xpu_mask.MASK: spec.mask or str(spec.index),
            xpu_mask.BUS_ORDER: "0",
            xpu_mask.HIERARCHY: "COMPOSITE",
        }

    def _check_card(self, module: Any) -> None:
        super()._check_card(module)
        device_id = getattr(module.get_device_properties(0), "device_id", None)
        seen = chip("intel", device_id if isinstance(device_id, int) else None)
        # If the table lists the chosen card, its name is from there, too.
        if seen.listed and self.spec.architecture is not None and seen.name != self.spec.name:
            raise SetupError(
                f"{self.spec} was chosen, but torch sees another card ({seen.name}). Remove variables that "
                f"a start-up file of the interpreter sets ({xpu_mask.MASK}, {xpu_mask.BUS_ORDER})."
            )

    @classmethod
    @contextmanager
    def gauges(cls, cards: Sequence[DetectedCard], machine: Machine) -> Iterator[list[Gauge | None]]:
        reported = sysman.cards(machine)
        yield [
            _Gauge(card.spec, _Facts(machine, pci, None, reported.get(pci)))
            if (pci := card.spec.pci) is not None
            else None
            for card in cards
        ]

    @contextmanager
    def energy_counter(self, machine: Machine) -> Iterator[Counter | None]:
        pci = self.spec.pci
        yield sysfs.KernelCard(machine, pci, None).energy_joules if pci is not None else None

    def _seen_uuid(self, module: Any) -> str | None:
        return None  # Level Zero and Sysman report different UUIDs of one card

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
        super().attach(model, optimizer, inputs)
        extension = usable_extension()
        if extension is None:
            return
        import torch

        training = model.training
        try:
            # In place: others hold this model and this optimizer. In float32: the weights stay as they are,
            # and autocast decides what is computed in less.
            extension.optimize(model.train(), optimizer=optimizer, dtype=torch.float32, inplace=True)
        except Exception as error:  # an archived package: torch does without it
            _LOG.warning("%s is not used on %s: optimize failed (%s).", EXTENSION, self.spec, error)
        finally:
            model.train(training)

    def limit_memory(self, num_bytes: int) -> bool:
        can_limit = hasattr(self._module(), "set_per_process_memory_fraction")  # an older torch cannot
        return can_limit and super().limit_memory(num_bytes)

    @cached_property
    def _events_tell_time(self) -> bool:
        """Whether events measure time; before oneAPI 2025 they raise (pytorch/pytorch#131840)."""
        try:
            start, end = super().mark(), super().mark()
            self.synchronize()
            super().seconds_between(start, end)
        except (RuntimeError, NotImplementedError, TypeError):
            return False
        return True

    def mark(self) -> Any:
        if self._events_tell_time:
            return super().mark()
        self.synchronize()  # without events, time is read when the device has finished
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        if isinstance(start, float):
            return float(end - start)
        return super().seconds_between(start, end)


def usable_extension() -> Any | None:
    """Return intel-extension-for-pytorch if an XPU build for this torch is installed and loads.

    The version is checked first: a CPU build, or a build for another torch, ends the process at its import.
    """
    import torch

    try:
        version = importlib.metadata.version("intel-extension-for-pytorch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if "xpu" not in version or version.split(".")[:2] != torch.__version__.split(".")[:2]:
        return None
    try:
        return importlib.import_module(EXTENSION)
    except (Exception, SystemExit) as error:
        _LOG.warning("%s %s is installed and not used: %s", EXTENSION, version, error)
        return None


@dataclass(frozen=True)
class _Facts(sysfs.KernelCard):
    """A card's sources: the kernel's list and files, and Sysman."""

    reported: sysman.Card | None

    def local_memory(self, kind: str) -> int | None:
        """Return the bytes of the card's own memory, `total` or `avail`, as the kernel counts them."""
        node = self.node("card")
        return self.machine.number(node / f"lmem_{kind}_bytes") if node is not None else None

    @property
    def chip(self) -> Chip:
        return chip("intel", self.bus.device_id if self.bus is not None else None)

    @property
    def integrated(self) -> bool:
        # Graphics in Intel's processors have this address.
        return self.chip.integrated if self.chip.listed else self.address == "0000:00:02.0"

    @cached_property
    def details(self) -> dict[str, Any]:
        """Facts from the command xpu-smi, which runs only if no other source knows."""
        answer = self.machine.run(["xpu-smi", "discovery", "-d", self.address, "-j"])
        with suppress(ValueError):
            details = json.loads(answer or "")
            return details if isinstance(details, dict) else {}
        return {}


def _detected(card: _Facts, processes: tuple[Process, ...] | None) -> DetectedCard:
    architecture = card.chip.architecture
    module = card.bus.driver if card.bus is not None else None
    lost = card.off_the_bus()
    undriven = _undriven(card, architecture)
    usable = lost is None and undriven is None
    total = _memory(card, ask=usable)
    spec = DeviceSpec(
        id="xpu:0",
        backend="xpu",
        index=0,
        name=_name(card, ask=usable),
        vendor="intel",
        memory_bytes=total,
        driver=(card.reported.driver if card.reported is not None else None)
        or sysfs.driver_version(card.machine, module),
        pci=card.address,
        architecture=architecture,
        integrated=card.integrated,
        unified_memory=card.integrated,
        precisions=_PRECISIONS.get(architecture or ""),
    )
    if lost is not None:
        return DetectedCard(spec, lost=lost)
    free = _free(card, card.integrated, total)
    return DetectedCard(spec, _reading(card, free, processes), undriven=undriven)


def _name(card: _Facts, ask: bool) -> str:
    """Return the card's name with its vendor, first by its PCI id: drivers change their names of cards."""
    if card.chip.listed:
        return card.chip.name
    name = card.reported.name if card.reported is not None else None
    if name is None and ask:
        name = card.details.get("device_name")
    if isinstance(name, str) and name.strip():
        return plain_name(name)
    return card.chip.name


def plain_name(name: str) -> str:
    """Return `Intel Arc A770 Graphics` for `Intel(R) Arc(TM) A770 Graphics`."""
    return " ".join(name.replace("(R)", " ").replace("(TM)", " ").split())


def _memory(card: _Facts, ask: bool) -> int | None:
    """Return the bytes of a card's memory.

    Graphics in a processor use the host's memory. Linux lends them half of it (ttm_device.c): a cautious
    figure, flagged as unified.

    Args:
        ask: whether to run xpu-smi if no other source knows.
    """
    if card.integrated:
        host, _ = sysfs.host_memory(card.machine)
        return host // 2 if host is not None else None
    total = sysfs.positive(card.local_memory("total"))
    if total is None and card.reported is not None:
        total, _ = card.reported.memory()
    if total is None and ask:
        with suppress(TypeError, ValueError):
            total = sysfs.positive(int(card.details.get("memory_physical_size_byte", 0)))
    return total


def _free(card: _Facts, integrated: bool, total: int | None) -> int | None:
    """Return the free bytes of a card's memory, at most `total`."""
    if integrated:
        _, free = sysfs.host_memory(card.machine)
    else:
        free = card.local_memory("avail") if sysfs.positive(card.local_memory("total")) else None
        if free is None and card.reported is not None:
            _, free = card.reported.memory()
    return min(free, total) if free is not None and total is not None else None


def _counted(cards: Sequence[DetectedCard]) -> list[DeviceSpec]:
    """Return the cards that Level Zero can open."""
    return [card.spec for card in cards if card.undriven is None and card.lost is None]


def _with_memory(cards: list[DetectedCard], machine: Machine) -> list[DetectedCard]:
    """Ask torch for the unknown memory of discrete cards, if its answer is clearly about them."""
    unknown = {spec.pci for spec in _counted(cards) if spec.memory_bytes is None}
    if not unknown:
        return cards
    seen = torch_sees("xpu", machine)
    result = []
    for card in cards:
        sizes = {device.memory_bytes for device in seen if _model(device.name) == _model(card.spec.name)}
        sizes.discard(None)
        if card.spec.pci in unknown and len(sizes) == 1:
            card = replace(card, spec=replace(card.spec, memory_bytes=sizes.pop()))
        result.append(card)
    return result


def _model(name: str) -> str:
    """Return a name without the words that differ between torch and pci.ids."""
    return plain_name(name).removesuffix(" Graphics").casefold()


def _with_masks(cards: list[DetectedCard]) -> list[DetectedCard]:
    """Give each card the number by which Level Zero counts it under the variables of `environment`."""
    order = [spec.pci for spec in xpu_mask.in_level_zero_order(_counted(cards))]
    return [
        replace(card, spec=replace(card.spec, mask=str(order.index(card.spec.pci))))
        if card.spec.pci in order
        else card
        for card in cards
    ]


def _unclear_count(cards: Sequence[DetectedCard], machine: Machine) -> tuple[str, str] | None:
    """Return a mask whose numbers depend on the driver's version, and the problem with it.

    Along the bus, graphics before Xe in the processor come first, and only some versions count them.
    """
    old = next((card.spec for card in cards if card.spec.architecture in _TOO_OLD), None)
    mask = next((v for v in (xpu_mask.MASK, xpu_mask.SELECTOR) if v in machine.environ), None)
    if old is None or mask is None or machine.environ.get(xpu_mask.BUS_ORDER) != "1":
        return None
    return mask, (
        f"`{mask}` must not count along the bus ({xpu_mask.BUS_ORDER}=1) on this machine: some versions of "
        f"the driver count {old.name}, some do not. Unset {xpu_mask.BUS_ORDER}."
    )


def _tiles(spec: DeviceSpec) -> int:
    """Return the number of devices that Level Zero shows for a card, unless it is set to show whole cards."""
    return 2 if spec.architecture == "xe-hpc" and "Max 1100" not in spec.name else 1


def _reading(card: _Facts, free: int | None, processes: tuple[Process, ...] | None) -> Reading:
    """Return a card's state now, without power and use: these need two readings of a sum."""
    turns = card.sensor("fan1_input")
    heat = card.reading(1000, "temp2_input", "temp1_input")  # xe's package, i915's
    if heat is None and card.reported is not None:
        heat = card.reported.temperature()
    return Reading(
        memory_free_bytes=free,
        temperature_celsius=heat,
        power_limit_watts=card.reading(1e6, "power1_max", "power2_max"),  # the card's, the package's
        clock_mhz=_clock(card),
        fan=card.fan(),
        fan_rpm=float(turns) if turns is not None else None,
        throttled=_throttled(card),
        processes=processes,
    )


class _Gauge:
    """Reads one card; power and use are reported as sums, so they are known from the second reading on."""

    def __init__(self, spec: DeviceSpec, card: _Facts) -> None:
        self._spec, self._card = spec, card
        self._before = self._sums()

    def __call__(self) -> Reading:
        card = self._card
        lost = card.off_the_bus()
        if lost is None and card.machine.platform == "linux" and not card.folder.exists():
            lost = "it is no longer on the PCI bus"
        if lost is not None:
            raise CardLostError(lost)
        free = _free(card, self._spec.integrated, self._spec.memory_bytes)
        before, self._before = self._before, self._sums()
        return replace(
            _reading(card, free, None),
            utilisation=_ratio(before[0], self._before[0], most=1.0),
            power_watts=_ratio(before[1], self._before[1]),
        )

    def _sums(self) -> tuple[_Sum, _Sum]:
        """Return busy time beside all time, and joules beside seconds."""
        card = self._card
        joules = card.energy_joules()
        drawn = (joules, time.monotonic()) if joules is not None else None
        return card.reported.active() if card.reported is not None else None, drawn


_Sum = tuple[float, float] | None
"""Two counters that are read at the same time."""


def _ratio(before: _Sum, now: _Sum, most: float = math.inf) -> float | None:
    """Return the growth of the first counter ÷ that of the second; `None` if one fell or stood still."""
    if before is None or now is None or now[1] <= before[1] or now[0] < before[0]:
        return None
    return min(most, (now[0] - before[0]) / (now[1] - before[1]))


def _clock(card: _Facts) -> float | None:
    """Return the clock of a card's first group of cores, from the file of xe or i915."""
    files = [card.folder / "tile0" / "gt0" / "freq0" / "act_freq"]
    if (node := card.node("card")) is not None:
        files.append(node / "gt" / "gt0" / "rps_act_freq_mhz")
    clocks = (sysfs.positive(card.machine.number(file)) for file in files)
    return next((float(clock) for clock in clocks if clock is not None), None)


def _throttled(card: _Facts) -> tuple[str, ...] | None:
    files = [*card.folder.glob("tile*/gt*/freq0/throttle/reason_*")]
    if (node := card.node("card")) is not None:
        files += node.glob("gt/gt*/throttle_reason_*")
    if not files:
        return None
    named = {path.name.rpartition("reason_")[2] for path in files if card.machine.number(path) == 1}
    return tuple(dict.fromkeys(words for reason, words in _HELD_BACK if reason in named))


def _undriven(card: _Facts, architecture: str | None) -> str | None:
    if card.bus is None:  # Sysman lists it: it has its driver
        return None
    wrong = sysfs.wrong_driver(card.bus, DRIVERS)
    if wrong is not None:
        return wrong
    if architecture in _TOO_OLD:
        return (
            f"its graphics ({architecture}) are older than Xe, and torch's XPU builds have no code for them"
        )
    node = card.node("renderD")
    if node is None:
        return f"its driver {card.bus.driver} made no device file for it; see sudo dmesg"
    return sysfs.closed(card.machine, f"/dev/dri/{node.name}", _CONTAINER)
