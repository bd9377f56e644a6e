"""NVIDIA cards: found by NVML without torch, driven by torch's `cuda` backend."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from hetexp.core.device import DeviceSpec
from hetexp.hardware.backends import nvml
from hetexp.hardware.backends.accelerator import CudaNamespaceBackend
from hetexp.hardware.backends.cuda_mask import MASK, Mask
from hetexp.hardware.backends.pci_names import chip
from hetexp.hardware.base import CardLostError, Counter, Gauge
from hetexp.hardware.detection.builds import TorchBuild
from hetexp.hardware.detection.detected import DetectedCard, Reading, Seen
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import PciCard
from hetexp.hardware.detection.probe import torch_sees


class CudaBackend(CudaNamespaceBackend):
    """Drives one NVIDIA card, or one MIG instance, the only one that its process sees."""

    name: ClassVar[str] = "cuda"
    platform: ClassVar[str] = "CUDA"
    vendor: ClassVar[str] = "nvidia"
    drivers = ("/proc/driver/nvidia/version", "/dev/dxg")
    wheel: ClassVar[str] = "cuda"
    native_collective: ClassVar[str | None] = "nccl"
    native_aborts: ClassVar[bool] = True

    @classmethod
    def cards(cls, machine: Machine, on_bus: Sequence[PciCard]) -> list[DetectedCard]:
        try:
            with nvml.opened(machine) as library:
                cards = _listed(library, machine, on_bus)
        except nvml.NotAnsweringError as problem:
            return _without_nvml(machine, on_bus, str(problem))
        return cards + _missing(on_bus, cards, machine, _NOT_LISTED)

    @classmethod
    def hide(cls, cards: Sequence[DetectedCard], machine: Machine) -> tuple[list[DetectedCard], list[str]]:
        value = machine.environ.get(MASK)
        if value is None or not cards:
            return list(cards), []
        visible, problems = Mask(value, cards, machine).visible()
        hidden_by = f"{MASK}={value}"
        marked = [
            card if place in visible else replace(card, hidden_by=hidden_by)
            for place, card in enumerate(cards)
        ]
        return marked, problems

    @classmethod
    def build_problem(cls, spec: DeviceSpec, build: TorchBuild) -> str | None:
        problem = super().build_problem(spec, build)
        if problem is None and (why := _without_code_for(spec.architecture, build)) is not None:
            owner = build.python or "this interpreter"
            problem = f"torch {build.version} of {owner} has no code for {spec.architecture}: {why}"
        return problem

    @classmethod
    def environment(cls, spec: DeviceSpec) -> dict[str, str]:
        mask = spec.mask or spec.uuid or str(spec.index)
        if mask.isdigit():
            # Only without a UUID. Our numbers follow the bus, CUDA's by default the cards' speed.
            return {MASK: mask, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return {MASK: mask}

    @contextmanager
    def energy_counter(self, machine: Machine) -> Iterator[Counter | None]:
        with ExitStack() as stack:
            try:
                library = stack.enter_context(nvml.opened(machine))
                card = nvml.find(library, self.spec.uuid, self.spec.pci)
            except nvml.NotAnsweringError:
                card = None
            yield partial(nvml.energy_joules, card) if card is not None else None

    @classmethod
    @contextmanager
    def gauges(cls, cards: Sequence[DetectedCard], machine: Machine) -> Iterator[list[Gauge | None]]:
        with ExitStack() as stack:
            try:
                library = stack.enter_context(nvml.opened(machine))
                parts = [part for card in nvml.cards(library) for part in (*card.instances, card)]
            except nvml.NotAnsweringError:
                parts = []
            matching = [next((part for part in parts if _is(part, card.spec)), None) for card in cards]
            yield [partial(_gauged, match, machine) if match is not None else None for match in matching]

    def _seen_uuid(self, module: Any) -> str | None:
        # CUDA runtimes differ in whether they report an instance's own UUID or its card's.
        return None if (self.spec.uuid or "").startswith("MIG-") else super()._seen_uuid(module)

    def computes_in(self, precision: str) -> bool | None:
        # By capability: torch computes in every precision on every card, maybe emulated or very slowly.
        major, minor = self._module().get_device_capability(0)
        native = native_precisions(f"sm_{major}{minor}")
        return precision in native if native is not None else super().computes_in(precision)


_NOT_LISTED = (
    "NVIDIA's driver does not list it; give it to this container (docker run --gpus all) if this is one, "
    "else see what the kernel says of it (sudo dmesg | grep -i nvrm)"
)


def _listed(library: Any, machine: Machine, on_bus: Sequence[PciCard]) -> list[DetectedCard]:
    reported = nvml.cards(library)
    driver = nvml.driver_version(library)
    _place(reported, on_bus)
    cards: list[DetectedCard] = []
    for card in reported:
        parts = [_detected(part, driver, machine, on_bus) for part in card.instances or [card]]
        lost = next((part.lost for part in parts if part.lost is not None), card.lost)
        cards += [replace(part, lost=lost) for part in parts]
    if any(card.lost is not None for card in cards):
        cards = [_without_number(card) for card in cards]
    return cards


def _place(cards: Sequence[nvml.Card], on_bus: Sequence[PciCard]) -> None:
    """Give addresses to the cards that have none from NVML, if as many addresses are left on the bus.

    NVML counts along the bus, so the cards without an address come in the same order.
    """
    used = {card.pci for card in cards}
    without = [card for card in cards if card.pci is None]
    left = [card.address for card in on_bus if card.driver == "nvidia" and card.address not in used]
    if len(without) == len(left):
        for card, address in zip(without, left, strict=True):
            for part in (card, *card.instances):
                part.pci = address


def _detected(
    card: nvml.Card, driver: str | None, machine: Machine, on_bus: Sequence[PciCard]
) -> DetectedCard:
    total, free = nvml.memory(card, machine)
    generation, lanes = nvml.pcie_link(card)
    reading = nvml.reading(card, free)
    model = chip("nvidia", next((bus.device_id for bus in on_bus if bus.address == card.pci), None))
    architecture = card.architecture or model.architecture
    spec = DeviceSpec(
        id=f"cuda:{card.index}",
        backend="cuda",
        index=card.index,
        name=card.name or model.name,
        vendor="nvidia",
        memory_bytes=total,
        uuid=card.uuid,
        driver=driver,
        pci=card.pci,
        pcie_generation=generation,
        pcie_lanes=lanes,
        architecture=architecture,
        # `integrated` stays False: an NVIDIA GPU that is part of the processor is the one to train on.
        unified_memory=card.integrated,
        precisions=native_precisions(architecture),
        mask=card.uuid or (str(card.index) if card.parent is None else None),
    )
    undriven = card.refused
    if card.in_mig_mode:
        undriven = (
            "it is in MIG mode and has no instance that could be used; make one (sudo nvidia-smi mig -i "
            f"{card.index} -cgi <profile> -C; nvidia-smi mig -lgip lists profiles) or leave the mode "
            f"(sudo nvidia-smi -i {card.index} -mig 0)"
        )
    elif spec.mask is None:
        undriven = "NVML does not report the instance's UUID, the only way to give it to a process"
    return DetectedCard(spec, reading, lost=card.lost, undriven=undriven)


def _is(card: nvml.Card, spec: DeviceSpec) -> bool:
    """Return whether a card or an instance is the device `spec`; a lost card may have no UUID."""
    if spec.uuid is not None:
        return card.uuid == spec.uuid
    return card.parent is None and spec.pci is not None and card.pci == spec.pci


def _gauged(card: nvml.Card, machine: Machine) -> Reading:
    _, free = nvml.memory(card, machine)
    reading = nvml.reading(card, free, processes=False)
    lost = card.lost or (card.parent.lost if card.parent is not None else None)
    if lost is not None:
        raise CardLostError(lost)
    return reading


def _without_number(card: DetectedCard) -> DetectedCard:
    """Refuse a card that has only a number, if a card is lost: CUDA may then count otherwise."""
    if card.spec.mask is None or not card.spec.mask.isdigit() or card.lost or card.undriven:
        return card
    return replace(
        card,
        undriven="NVML does not report its UUID, and beside a lost card its number is not certain; restart "
        "the machine",
    )


def _missing(
    on_bus: Sequence[PciCard], cards: Sequence[DetectedCard], machine: Machine, bound_but_missing: str
) -> list[DetectedCard]:
    """Return the cards of the bus that are not among `cards`.

    Args:
        bound_but_missing: why they are missing if NVIDIA's driver is bound to them.
    """
    listed = {card.spec.pci for card in cards}
    return [
        _undriven(card, len(cards) + place, machine, bound_but_missing)
        for place, card in enumerate(card for card in on_bus if card.address not in listed)
    ]


def _undriven(card: PciCard, index: int, machine: Machine, bound_but_missing: str) -> DetectedCard:
    model = chip("nvidia", card.device_id)
    spec = DeviceSpec(
        id=f"cuda:{index}",
        backend="cuda",
        index=index,
        name=model.name,
        vendor="nvidia",
        pci=card.address,
        architecture=model.architecture,
        precisions=native_precisions(model.architecture),
    )
    if card.driver == "nvidia":
        return DetectedCard(spec, undriven=bound_but_missing)
    if card.driver == "vfio-pci":
        why = (
            "vfio-pci keeps it for a virtual machine; to have it back, take it out of that machine and run: "
            f"sudo driverctl unset-override {card.address}"
        )
    elif card.driver is not None:
        why = (
            f"the driver {card.driver} is bound to it, with which CUDA does not work; install NVIDIA's "
            "driver and restart the machine"
        )
    elif machine.path("/proc/driver/nvidia/version").exists():
        why = "NVIDIA's driver is loaded but not bound to it; see why: sudo dmesg | grep -i nvrm"
    else:
        why = "NVIDIA's driver is not loaded; install it, or load it: sudo modprobe nvidia"
    return DetectedCard(spec, undriven=why)


def _without_nvml(machine: Machine, on_bus: Sequence[PciCard], why: str) -> list[DetectedCard]:
    """Return the cards that torch sees and those of the bus.

    Windows' subsystem for Linux has /dev/dxg and no card on the bus; a container may have the driver's device
    files without its libraries.
    """
    cards: list[DetectedCard] = []
    if any(machine.path(name).exists() for name in ("/dev/dxg", "/dev/nvidia0")):
        seen = torch_sees("cuda", machine)
        cards = [_seen(card, seen) for card in seen]
    return cards + _missing(on_bus, cards, machine, why)


def _seen(card: Seen, beside: Sequence[Seen]) -> DetectedCard:
    uuid = card.uuid
    if uuid is not None and not uuid.startswith(("GPU-", "MIG-")):
        uuid = f"GPU-{uuid}"  # torch leaves it out
    mask, undriven = uuid, None
    if uuid is None:
        along_bus = sorted(other.pci for other in beside if other.pci is not None)
        if len(beside) == 1:
            mask = "0"
        elif card.pci is not None and len(set(along_bus)) == len(beside):
            mask = str(along_bus.index(card.pci))
        else:
            undriven = (
                "neither its UUID nor its address is known, and without them no process can get it alone; "
                "install nvidia-ml-py and the driver's libraries, or a newer torch"
            )
    spec = DeviceSpec(
        id=f"cuda:{card.index}",
        backend="cuda",
        index=card.index,
        name=card.name,
        vendor="nvidia",
        memory_bytes=card.memory_bytes,
        uuid=uuid,
        pci=card.pci,
        architecture=card.architecture,
        unified_memory=card.integrated,
        precisions=native_precisions(card.architecture),
        mask=mask,
    )
    return DetectedCard(spec, undriven=undriven)


def native_precisions(architecture: str | None) -> tuple[str, ...] | None:
    """Return the native precisions of a card that have a useful rate, `None` if the card is not known.

    CUDA C++ Programming Guide, Throughput of Native Arithmetic Instructions: float16 from 5.3 on, but for 6.1
    only 2 a clock, against 128 of float32; bfloat16 and TF32 from 8.0 on, before which they are emulated.

    Args:
        architecture: `sm_86`.
    """
    capability = _capability(architecture)
    if capability is None:
        return None
    precisions = ["float64", "float32"]
    if capability >= 80:
        precisions += ["tf32", "bfloat16"]
    if capability >= 53 and capability != 61:
        precisions.append("float16")
    return tuple(precisions)


def _capability(architecture: str | None) -> int | None:
    numbers = re.fullmatch(r"sm_([0-9]+)[a-z]?", architecture or "")
    return int(numbers[1]) if numbers is not None else None


def _without_code_for(architecture: str | None, build: TorchBuild) -> str | None:
    """Return why a torch built for CUDA cannot compute on a card, `None` if it can or that is not known.

    Sources: for all builds, CUDA 13.0 release notes, Deprecated Architectures. For PyTorch's own wheels, by
    their version, the CUDA Support Matrix in its RELEASE.md (2.9 to 2.14) and the release notes of 2.8.
    Other builds hold the code that their builders chose.
    """
    capability = _capability(architecture)
    cuda = _numbers(build.cuda)
    if capability is None or cuda is None:
        return None
    if cuda >= (13,):
        return "CUDA 13 begins at sm_75; it needs a build for CUDA 12.6" if capability < 75 else None
    if not re.search(r"\+cu[0-9]+$", build.version or ""):
        return None
    if cuda < (12, 8):
        return "wheels for CUDA before 12.8 end at sm_90; it needs a newer one" if capability >= 100 else None
    release = _numbers(build.version) or (0,)
    least = 75 if release >= (2, 11) else 70 if release >= (2, 8) else 0
    if capability < least:
        return f"wheels of this release for CUDA {build.cuda} begin at sm_{least}; it needs one for CUDA 12.6"
    return None


def _numbers(version: str | None) -> tuple[int, ...] | None:
    """Return the first two numbers of a version."""
    parts = re.match(r"([0-9]+)\.([0-9]+)", version or "")
    return (int(parts[1]), int(parts[2])) if parts is not None else None
