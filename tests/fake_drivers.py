"""Recorded machines with cards of AMD, Intel and Apple: the kernel's files, the vendors' libraries, commands.

The files are laid out as Linux lays them out below `/sys`, `/proc` and `/dev`; the libraries have the
functions that hetexp asks, with the library's own types and failures.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hetexp.hardware.detection.detected import Seen
from hetexp.hardware.detection.machine import Machine

GIB = 2**30
VENDOR_IDS = {"nvidia": 0x10DE, "amd": 0x1002, "intel": 0x8086}


@dataclass
class FakeCard:
    """A card as the kernel shows it; `None` leaves a file out."""

    address: str
    vendor: str
    device_id: int
    driver: str | None
    files: dict[str, object] = field(default_factory=dict)
    """More files of its PCI folder, name → content."""
    sensors: dict[str, object] = field(default_factory=dict)
    """Files of its hwmon folder."""
    drm_files: dict[str, object] = field(default_factory=dict)
    """Files of `drm/cardN`."""
    pci_class: str = "0x030000"
    has_render_node: bool = True
    answers: bool = True
    """Whether it answers on the bus."""
    gfx: int | None = None
    """KFD's number of the architecture, 110000 for gfx1100; `None`: not in KFD's list."""
    unique_id: int = 0


def amd(
    address: str,
    device_id: int,
    gfx: int | None,
    *,
    vram: int | None = 0,
    gtt: int | None = 32 * GIB,
    unique_id: int = 0,
    driver: str | None = "amdgpu",
    **more: Any,
) -> FakeCard:
    """Return an AMD card; a size of `None` leaves its files out."""
    files: dict[str, object] = {"gpu_busy_percent": 7} if driver == "amdgpu" else {}
    for pool, size in (("vram", vram), ("gtt", gtt)):
        if size is not None and driver == "amdgpu":
            files |= {f"mem_info_{pool}_total": size, f"mem_info_{pool}_used": size // 8}
    sensors: dict[str, object] = {
        "temp1_input": 51000,
        "power1_average": 34_000_000,
        "power1_cap": 327_000_000,
    }
    card = FakeCard(address, "amd", device_id, driver, files, sensors if driver else {}, gfx=gfx)
    card.unique_id = unique_id
    for name, value in more.items():
        setattr(card, name, value)
    return card


def intel(
    address: str, device_id: int, *, driver: str | None = "i915", lmem: int | None = None, **more: Any
) -> FakeCard:
    """Return an Intel card; `lmem` is its own memory as i915 tells it."""
    drm = {"lmem_total_bytes": lmem} if lmem is not None else {}
    card = FakeCard(address, "intel", device_id, driver, drm_files=dict(drm))
    for name, value in more.items():
        setattr(card, name, value)
    return card


RX_7900_XTX = amd("0000:03:00.0", 0x744C, 110000, vram=24 * GIB, unique_id=0x61AD34E0F1C2B3A4)
RAPHAEL = amd("0000:10:00.0", 0x164E, 100306, vram=GIB // 2, gtt=15 * GIB)
"""The GPU in a Ryzen 7000; sits behind the discrete card on the bus."""
STRIX_HALO = amd("0000:c5:00.0", 0x1586, 110501, vram=GIB // 2, gtt=96 * GIB)
RX_6600 = amd("0000:2d:00.0", 0x73FF, 100302, vram=8 * GIB, unique_id=0xBEEF)
ARC_A770 = intel("0000:03:00.0", 0x56A0, lmem=16 * GIB)
ARC_A380 = intel("0000:07:00.0", 0x56A5, lmem=6 * GIB)
ARC_B580 = intel("0000:04:00.0", 0xE20B, driver="xe")
UHD_770 = intel("0000:00:02.0", 0xA780)
UHD_630 = intel("0000:00:02.0", 0x3E98)


def recorded_machine(
    tmp_path: Path,
    *cards: FakeCard,
    kfd: Sequence[FakeCard] | None = None,
    environ: Mapping[str, str] | None = None,
    platform: str = "linux",
    libraries: Mapping[str, Any] | None = None,
    commands: Mapping[str, str] | None = None,
    denied: Iterable[str] = (),
    absent: Iterable[str] = (),
    host_bytes: int = 64 * GIB,
    seen: Sequence[Seen] = (),
) -> Machine:
    """Write the kernel's files of a machine with these cards below `tmp_path` and return it.

    Args:
        kfd: AMD cards in ROCm's order; those with a `gfx` in the order given, by default.
        libraries: name → module, or the exception that its import raises.
        commands: command line → what it prints.
        denied: device files that may not be opened.
        absent: device files that are not there.
        seen: devices that torch sees.
    """
    for number, card in enumerate(cards):
        _write_card(tmp_path, card, number)
    minors = {card.address: 128 + number for number, card in enumerate(cards)}
    listed = [card for card in cards if card.gfx is not None] if kfd is None else kfd
    if listed:
        _write_kfd(tmp_path, listed, minors)
    total, available = host_bytes // 1024, host_bytes * 3 // 4 // 1024
    meminfo = f"MemTotal: {total} kB\nMemAvailable: {available} kB\nHugePages_Total: 0"
    write(tmp_path, {"/proc/meminfo": meminfo, "/proc/sys/kernel/osrelease": "6.14.0"})
    for name in absent:
        (tmp_path / name.lstrip("/")).unlink()

    def load(name: str) -> Any:
        found = (libraries or {}).get(name, ImportError(name))
        if isinstance(found, BaseException):
            raise found
        return found

    refused = {tmp_path / name.lstrip("/") for name in denied}
    return Machine(
        root=tmp_path,
        environ=dict(environ or {}),
        platform=platform,
        load=load,
        run=lambda command: (commands or {}).get(" ".join(command)),
        torch_sees=lambda kind: list(seen),
        may_open=lambda path: path not in refused,
    )


def write(root: Path, files: Mapping[str, object]) -> None:
    """Write files below a root, absolute name → content; a content of `OSError` makes reading it fail."""
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is OSError:
            path.mkdir()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(f"{content}\n", encoding="utf-8")


def pci_folder(root: Path, card: FakeCard) -> Path:
    """Return a card's folder."""
    return root / "sys/bus/pci/devices" / card.address


