"""Reads NVML; a query that fails costs only its field, as drivers and cards report different values.

Names and codes are those of https://docs.nvidia.com/deploy/nvml-api; the library is nvidia-ml-py (`pynvml`),
old or new.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hetexp.core.errors import logged
from hetexp.hardware.backends.sysfs import host_memory, percent, positive
from hetexp.hardware.detection.detected import Process, Reading
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import normalised

NO_PERMISSION, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 4, 9, 12, 13
GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, UNKNOWN = 15, 16, 18, 999

INTEGRATED = ("sm_53", "sm_62", "sm_72", "sm_87", "sm_101", "sm_110", "sm_121")
"""Compute capabilities that only chips on the host's memory have: Jetson TX1 to Thor, GB10
(https://developer.nvidia.com/cuda-gpus). `sm_101` is what CUDA 12 called Thor."""
_BUS_ID = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")
_INTEGRATED_NAMES = ("GB10", "N1X", "Thor", "Orin", "Xavier", "Tegra", "Jetson")

_HELD_BACK = ((0x04, "power cap"), (0x20, "too hot"), (0x40, "far too hot"), (0x80, "power brake"))
"""Bits of `nvmlClocksEventReason…`: software power cap, software and hardware thermal slowdown, and a signal
of the power supply. An idle card's low clocks, or clocks that the user has set, are no such reason."""
_SLOWDOWN = (0x08, "hardware slowdown")
"""Accompanies each reason of the hardware; old cards report no other."""

_SM_CLOCK, _MEMORY_CLOCK = 1, 2
"""`NVML_CLOCK_SM` and `NVML_CLOCK_MEM`."""

_FIXES = {
    DRIVER_NOT_LOADED: "load it (sudo modprobe nvidia), or install it again if the kernel is newer than it",
    LIBRARY_NOT_FOUND: "install the driver's own libraries (libnvidia-ml.so.1); a container gets them with "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    VERSION_MISMATCH: "the driver was updated while it ran: restart the machine",
    NO_PERMISSION: "ask for access to /dev/nvidiactl and /dev/nvidia*",
}
MISSING = "nvidia-ml-py, which reads NVIDIA's driver, cannot be imported; run: pip install nvidia-ml-py"


class NotAnsweringError(Exception):
    """NVML cannot be asked; the text says why, with the fix."""


_COHERENT = ("GH200", "GB200", "GB300")
"""Chips that reach the host's memory by NVLink-C2C, whatever PCI Express link they have."""


@dataclass
class Card:
    """One card, or one instance of a card, as NVML knows it."""

    library: Any
    handle: Any
    lost: str | None = None
    """The driver's words when it could no longer reach the card; no query follows."""
    index: int = 0
    """NVML's number of the card, along the PCI bus; of an instance: within its card."""
    name: str | None = None
    uuid: str | None = None
    pci: str | None = None
    architecture: str | None = None
    refused: str | None = None
    """Why NVML gives no handle of the card, though the card is not lost."""
    in_mig_mode: bool = False
    instances: list[Card] = field(default_factory=list)
    parent: Card | None = None
    """The card that an instance is a part of."""
    ids: tuple[int | None, int | None] = (None, None)
    """An instance's numbers, of its GPU instance and its compute instance."""

    @property
    def integrated(self) -> bool:
        """Whether the host's memory is its memory."""
        words = (self.name or "").replace("-", " ").split()
        return self.architecture in INTEGRATED or any(word in words for word in _INTEGRATED_NAMES)

    def ask(self, *names: str, args: Sequence[Any] = ()) -> Any | None:
        """Return the answer to the first of these queries that library and driver know, else `None`."""
        for name in names:
            if self.lost is not None or self.handle is None:
                return None
            try:
                return getattr(self.library, name)(self.handle, *args)
            except AttributeError:  # an older library
                continue
            except Exception as error:  # any code of NVML, or an answer that the library does not know
                if code_of(error) in (GPU_IS_LOST, RESET_REQUIRED) or "fallen off the bus" in str(error):
                    self.lost = str(error)
                if code_of(error) != FUNCTION_NOT_FOUND:
                    return None
        return None


@contextmanager
def opened(machine: Machine) -> Iterator[Any]:
    """Open NVML for the time of the context.

    Raises:
        NotAnsweringError: the library is missing, or no driver answers it.
    """
    library = machine.library("pynvml")
    if library is None:
        raise NotAnsweringError(MISSING)
    try:
        library.nvmlInit()
    except Exception as error:
        raise NotAnsweringError(sentence(error)) from error
    try:
        yield library
    finally:
        with logged("NVML was not closed"):
            library.nvmlShutdown()


def sentence(error: Exception) -> str:
    """Return NVML's error as a sentence, with the fix if there is one."""
    fix = _FIXES.get(code_of(error) or 0)
    return f"NVIDIA's driver does not answer ({error})" + (f"; {fix}" if fix else "")


def code_of(error: Exception) -> int | None:
    """Return NVML's number of an error."""
    code = getattr(error, "value", None)
    return code if isinstance(code, int) else None


def driver_version(library: Any) -> str | None:
    """Return the driver's version, `575.64`."""
    with logged("NVML gives no driver version"):
        return _text(library.nvmlSystemGetDriverVersion())
    return None


def cards(library: Any) -> list[Card]:
    """Return all cards that NVML counts, also those that it cannot reach.

    Raises:
        NotAnsweringError: NVML cannot count them.
    """
    try:
        count = int(library.nvmlDeviceGetCount())
    except Exception as error:
        raise NotAnsweringError(sentence(error)) from error
    return [_card(library, index) for index in range(count)]


def _card(library: Any, index: int) -> Card:
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:
        card = Card(library, None, index=index)
        # A card that fell off the bus answers `GPU is lost` or, with other drivers, `Unknown Error`.
        if code_of(error) in (GPU_IS_LOST, RESET_REQUIRED, UNKNOWN) or "fallen off the bus" in str(error):
            card.lost = str(error)
        else:
            card.refused = sentence(error)
        return card
    card = Card(library, handle, index=index)
    pci = card.ask("nvmlDeviceGetPciInfo")
    card.pci = _address(getattr(pci, "busId", None))
    _describe(card)
    mode = card.ask("nvmlDeviceGetMigMode")
    card.in_mig_mode = bool(mode and mode[0] == 1)
    if card.in_mig_mode:
        card.instances = _instances(card)
    return card


def _describe(card: Card) -> None:
    card.uuid = _text(card.ask("nvmlDeviceGetUUID"))
    card.name = _text(card.ask("nvmlDeviceGetName"))
    capability = card.ask("nvmlDeviceGetCudaComputeCapability")
    if capability is not None and capability[0]:
        card.architecture = f"sm_{capability[0]}{capability[1]}"


def _instances(parent: Card) -> list[Card]:
    instances: list[Card] = []
    for place in range(parent.ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
        handle = parent.ask("nvmlDeviceGetMigDeviceHandleByIndex", args=(place,))
        if handle is None:  # a place that no instance is made on
            continue
        part = Card(parent.library, handle, index=len(instances), pci=parent.pci, parent=parent)
        _describe(part)
        part.architecture = part.architecture or parent.architecture
        part.name = part.name or _instance_name(part, parent)
        part.ids = part.ask("nvmlDeviceGetGpuInstanceId"), part.ask("nvmlDeviceGetComputeInstanceId")
        instances.append(part)
    return instances


def _instance_name(part: Card, parent: Card) -> str:
    """Return `… MIG 1g.5gb`, as NVML itself writes it if it can."""
    facts = part.ask("nvmlDeviceGetAttributes_v2", "nvmlDeviceGetAttributes")
    kind = str(part.index)
    if facts is not None:
        kind = f"{facts.gpuInstanceSliceCount}g.{math.ceil(facts.memorySizeMB / 1024)}gb"
    return f"{parent.name or 'NVIDIA GPU'} MIG {kind}"


def memory(card: Card, machine: Machine) -> tuple[int | None, int | None]:
    """Return a card's total and free bytes, each `None` if it is not known."""
    if card.integrated and card.lost is None:
        # NVML answers `Not Supported` or does not count what the kernel would give back
        # (https://nvidia.custhelp.com/app/answers/detail/a_id/5728): the kernel itself knows.
        total, free = host_memory(machine)
        if total is not None:
            return total, free
    answer = card.ask("nvmlDeviceGetMemoryInfo")
    total = positive(getattr(answer, "total", None))
    # Beside a total a free of 0 is a full card; without one the driver has filled in nothing.
    return total, int(answer.free) if answer is not None and total is not None else None


def find(library: Any, uuid: str | None, pci: str | None) -> Card | None:
    """Return the whole card with this UUID, or if there is none, with this address; never an instance.

    Raises:
        NotAnsweringError: NVML cannot list the cards.
    """
    for card in cards(library):
        if (card.uuid == uuid) if uuid is not None else (pci is not None and card.pci == pci):
            return card
    return None


def energy_joules(card: Card) -> float | None:
    """Return the energy of a whole card since the driver was loaded, of Volta and newer cards."""
    drawn = positive(card.ask("nvmlDeviceGetTotalEnergyConsumption"))
    return drawn / 1000 if drawn is not None else None


def pcie_link(card: Card) -> tuple[int | None, int | None]:
    """Return generation and lanes of a card's link to the host, each `None` if it is not known.

    NVML reports the best that card and slot can do together; the current speed falls when the card is idle.
    """
    whole = card.parent or card
    if card.integrated or any(chip in (whole.name or "") for chip in _COHERENT):
        return None, None
    generation = positive(whole.ask("nvmlDeviceGetMaxPcieLinkGeneration"))
    return generation, positive(whole.ask("nvmlDeviceGetMaxPcieLinkWidth"))


def reading(card: Card, memory_free_bytes: int | None, processes: bool = True) -> Reading:
    """Return the driver's reading of a card now.

    Temperature, clocks and fan of an instance are those of its card. The driver does not report the power of
    an instance.

    Args:
        processes: whether to ask who holds the card, which takes longer than all other queries.
    """
    whole = card.parent or card
    busy = getattr(card.ask("nvmlDeviceGetUtilizationRates"), "gpu", None)
    heat = whole.ask("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV", args=(0,))
    power = positive(card.ask("nvmlDeviceGetPowerUsage")) if card.parent is None else None
    fan = whole.ask("nvmlDeviceGetFanSpeed")
    limit = None
    if card.parent is None:
        limit = positive(card.ask("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit"))
    return Reading(
        memory_free_bytes=memory_free_bytes,
        utilisation=percent(busy),
        temperature_celsius=float(heat) if heat is not None else None,
        power_watts=power / 1000 if power is not None else None,
        power_limit_watts=limit / 1000 if limit is not None else None,
        clock_mhz=positive(whole.ask("nvmlDeviceGetClockInfo", args=(_SM_CLOCK,))),
        memory_clock_mhz=positive(whole.ask("nvmlDeviceGetClockInfo", args=(_MEMORY_CLOCK,))),
        fan=percent(fan),
        throttled=_throttled(whole),
        processes=_processes(card) if processes else None,
    )


def _throttled(card: Card) -> tuple[str, ...] | None:
    bits = card.ask("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    if bits is None:
        return None
    reasons = tuple(words for bit, words in _HELD_BACK if bits & bit)
    hardware = bits & (0x40 | 0x80)
    return reasons if hardware or not bits & _SLOWDOWN[0] else (*reasons, _SLOWDOWN[1])


def _processes(card: Card) -> tuple[Process, ...] | None:
    """Return the processes that hold the card; `None` if the driver does not report who computes on it."""
    kinds = {}
    for kind in ("Graphics", "Compute"):
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        kinds[kind] = card.ask(name, f"{name}_v3", f"{name}_v2")
    if kinds["Compute"] is None:
        return None
    by_pid: dict[int, Process] = {}
    for kind, processes in kinds.items():  # one that draws and computes counts as one that computes
        for process in processes or ():
            by_pid[process.pid] = Process(process.pid, _known(process.usedGpuMemory), kind == "Compute")
    return tuple(by_pid.values())


def _known(size: int | None) -> int | None:
    """Return a size, `None` if NVML does not know it and writes 2⁶⁴ − 1, or nothing."""
    return None if size is None or size >= 2**64 - 1 else positive(size)


def _address(bus_id: str | bytes | None) -> str | None:
    text = _text(bus_id) or ""
    return normalised(text) if _BUS_ID.fullmatch(text) else None


def _text(value: str | bytes | None) -> str | None:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text or None
