"""NVIDIA cards as NVML tells them, half of it or nothing: no card is needed, and none is touched."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import (
    A100,
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GIB,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    RTX_3060,
    T4,
    UNINITIALIZED,
    UNKNOWN,
    VERSION_MISMATCH,
    FakeCard,
    FakeInstance,
    FakeNvml,
    cards_like,
    error,
    machine_with,
    put_file,
    put_on_bus,
)

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.backends.cuda import CudaBackend, native_precisions
from hetexp.hardware.detection import inventory as detection
from hetexp.hardware.detection.builds import TorchBuild
from hetexp.hardware.detection.detected import DetectedCard, Process, Reading, Seen
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import pci_cards

CARD = FakeCard()
MEMINFO = (
    "MemTotal:       127600748 kB\nMemFree:  1000 kB\nMemAvailable:   118566368 kB\nHugePages_Total: 0\n"
)


def listed(machine: Machine) -> list[DetectedCard]:
    return CudaBackend.cards(machine, pci_cards(machine))


def only(nvml: FakeNvml, root: Path) -> DetectedCard:
    (card,) = listed(machine_with(nvml, root))
    assert nvml.opened == 0
    return card


def test_everything_that_nvml_tells(tmp_path: Path) -> None:
    card = replace(
        CARD,
        compute=[(100, 3 * GIB), (101, None)],
        graphics=[(7, 50 * 2**20), (100, 3 * GIB)],
        reasons=0x1 | 0x4,
    )
    put_on_bus(tmp_path, "0000:01:00.0")
    assert only(FakeNvml([card]), tmp_path) == DetectedCard(
        DeviceSpec(
            id="cuda:0",
            backend="cuda",
            index=0,
            name="NVIDIA GeForce RTX 3090",
            vendor="nvidia",
            memory_bytes=24 * GIB,
            uuid=CARD.uuid,
            driver="575.64",
            pci="0000:01:00.0",
            pcie_generation=4,
            pcie_lanes=16,
            architecture="sm_86",
            precisions=("float64", "float32", "tf32", "bfloat16", "float16"),
            mask=CARD.uuid,
        ),
        Reading(
            memory_free_bytes=20 * GIB,
            utilisation=0.37,
            temperature_celsius=61.0,
            power_watts=215.5,
            power_limit_watts=350.0,
            clock_mhz=1980,
            memory_clock_mhz=9501,
            fan=0.43,
            throttled=("power cap",),
            processes=(Process(7, 50 * 2**20, False), Process(100, 3 * GIB), Process(101, None)),
        ),
    )


def test_older_libraries_return_bytes(tmp_path: Path) -> None:
    assert only(FakeNvml([CARD], as_bytes=True), tmp_path) == only(FakeNvml([CARD]), tmp_path)


def test_the_pci_link_is_not_told_where_memory_is_reached_otherwise(tmp_path: Path) -> None:
    spec = only(FakeNvml([replace(CARD, name="NVIDIA GH200 480GB", capability=(9, 0))]), tmp_path).spec
    assert (spec.pcie_generation, spec.pcie_lanes) == (None, None)


def test_cards_are_found_through_the_whole_detection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "accelerators", lambda: ("cuda",))
    build = TorchBuild("/envs/cuda/bin/python", version="2.13.0+cu130", cuda="13.0")
    inventory = detection.detect(machine_with(FakeNvml(cards_like(CARD, 2)), tmp_path), [build])
    assert [(card.spec.id, card.spec.number, card.state, card.python) for card in inventory.cards] == [
        ("cuda:0", 0, "available", build.python),
        ("cuda:1", 1, "available", build.python),
    ]


# One field fails, the others stay.

FIELDS: dict[str, tuple[str, ...]] = {
    "nvmlDeviceGetUUID": ("uuid", "mask"),
    "nvmlDeviceGetName": ("name",),
    "nvmlDeviceGetPciInfo": ("pci",),
    "nvmlDeviceGetMaxPcieLinkGeneration": ("pcie_generation",),
    "nvmlDeviceGetMaxPcieLinkWidth": ("pcie_lanes",),
    "nvmlDeviceGetCudaComputeCapability": ("architecture", "precisions"),
    "nvmlDeviceGetMemoryInfo": ("memory_bytes", "memory_free_bytes"),
    "nvmlDeviceGetUtilizationRates": ("utilisation",),
    "nvmlDeviceGetTemperature": ("temperature_celsius",),
    "nvmlDeviceGetPowerUsage": ("power_watts",),
    "nvmlDeviceGetEnforcedPowerLimit": ("power_limit_watts",),
    "nvmlDeviceGetClockInfo": ("clock_mhz", "memory_clock_mhz"),
    "nvmlDeviceGetFanSpeed": ("fan",),
    "nvmlDeviceGetCurrentClocksEventReasons": ("throttled",),
    "nvmlDeviceGetComputeRunningProcesses": ("processes",),
    "nvmlDeviceGetGraphicsRunningProcesses": ("processes",),
    "nvmlDeviceGetMigMode": (),
}
INSTEAD = {"name": "NVIDIA GPU", "mask": "0"}
FULL = replace(CARD, reasons=0x20, compute=[(5, GIB)], graphics=[(6, GIB)])


@pytest.mark.parametrize("query", FIELDS)
@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN, FUNCTION_NOT_FOUND, "lacks", "odd"])
def test_a_query_that_fails_costs_its_own_field(tmp_path: Path, query: str, code: int | str) -> None:
    if code == "lacks":
        nvml = FakeNvml([FULL], lacks=[query])
    else:
        raised = error(code) if isinstance(code, int) else OSError("an answer that the library cannot read")
        nvml = FakeNvml([replace(FULL, fails={query: raised})])
    card = only(nvml, tmp_path)
    whole = only(FakeNvml([FULL]), tmp_path)
    assert card.state == whole.state == "available"
    for field in (*DeviceSpec.__dataclass_fields__, *Reading.__dataclass_fields__):
        part = "spec" if field in DeviceSpec.__dataclass_fields__ else "reading"
        value, full = getattr(getattr(card, part), field), getattr(getattr(whole, part), field)
        if field not in FIELDS[query]:
            assert value == full, field
        elif query == "nvmlDeviceGetGraphicsRunningProcesses":
            assert value == (Process(5, GIB),)  # who computes is known all the same
        else:
            assert value == INSTEAD.get(field), field


@pytest.mark.parametrize(
    ("query", "older"),
    [
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit"),
        ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"),
        ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
        ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"),  # this one is newer
    ],
)
@pytest.mark.parametrize("knows", ["library", "driver"])
def test_other_generations_name_a_query_otherwise(tmp_path: Path, query: str, older: str, knows: str) -> None:
    full = only(FakeNvml([FULL]), tmp_path)
    nvml = FakeNvml([FULL])
    setattr(nvml, older, getattr(nvml, query))
    if knows == "library":
        delattr(nvml, query)
    else:

        def unknown(*_: object) -> None:
            raise error(FUNCTION_NOT_FOUND)

        setattr(nvml, query, unknown)
    assert only(nvml, tmp_path) == full


def test_zeros_that_a_driver_fills_in_are_not_known(tmp_path: Path) -> None:
    card = replace(CARD, memory=(0, 0), power=0, power_limit=0, compute=[(5, 0), (6, 2**64 - 1)])
    found = only(FakeNvml([card]), tmp_path)
    assert found.spec.memory_bytes is None
    assert found.reading.memory_free_bytes is None
    assert (found.reading.power_watts, found.reading.power_limit_watts) == (None, None)
    assert found.reading.processes == (Process(5, None), Process(6, None))
    assert found.state == "available"


def test_true_zeros_stay(tmp_path: Path) -> None:
    found = only(FakeNvml([replace(CARD, memory=(GIB, 0), utilisation=0)]), tmp_path)
    assert found.reading.memory_free_bytes == 0
    assert found.reading.utilisation == 0.0
    assert found.reading.processes == ()


def test_a_utilisation_beyond_all_is_not_known(tmp_path: Path) -> None:
    assert only(FakeNvml([replace(CARD, utilisation=4_294_967_295)]), tmp_path).reading.utilisation is None


def test_the_driver_version_fails(tmp_path: Path) -> None:
    nvml = FakeNvml([CARD], fails={"nvmlSystemGetDriverVersion": error(UNKNOWN)})
    assert only(nvml, tmp_path).spec.driver is None


@pytest.mark.parametrize("bus_id", ["", "N/A", "????????:01:00.0", "0"])
def test_an_address_that_is_none(tmp_path: Path, bus_id: str) -> None:
    assert only(FakeNvml([replace(CARD, bus_id=bus_id)]), tmp_path).spec.pci is None


def test_an_address_that_nvml_does_not_tell_is_the_one_left_on_the_bus(tmp_path: Path) -> None:
    cards = cards_like(CARD, 3)
    for place, card in enumerate(cards):
        put_on_bus(tmp_path, f"0000:0{place + 1}:00.0")
        if place != 1:
            cards[place] = replace(card, fails={"nvmlDeviceGetPciInfo": error(NOT_SUPPORTED)})
    found = listed(machine_with(FakeNvml(cards), tmp_path))
    assert [card.spec.pci for card in found] == ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"]


def test_an_address_is_not_guessed(tmp_path: Path) -> None:
    put_on_bus(tmp_path, "0000:01:00.0", driver="vfio-pci")
    put_on_bus(tmp_path, "0000:02:00.0")
    nvml = FakeNvml([replace(CARD, fails={"nvmlDeviceGetPciInfo": error(NOT_SUPPORTED)})])
    first, second = listed(machine_with(nvml, tmp_path))
    assert (first.spec.pci, second.spec.pci) == ("0000:02:00.0", "0000:01:00.0")
    put_on_bus(tmp_path, "0000:03:00.0")  # now it could be either
    assert listed(machine_with(nvml, tmp_path))[0].spec.pci is None


def test_a_compute_capability_that_is_none(tmp_path: Path) -> None:
    assert only(FakeNvml([replace(CARD, capability=(0, 0))]), tmp_path).spec.architecture is None


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x000, ()),
        (0x001, ()),  # idle
        (0x002 | 0x010 | 0x100, ()),  # what a person set
        (0x004, ("power cap",)),
        (0x020, ("too hot",)),
        (0x008 | 0x040, ("far too hot",)),
        (0x008 | 0x080, ("power brake",)),
        (0x008, ("hardware slowdown",)),
        (0x004 | 0x020, ("power cap", "too hot")),
    ],
)
def test_only_what_holds_a_card_back_is_told(tmp_path: Path, bits: int, words: tuple[str, ...]) -> None:
    assert only(FakeNvml([replace(CARD, reasons=bits)]), tmp_path).reading.throttled == words


# NVML does not answer at all.


def bus_of_two(root: Path, driver: str | None = "nvidia") -> None:
    put_on_bus(root, "0000:01:00.0", driver=driver)
    put_on_bus(root, "0000:02:00.0", T4, driver=driver)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (LIBRARY_NOT_FOUND, ("Library Not Found", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")),
        (DRIVER_NOT_LOADED, ("Driver Not Loaded", "sudo modprobe nvidia")),
        (UNINITIALIZED, ("Uninitialized",)),
        (VERSION_MISMATCH, ("mismatch", "restart the machine")),
        (NO_PERMISSION, ("Insufficient Permissions", "/dev/nvidiactl")),
        (UNKNOWN, ("Unknown Error",)),
        (None, ("pip install nvidia-ml-py",)),
    ],
)
@pytest.mark.parametrize("call", ["init", "count"])
def test_without_nvml_the_bus_is_listed(
    tmp_path: Path, code: int | None, words: tuple[str, ...], call: str
) -> None:
    bus_of_two(tmp_path)
    nvml = None
    if code is not None:
        nvml = (
            FakeNvml([CARD], init=error(code))
            if call == "init"
            else FakeNvml([CARD], fails={"nvmlDeviceGetCount": error(code)})
        )
    found = listed(machine_with(nvml, tmp_path))
    assert [(card.spec.name, card.spec.pci, card.spec.architecture) for card in found] == [
        ("NVIDIA GeForce RTX 3090", "0000:01:00.0", "sm_86"),
        ("NVIDIA Tesla T4", "0000:02:00.0", "sm_75"),
    ]
    for card in found:
        assert card.state == "unusable"
        assert card.reading == Reading()
        assert card.spec.memory_bytes is None
        for word in words:
            assert word in (card.why_not or "")
    assert nvml is None or nvml.opened == 0


def test_neither_driver_nor_card(tmp_path: Path) -> None:
    asked: list[str] = []
    assert listed(machine_with(FakeNvml(init=error(LIBRARY_NOT_FOUND)), tmp_path, asked=asked)) == []
    assert asked == []
    assert listed(machine_with(FakeNvml(), tmp_path)) == []


@pytest.mark.parametrize(
    ("driver", "loaded", "words"),
    [
        ("nouveau", False, ("nouveau", "install NVIDIA's driver")),
        ("vfio-pci", True, ("virtual machine", "driverctl unset-override 0000:02:00.0")),
        (None, False, ("not loaded", "sudo modprobe nvidia")),
        (None, True, ("not bound", "dmesg")),
        ("nvidia", True, ("does not list it", "docker run --gpus all")),
    ],
)
def test_a_card_that_nvml_does_not_list_is_listed(
    tmp_path: Path, driver: str | None, loaded: bool, words: tuple[str, ...]
) -> None:
    put_on_bus(tmp_path, "0000:01:00.0")
    put_on_bus(tmp_path, "0000:02:00.0", T4, driver=driver)
    if loaded:
        put_file(tmp_path, "/proc/driver/nvidia/version", "NVRM version")
    first, second = listed(machine_with(FakeNvml([CARD]), tmp_path))
    assert first.state == "available"
    assert second.spec.name == "NVIDIA Tesla T4"
    assert second.spec.pci == "0000:02:00.0"
    assert second.spec.index != first.spec.index
    for word in words:
        assert word in (second.undriven or "")


def test_a_chip_that_no_table_knows(tmp_path: Path) -> None:
    put_on_bus(tmp_path, "0000:01:00.0", 0xFFFE, driver=None)
    (card,) = listed(machine_with(None, tmp_path))
    assert card.spec.name == "NVIDIA GPU 0xfffe"
    assert card.spec.architecture is None
    assert card.spec.precisions is None


# Lost cards.


@pytest.mark.parametrize("code", [GPU_IS_LOST, RESET_REQUIRED, UNKNOWN])
@pytest.mark.parametrize("on_bus", [True, False])
def test_a_card_lost_at_its_handle_leaves_the_others(tmp_path: Path, code: int, on_bus: bool) -> None:
    cards = cards_like(CARD, 3)
    if on_bus:
        for place, chip in enumerate((T4, RTX_3060, T4)):
            put_on_bus(tmp_path, f"0000:0{place + 1}:00.0", chip)
    cards[1] = replace(cards[1], fails={"handle": error(code)})
    nvml = FakeNvml(cards)
    found = listed(machine_with(nvml, tmp_path))
    assert nvml.opened == 0
    lost = [card for card in found if card.state == "lost"]
    healthy = [card for card in found if card.state == "available"]
    assert [card.spec.uuid for card in healthy] == [cards[0].uuid, cards[2].uuid]
    assert len(lost) == 1
    assert str(error(code)) in (lost[0].lost or "")
    assert lost[0].reading == Reading(processes=None)
    assert lost[0].spec.index == 1
    expected = ("0000:02:00.0", "NVIDIA GeForce RTX 3060") if on_bus else (None, "NVIDIA GPU")
    assert (lost[0].spec.pci, lost[0].spec.name) == expected


@pytest.mark.parametrize("query", FIELDS)
def test_a_card_lost_in_any_query(tmp_path: Path, query: str) -> None:
    cards = cards_like(CARD, 2)
    for place in range(2):
        put_on_bus(tmp_path, f"0000:0{place + 1}:00.0")
    cards[0] = replace(cards[0], fails={query: error(GPU_IS_LOST)})
    first, second = listed(machine_with(FakeNvml(cards), tmp_path))
    assert first.state == "lost"
    assert first.lost == "GPU is lost"
    assert first.spec.pci == "0000:01:00.0"
    assert first.spec.name == "NVIDIA GeForce RTX 3090"
    assert second.state == "available"


def test_a_driver_that_says_fallen_off_the_bus(tmp_path: Path) -> None:
    gone = RuntimeError("GPU 0000:01:00.0 has fallen off the bus")
    cards = cards_like(CARD, 2)
    for fails in ({"handle": gone}, {"*": gone}):
        cards[0] = replace(cards[0], fails=fails)
        first, second = listed(machine_with(FakeNvml(cards), tmp_path))
        assert (first.state, second.state) == ("lost", "available")
        assert "fallen off the bus" in (first.why_not or "")


def test_a_lost_card_is_asked_nothing_more(tmp_path: Path) -> None:
    nvml = FakeNvml([replace(CARD, fails={"*": error(GPU_IS_LOST)})])
    assert only(nvml, tmp_path).state == "lost"
    assert nvml.asked == ["nvmlDeviceGetPciInfo"]


def test_a_card_that_may_not_be_opened(tmp_path: Path) -> None:
    first, second = cards_like(CARD, 2)
    nvml = FakeNvml([replace(first, fails={"handle": error(NO_PERMISSION)}), second])
    refused, fine = listed(machine_with(nvml, tmp_path))
    assert refused.state == "unusable"
    assert "Insufficient Permissions" in (refused.why_not or "")
    assert fine.state == "available"


def test_without_a_uuid_the_number_on_the_bus_has_to_do(tmp_path: Path) -> None:
    first, second = cards_like(CARD, 2)
    second = replace(second, fails={"nvmlDeviceGetUUID": error(NOT_SUPPORTED)})
    found = listed(machine_with(FakeNvml([first, second]), tmp_path))
    assert CudaBackend.environment(found[0].spec) == {"CUDA_VISIBLE_DEVICES": first.uuid}
    assert CudaBackend.environment(found[1].spec) == {
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    lost = replace(first, fails={"*": error(GPU_IS_LOST)})
    found = listed(machine_with(FakeNvml([lost, second]), tmp_path))
    assert found[1].state == "unusable"  # CUDA may count it 0 now
    assert "UUID" in (found[1].why_not or "")


# MIG.

ONE = FakeInstance()
TWO = FakeInstance(
    uuid="MIG-99999999-2222-3333-4444-555555555555", name=None, memory=(20 * GIB, GIB), slices=3, ids=(1, 0)
)
SPLIT = FakeCard(
    name="NVIDIA A100-SXM4-40GB",
    capability=(8, 0),
    memory=(40 * GIB, 1),
    compute=[(1, 1), (9, 9)],
    instances=(ONE, None, replace(TWO, compute=[(9, 8 * GIB)])),
    reasons=0x20,
    fails={"nvmlDeviceGetUtilizationRates": error(NOT_SUPPORTED)},
)


def test_instances_stand_in_place_of_their_card(tmp_path: Path) -> None:
    put_on_bus(tmp_path, "0000:01:00.0", A100)
    other = replace(CARD, uuid="GPU-bbbb", bus_id="00000000:02:00.0")
    nvml = FakeNvml([SPLIT, other])
    first, second, third = listed(machine_with(nvml, tmp_path))
    assert nvml.opened == 0
    assert (first.spec.name, second.spec.name) == (
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",  # the driver did not tell it
    )
    assert (first.spec.memory_bytes, first.reading.memory_free_bytes) == (5 * GIB, 4 * GIB)
    assert (second.spec.memory_bytes, second.reading.memory_free_bytes) == (20 * GIB, GIB)
    for card, instance in ((first, ONE), (second, TWO)):
        assert card.state == "available"
        assert card.spec.uuid == card.spec.mask == instance.uuid
        assert card.spec.pci == "0000:01:00.0"
        assert (card.spec.pcie_generation, card.spec.pcie_lanes) == (4, 16)  # the card's
        assert card.spec.architecture == "sm_80"
        assert card.spec.precisions is not None
        assert card.reading.temperature_celsius == 61
        assert card.reading.throttled == ("too hot",)
        assert card.reading.power_watts is None  # the whole card's is not this part's
        assert card.reading.power_limit_watts is None
        assert card.reading.utilisation is None
    assert first.reading.processes == ()
    assert second.reading.processes == (Process(9, 8 * GIB),)
    assert third.spec.uuid == "GPU-bbbb"
    assert [card.spec.id for card in detection.numbered([third, first, second])] == [
        "cuda:0",
        "cuda:1",
        "cuda:2",
    ]
    assert detection.numbered([third, second, first])[0].spec.uuid == ONE.uuid


def test_instances_of_a_card_whose_address_nvml_does_not_tell(tmp_path: Path) -> None:
    put_on_bus(tmp_path, "0000:01:00.0", A100)
    split = replace(SPLIT, fails={"nvmlDeviceGetPciInfo": error(NOT_SUPPORTED)})
    found = listed(machine_with(FakeNvml([split]), tmp_path))
    assert [card.spec.pci for card in found] == ["0000:01:00.0", "0000:01:00.0"]


@pytest.mark.parametrize("instances", [(), (None, None)])
def test_mig_mode_without_instances(tmp_path: Path, instances: tuple[None, ...]) -> None:
    card = only(FakeNvml([replace(SPLIT, instances=instances)]), tmp_path)
    assert card.state == "unusable"
    assert card.spec.name == "NVIDIA A100-SXM4-40GB"
    assert "nvidia-smi mig -i 0 -cgi" in (card.undriven or "")
    assert "-mig 0" in (card.undriven or "")


@pytest.mark.parametrize("query", ["nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo"])
def test_a_lost_card_loses_its_instances(tmp_path: Path, query: str) -> None:
    for instances in ((replace(ONE, fails={query: error(GPU_IS_LOST)}), TWO), (ONE, TWO)):
        fails = {"nvmlDeviceGetTemperature": error(GPU_IS_LOST)} if instances[0] is ONE else {}
        split = replace(SPLIT, instances=instances, fails=fails)
        found = listed(machine_with(FakeNvml([split]), tmp_path))
        assert [card.state for card in found] == ["lost", "lost"]


def test_a_library_that_knows_no_mig(tmp_path: Path) -> None:
    nvml = FakeNvml([SPLIT], lacks=["nvmlDeviceGetMigMode"])
    assert only(nvml, tmp_path).spec.name == SPLIT.name


def test_an_instance_that_no_mask_could_name(tmp_path: Path) -> None:
    instance = replace(ONE, fails={"nvmlDeviceGetUUID": error(NOT_SUPPORTED)})
    card = only(FakeNvml([replace(SPLIT, instances=(instance,))]), tmp_path)
    assert card.state == "unusable"
    assert "UUID" in (card.why_not or "")


# Memory that is the host's.


@pytest.mark.parametrize(
    ("name", "capability", "fails"),
    [
        ("NVIDIA GB10", (12, 1), error(NOT_SUPPORTED)),
        ("NVIDIA GB10", (12, 1), None),  # some drivers answer, and leave out what the kernel would free
        ("Orin (nvgpu)", (8, 7), error(NOT_SUPPORTED)),
        ("NVIDIA-GB10", None, error(NOT_SUPPORTED)),
    ],
)
def test_unified_memory_is_told_by_the_kernel(
    tmp_path: Path, name: str, capability: tuple[int, int] | None, fails: Exception | None
) -> None:
    put_file(tmp_path, "/proc/meminfo", MEMINFO)
    broken: dict[str, Exception] = {} if fails is None else {"nvmlDeviceGetMemoryInfo": fails}
    if capability is None:
        broken["nvmlDeviceGetCudaComputeCapability"] = error(UNKNOWN)
    card = only(FakeNvml([replace(CARD, name=name, capability=capability or (0, 0), fails=broken)]), tmp_path)
    assert card.spec.unified_memory
    assert not card.spec.integrated  # it is the card to train on
    assert card.spec.memory_bytes == 127600748 * 1024
    assert card.reading.memory_free_bytes == 118566368 * 1024
    assert card.state == "available"


def test_unified_memory_that_nobody_tells(tmp_path: Path) -> None:
    fails = {"nvmlDeviceGetMemoryInfo": error(NOT_SUPPORTED)}
    card = only(FakeNvml([replace(CARD, name="NVIDIA GB10", capability=(12, 1), fails=fails)]), tmp_path)
    assert card.spec.unified_memory
    assert card.spec.memory_bytes is None
    assert card.reading.memory_free_bytes is None


def test_a_card_of_its_own_never_has_the_hosts_memory(tmp_path: Path) -> None:
    put_file(tmp_path, "/proc/meminfo", MEMINFO)
    card = only(FakeNvml([replace(CARD, fails={"nvmlDeviceGetMemoryInfo": error(NOT_SUPPORTED)})]), tmp_path)
    assert not card.spec.unified_memory
    assert card.spec.memory_bytes is None


# Windows' subsystem for Linux, and containers with device files but no NVML.

SEEN = Seen(
    index=0,
    name="NVIDIA GeForce RTX 3070",
    memory_bytes=8 * GIB,
    uuid="12345678-0000-0000-0000-000000000000",
    architecture="sm_86",
)


@pytest.mark.parametrize("device", ["/dev/dxg", "/dev/nvidia0"])
@pytest.mark.parametrize("nvml", [None, FakeNvml(init=error(LIBRARY_NOT_FOUND))])
def test_torch_is_asked_where_nvml_is_not_at_hand(tmp_path: Path, device: str, nvml: FakeNvml | None) -> None:
    put_file(tmp_path, device)
    asked: list[str] = []
    (card,) = listed(machine_with(nvml, tmp_path, sees=[SEEN], asked=asked))
    assert asked == ["cuda"]
    assert card.state == "available"
    assert card.spec.name == SEEN.name
    assert card.spec.memory_bytes == 8 * GIB
    assert card.spec.uuid == card.spec.mask == f"GPU-{SEEN.uuid}"
    assert card.spec.precisions == ("float64", "float32", "tf32", "bfloat16", "float16")
    assert card.reading == Reading()


def test_nvml_in_windows_subsystem_is_believed(tmp_path: Path) -> None:
    put_file(tmp_path, "/dev/dxg")
    asked: list[str] = []
    fails = {name: error(NOT_SUPPORTED) for name in FIELDS if "Processes" in name or "Utilization" in name}
    (card,) = listed(machine_with(FakeNvml([replace(CARD, fails=fails)]), tmp_path, asked=asked))
    assert asked == []
    assert (card.state, card.reading.utilisation, card.reading.processes) == ("available", None, None)


def test_another_vendors_card_in_windows_subsystem(tmp_path: Path) -> None:
    put_file(tmp_path, "/dev/dxg")
    assert listed(machine_with(FakeNvml(init=error(LIBRARY_NOT_FOUND)), tmp_path)) == []


def test_what_torch_sees_is_completed_from_the_bus(tmp_path: Path) -> None:
    put_file(tmp_path, "/dev/nvidia0")
    bus_of_two(tmp_path)
    seen = replace(SEEN, pci="0000:02:00.0")
    first, second = listed(machine_with(None, tmp_path, sees=[seen]))
    assert (first.spec.pci, first.state) == ("0000:02:00.0", "available")
    assert (second.spec.pci, second.state) == ("0000:01:00.0", "unusable")
    assert "nvidia-ml-py" in (second.why_not or "")


def test_what_an_old_torch_sees_without_uuids(tmp_path: Path) -> None:
    put_file(tmp_path, "/dev/dxg")
    bare = replace(SEEN, uuid=None)
    (card,) = listed(machine_with(None, tmp_path, sees=[bare]))
    assert card.spec.mask == "0"
    two = [replace(bare, pci="0000:02:00.0"), replace(bare, index=1, pci="0000:01:00.0")]
    masks = [card.spec.mask for card in listed(machine_with(None, tmp_path, sees=two))]
    assert masks == ["1", "0"]  # along the bus, whatever CUDA's order
    for card in listed(machine_with(None, tmp_path, sees=[bare, replace(bare, index=1)])):
        assert card.state == "unusable"
        assert "UUID" in (card.why_not or "")


# What torch and the rank need.


@pytest.mark.parametrize(
    ("architecture", "precisions"),
    [
        ("sm_52", ("float64", "float32")),
        ("sm_53", ("float64", "float32", "float16")),
        ("sm_60", ("float64", "float32", "float16")),
        ("sm_61", ("float64", "float32")),  # float16 at 1/64 of the rate
        ("sm_70", ("float64", "float32", "float16")),
        ("sm_75", ("float64", "float32", "float16")),  # bfloat16 is emulated
        ("sm_80", ("float64", "float32", "tf32", "bfloat16", "float16")),
        ("sm_90a", ("float64", "float32", "tf32", "bfloat16", "float16")),
        ("sm_121", ("float64", "float32", "tf32", "bfloat16", "float16")),
        ("gfx1100", None),
        (None, None),
    ],
)
def test_native_precisions(architecture: str | None, precisions: tuple[str, ...] | None) -> None:
    assert native_precisions(architecture) == precisions


def spec_of(architecture: str | None = "sm_86") -> DeviceSpec:
    return DeviceSpec("cuda:0", "cuda", 0, "card", "nvidia", uuid="GPU-1", architecture=architecture)


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (TorchBuild(None, "2.13.0+cu130", cuda="13.0"), None),
        (TorchBuild(None, "2.13.0+cpu"), "torch 2.13.0+cpu of this interpreter is not built for CUDA"),
        (TorchBuild("/p", "2.13.0+rocm7.1", hip="7.1"), "torch 2.13.0+rocm7.1 of /p is not built for CUDA"),
        (TorchBuild("/p", "2.13.0+xpu", xpu="20250302"), "torch 2.13.0+xpu of /p is not built for CUDA"),
        (TorchBuild("/p", problem="it has no torch"), "/p cannot drive it: it has no torch"),
    ],
)
def test_builds_that_do_not_drive_it(build: TorchBuild, problem: str | None) -> None:
    assert CudaBackend.build_problem(spec_of(), build) == problem


@pytest.mark.parametrize(
    ("architecture", "version", "cuda", "begins"),
    [
        ("sm_70", "2.13.0+cu130", "13.0", "CUDA 13 begins at sm_75"),
        ("sm_70", "2.13.0a0+git1234", "13.0", "CUDA 13 begins at sm_75"),  # no build can
        ("sm_75", "2.13.0+cu130", "13.0", None),
        ("sm_61", "2.8.0+cu128", "12.8", "begin at sm_70"),
        ("sm_70", "2.9.0+cu128", "12.8", None),
        ("sm_70", "2.11.0+cu128", "12.8", "begin at sm_75"),
        ("sm_61", "2.7.1+cu128", "12.8", None),
        ("sm_61", "2.13.0+cu126", "12.6", None),
        ("sm_61", "2.8.0", "12.8", None),  # built by others, for what they chose
        ("sm_120", "2.7.1+cu126", "12.6", "end at sm_90"),
        ("sm_120", "2.7.1+cu128", "12.8", None),
        ("sm_90", "2.7.1+cu126", "12.6", None),
        (None, "2.13.0+cu130", "13.0", None),
        ("sm_70", "strange", "strange", None),
    ],
)
def test_builds_without_code_for_a_card(
    architecture: str | None, version: str, cuda: str, begins: str | None
) -> None:
    problem = CudaBackend.build_problem(spec_of(architecture), TorchBuild(None, version, cuda=cuda))
    if begins is None:
        assert problem is None
    else:
        assert f"torch {version} of this interpreter has no code for {architecture}: " in (problem or "")
        assert begins in (problem or "")


def test_a_rank_sees_its_card_by_uuid() -> None:
    assert CudaBackend.environment(spec_of()) == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    instance = replace(spec_of(), uuid=ONE.uuid, mask=ONE.uuid)
    assert CudaBackend.environment(instance) == {"CUDA_VISIBLE_DEVICES": ONE.uuid}


def test_a_cpu_rank_sees_no_card() -> None:
    assert CpuBackend.environment(CpuBackend.describe(0))["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("capability", "precision", "native"),
    [((7, 5), "bfloat16", False), ((8, 6), "bfloat16", True), ((6, 1), "float16", False)],
)
def test_precisions_are_those_of_the_chip_in_hand(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str, native: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    # Whatever the plan believed.
    assert CudaBackend(spec_of("sm_90")).computes_in(precision) is native


class OneCard:
    """`torch.cuda` with one card."""

    def __init__(self, uuid: str, count: int = 1) -> None:
        self.uuid = uuid
        self.count = count
        self.current: int | None = None

    def is_available(self) -> bool:
        return True

    def set_device(self, index: int) -> None:
        self.current = index

    def device_count(self) -> int:
        return self.count

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=self.uuid)


@pytest.mark.parametrize(
    ("wanted", "seen", "count", "driven", "refusal"),
    [
        (CARD.uuid, CARD.uuid[4:], 1, 1, None),
        (CARD.uuid, "ffff0000-0000-0000-0000-000000000000", 1, 1, "torch sees another card"),
        (CARD.uuid, CARD.uuid[4:], 2, 1, "must be the only card"),
        ("MIG-1111", CARD.uuid[4:], 1, 1, None),  # its card's UUID, or its own
        ("MIG-1111", CARD.uuid[4:], 2, 1, "must be the only card"),
        (CARD.uuid, CARD.uuid[4:], 2, 2, None),
        (CARD.uuid, CARD.uuid[4:], 1, 2, "must be one of 2 cards"),
    ],
)
def test_the_rank_trains_on_the_card_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch, wanted: str, seen: str, count: int, driven: int, refusal: str | None
) -> None:
    import torch

    one = OneCard(seen, count)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: one)
    backend = CudaBackend(replace(spec_of(), uuid=wanted, mask=wanted))
    backend.num_visible = driven
    if refusal is not None:
        with pytest.raises(SetupError, match=refusal):
            backend.torch_device()
        return
    switches: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = True
        assert str(backend.torch_device()) == "cuda:0"
        assert one.current == 0
        assert not any(switch.allow_tf32 for switch in switches)  # float32 means float32
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


@pytest.mark.parametrize("rocm", [False, True])
def test_a_torch_that_is_not_built_for_it_says_so(monkeypatch: pytest.MonkeyPatch, rocm: bool) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.1" if rocm else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: rocm)
    with pytest.raises(SetupError, match=r"cuda:0 \(card\) cannot be driven by torch .*hetexp env create"):
        CudaBackend(spec_of()).torch_device()


def test_listing_cards_imports_no_torch() -> None:
    code = (
        "import sys; from hetexp.hardware.backends.cuda import CudaBackend; "
        "from hetexp.hardware.detection.machine import Machine; "
        "from hetexp.hardware.detection.pci import pci_cards; "
        "m = Machine(torch_sees=lambda kind: []); "
        "CudaBackend.hide(CudaBackend.cards(m, pci_cards(m)), m); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