def gpu_id(card: FakeCard) -> int:
    """Return KFD's number of a card."""
    return 1000 + card.device_id


def add_drm_client(
    root: Path, pid: int, fd: int, lines: Mapping[str, object], node: str = "renderD128"
) -> None:
    """Let a process hold a card through a file descriptor; `lines` are those of its fdinfo."""
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True, exist_ok=True)
    (folder / "fd" / str(fd)).symlink_to(f"/dev/dri/{node}")
    text = "\n".join(f"{key}:\t{value}" for key, value in lines.items())
    write(root, {f"/proc/{pid}/fdinfo/{fd}": f"pos:\t0\n{text}"})


def add_kfd_process(root: Path, pid: int, vram: Mapping[int, int], queues: Sequence[int] = ()) -> None:
    """Let a process run ROCm: GPU id → bytes that it holds there, and the GPU ids of its queues."""
    folder = f"/sys/class/kfd/kfd/proc/{pid}"
    write(root, {f"{folder}/vram_{gpu}": size for gpu, size in vram.items()})
    write(root, {f"{folder}/queues/{number}/gpuid": gpu for number, gpu in enumerate(queues)})


def _write_card(root: Path, card: FakeCard, number: int) -> None:
    folder = f"/sys/bus/pci/devices/{card.address}"
    vendor = VENDOR_IDS[card.vendor]
    files: dict[str, object] = {
        "vendor": f"0x{vendor:04x}",
        "device": f"0x{card.device_id:04x}",
        "class": card.pci_class,
        "config": vendor.to_bytes(2, "little") if card.answers else b"\xff\xff",
        "power/runtime_status": "active",
        **card.files,
    }
    files |= {f"hwmon/hwmon{number}/{name}": content for name, content in card.sensors.items()}
    if card.driver is not None:
        driver = root / "sys/bus/pci/drivers" / card.driver
        driver.mkdir(parents=True, exist_ok=True)
    if card.driver in ("amdgpu", "i915", "xe", "nvidia"):
        files |= {f"drm/card{number}/{name}": content for name, content in card.drm_files.items()}
        files[f"drm/card{number}/dev"] = f"226:{number}"
        if card.has_render_node:
            files[f"drm/renderD{128 + number}/dev"] = f"226:{128 + number}"
            write(root, {f"/dev/dri/renderD{128 + number}": ""})
    write(root, {f"{folder}/{name}": content for name, content in files.items()})
    if card.driver is not None:
        (root / folder.lstrip("/") / "driver").symlink_to(driver)


def _write_kfd(root: Path, cards: Sequence[FakeCard], minors: Mapping[str, int]) -> None:
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    write(
        root,
        {"/dev/kfd": "", f"{nodes}/0/gpu_id": 0, f"{nodes}/0/properties": "cpu_cores_count 16\nsimd_count 0"},
    )
    (root / "sys/class/kfd/kfd/proc").mkdir(parents=True)
    for number, card in enumerate(cards, start=1):
        domain, bus, rest = card.address.split(":")
        device, function = rest.split(".")
        properties = {
            "cpu_cores_count": 0,
            "simd_count": 64,
            "gfx_target_version": card.gfx,
            "vendor_id": VENDOR_IDS["amd"],
            "device_id": card.device_id,
            "location_id": int(bus, 16) << 8 | int(device, 16) << 3 | int(function),
            "domain": int(domain, 16),
            "drm_render_minor": minors[card.address],
            "unique_id": card.unique_id,
        }
        text = "\n".join(f"{name} {value}" for name, value in properties.items())
        write(root, {f"{nodes}/{number}/gpu_id": gpu_id(card), f"{nodes}/{number}/properties": text})


class MustNotBeAsked(BaseException):
    """Raised where nobody has any business; nothing that expects errors catches it."""


class FakeLibraryError(Exception):
    """What a vendor's library raises."""


class FakeAmdSmi:
    """`amdsmi` for some cards; functions named in `fails` raise."""

    class AmdSmiTemperatureType:
        EDGE, HOTSPOT, JUNCTION = "edge", "hotspot", "hotspot"

    class AmdSmiTemperatureMetric:
        CURRENT = "current"

    def __init__(
        self,
        cards: Sequence[FakeCard],
        market_name: str = "Radeon RX 7900 XTX",
        fails: Iterable[str] = (),
        lost: FakeCard | None = None,
    ) -> None:
        self.fails = set(fails)
        self.energy: dict[str, object] = {"energy_accumulator": 0, "counter_resolution": 15.3}
        self.throttling: int | str = "N/A"
        self.opened = 0
        self._cards = list(cards)
        self._market_name = market_name
        self._lost = lost

    def _checked(self, function: str, handle: FakeCard | None = None) -> None:
        if function in self.fails or (handle is not None and handle is self._lost):
            raise FakeLibraryError(function)

    def amdsmi_init(self) -> None:
        self._checked("amdsmi_init")
        self.opened += 1

    def amdsmi_shut_down(self) -> None:
        self.opened -= 1
        self._checked("amdsmi_shut_down")

    def amdsmi_get_processor_handles(self) -> list[FakeCard]:
        self._checked("amdsmi_get_processor_handles")
        return self._cards

    def amdsmi_get_gpu_device_bdf(self, handle: FakeCard) -> str:
        self._checked("amdsmi_get_gpu_device_bdf", handle)
        return handle.address.upper()

    def amdsmi_get_gpu_asic_info(self, handle: FakeCard) -> dict[str, object]:
        self._checked("amdsmi_get_gpu_asic_info", handle)
        return {"market_name": self._market_name, "vendor_id": "0x1002"}

    def amdsmi_get_gpu_activity(self, handle: FakeCard) -> dict[str, object]:
        self._checked("amdsmi_get_gpu_activity", handle)
        return {"gfx_activity": 42, "umc_activity": "N/A"}

    def amdsmi_get_temp_metric(self, handle: FakeCard, kind: str, metric: str) -> int:
        self._checked("amdsmi_get_temp_metric", handle)
        if kind == "edge":  # as an MI300 answers
            raise FakeLibraryError("not supported")
        return 63

    def amdsmi_get_power_info(self, handle: FakeCard) -> dict[str, object]:
        self._checked("amdsmi_get_power_info", handle)
        return {"current_socket_power": "N/A", "average_socket_power": 88, "power_limit": 0}

    def amdsmi_get_gpu_metrics_info(self, handle: FakeCard) -> dict[str, object]:
        self._checked("amdsmi_get_gpu_metrics_info", handle)
        return {"indep_throttle_status": self.throttling}

    def amdsmi_get_energy_count(self, handle: FakeCard) -> dict[str, object]:
        self._checked("amdsmi_get_energy_count", handle)
        return self.energy | {"timestamp": 1}


def _structure(name: str, fields: list[tuple[str, Any]]) -> Any:
    header = [("stype", ctypes.c_int32), ("pNext", ctypes.c_void_p)]
    return type(name, (ctypes.Structure,), {"_fields_": header + fields})


class _Address(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("domain", "bus", "device", "function")]


class _Core(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 256)]


class _Handle(ctypes.c_void_p):
    pass


@dataclass
class ZesCard:
    """A card as Sysman tells it."""

    address: str
    name: str = "Intel(R) Arc(TM) A770 Graphics"
    memory: tuple[int, ...] = (16 * GIB,)
    """Physical sizes of its memory modules, one a tile."""
    free: int = 15 * GIB
    """Of each module."""
    location: int = 1
    """1: on the card."""
    degrees: float = 44.0
    engines: tuple[int, ...] = (0, 1)
    """Groups of engines that it counts, 0 being all of them."""
    active: tuple[int, int] = (0, 0)
    """Microseconds at work, and all of them."""


class FakeZes:
    """`pyzes` for some cards; functions named in `fails` return an error, those in `raises` raise."""

    ZES_MEM_LOC_DEVICE = 1
    ZES_TEMP_SENSORS_GPU = 1
    ZES_STRUCTURE_TYPE_PCI_PROPERTIES = 2
    ZES_STRUCTURE_TYPE_DEVICE_PROPERTIES = 1
    ZES_STRUCTURE_TYPE_MEM_PROPERTIES = 0xB
    ZES_STRUCTURE_TYPE_MEM_STATE = 0x1E
    ZES_STRUCTURE_TYPE_TEMP_PROPERTIES = 0x14
    ZES_STRUCTURE_TYPE_ENGINE_PROPERTIES = 0x5
    zes_driver_handle_t = zes_device_handle_t = zes_mem_handle_t = zes_temp_handle_t = _Handle
    zes_engine_handle_t = _Handle
    zes_engine_properties_t = _structure("zes_engine_properties_t", [("type", ctypes.c_uint32)])
    zes_engine_stats_t = type(
        "zes_engine_stats_t",
        (ctypes.Structure,),
        {"_fields_": [("activeTime", ctypes.c_uint64), ("timestamp", ctypes.c_uint64)]},
    )
    zes_pci_properties_t = _structure("zes_pci_properties_t", [("address", _Address)])
    zes_device_properties_t = _structure(
        "zes_device_properties_t", [("core", _Core), ("driverVersion", ctypes.c_char * 64)]
    )
    zes_mem_properties_t = _structure(
        "zes_mem_properties_t", [("location", ctypes.c_int32), ("physicalSize", ctypes.c_uint64)]
    )
    zes_mem_state_t = _structure("zes_mem_state_t", [("free", ctypes.c_uint64), ("size", ctypes.c_uint64)])
    zes_temp_properties_t = _structure("zes_temp_properties_t", [("type", ctypes.c_int32)])

    def __init__(self, *cards: ZesCard, fails: Iterable[str] = (), raises: Iterable[str] = ()) -> None:
        self.cards = cards
        self.fails = set(fails)
        self.raises = set(raises)

    FUNCTIONS = (
        "zesInit",
        "zesDriverGet",
        "zesDeviceGet",
        "zesDevicePciGetProperties",
        "zesDeviceGetProperties",
        "zesDeviceEnumMemoryModules",
        "zesMemoryGetProperties",
        "zesMemoryGetState",
        "zesDeviceEnumTemperatureSensors",
        "zesTemperatureGetProperties",
        "zesTemperatureGetState",
    )

    ENGINE_FUNCTIONS = ("zesDeviceEnumEngineGroups", "zesEngineGetProperties", "zesEngineGetActivity")
    """Asked by gauges alone."""

    def __getattr__(self, name: str) -> Any:
        if name not in (*self.FUNCTIONS, *self.ENGINE_FUNCTIONS):
            raise AttributeError(name)
        if name in self.raises:

            def raising(*_: Any) -> int:
                raise FakeLibraryError(name)

            return raising
        if name in self.fails:
            return lambda *_: 0x70010001
        return getattr(self, f"_{name}")

    def _zesInit(self, flags: int) -> int:
        return 0

    def _zesDriverGet(self, count: Any, handles: Any) -> int:
        return self._list([1], count, handles)

    def _zesDeviceGet(self, driver: Any, count: Any, handles: Any) -> int:
        return self._list([100 + i for i in range(len(self.cards))], count, handles)

    def _zesDevicePciGetProperties(self, device: Any, facts: Any) -> int:
        domain, bus, rest = self._card(device).address.split(":")
        numbers = [int(domain, 16), int(bus, 16), *(int(part, 16) for part in rest.split("."))]
        facts._obj.address = _Address(*numbers)
        return 0

    def _zesDeviceGetProperties(self, device: Any, facts: Any) -> int:
        facts._obj.core.name = self._card(device).name.encode()
        facts._obj.driverVersion = b"1.6.33578"
        return 0

    def _zesDeviceEnumMemoryModules(self, device: Any, count: Any, handles: Any) -> int:
        base = device.value * 10
        return self._list([base + i for i in range(len(self._card(device).memory))], count, handles)

    def _zesMemoryGetProperties(self, module: Any, facts: Any) -> int:
        card = self.cards[module.value // 10 - 100]
        facts._obj.location = card.location
        facts._obj.physicalSize = card.memory[module.value % 10]
        return 0

    def _zesMemoryGetState(self, module: Any, facts: Any) -> int:
        card = self.cards[module.value // 10 - 100]
        facts._obj.free = card.free
        facts._obj.size = card.memory[module.value % 10]
        return 0

    def _zesDeviceEnumTemperatureSensors(self, device: Any, count: Any, handles: Any) -> int:
        return self._list([device.value * 10, device.value * 10 + 1], count, handles)

    def _zesTemperatureGetProperties(self, sensor: Any, facts: Any) -> int:
        facts._obj.type = sensor.value % 10  # 0: of the whole, 1: of the GPU
        return 0

    def _zesTemperatureGetState(self, sensor: Any, degrees: Any) -> int:
        degrees._obj.value = self.cards[sensor.value // 10 - 100].degrees
        return 0

    def _zesDeviceEnumEngineGroups(self, device: Any, count: Any, handles: Any) -> int:
        engines = range(len(self._card(device).engines))
        return self._list([device.value * 10 + place for place in engines], count, handles)

    def _zesEngineGetProperties(self, engine: Any, facts: Any) -> int:
        facts._obj.type = self.cards[engine.value // 10 - 100].engines[engine.value % 10]
        return 0

    def _zesEngineGetActivity(self, engine: Any, stats: Any) -> int:
        assert engine.value % 10 == 0, "only that of all engines is asked"
        stats._obj.activeTime, stats._obj.timestamp = self.cards[engine.value // 10 - 100].active
        return 0

    def _card(self, device: Any) -> ZesCard:
        number: int = device.value
        return self.cards[number - 100]

    @staticmethod
    def _list(values: Sequence[int], count: Any, handles: Any) -> int:
        count._obj.value = len(values)
        for place, value in enumerate(values if handles is not None else ()):
            handles[place] = value
        return 0


def mac_commands(
    chip: str = "Apple M2 Max", memory: int = 32 * GIB, system: str = "15.5", arm64: str = "1"
) -> dict[str, str]:
    """Return what `sysctl` and `vm_stat` print on a Mac."""
    sysctl = "sysctl machdep.cpu.brand_string hw.memsize kern.osproductversion hw.optional.arm64"
    return {
        sysctl: f"machdep.cpu.brand_string: {chip}\nhw.memsize: {memory}\n"
        f"kern.osproductversion: {system}\nhw.optional.arm64: {arm64}\n",
        "vm_stat": "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               10000.\n"
        "Pages active:                            900000.\n"
        "Pages inactive:                          200000.\n"
        "Pages speculative:                         5000.\n",
    }


def fake_torch_module(**facts: Any) -> SimpleNamespace:
    """Return what stands for `torch.xpu` or `torch.cuda` with one card of these properties."""
    return SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        set_device=lambda index: None,
        get_device_properties=lambda index=0: SimpleNamespace(**facts),
    )
