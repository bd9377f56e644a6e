"""A faked `pynvml` with cards as a test describes them, and a recorded machine around it.

    nvml = FakeNvml([FakeCard(fails={"nvmlDeviceGetPowerUsage": error(NOT_SUPPORTED)})])
    machine = machine_with(nvml, tmp_path, environ={"CUDA_VISIBLE_DEVICES": "0"})

Errors are the real library's own, by NVML's number (`error(15)`: GPU is lost). `nvml.opened` is 0 once
everybody that opened it has closed it. Two cards of one machine need different `bus_id` and `uuid`: see
`cards_like`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

from hetexp.hardware.detection.detected import Seen
from hetexp.hardware.detection.machine import Machine

GIB = 1024**3
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 3, 4, 6, 9, 12
UNINITIALIZED, FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, UNKNOWN = (
    1,
    13,
    15,
    16,
    18,
    999,
)
RTX_3090, RTX_3060, T4, A100 = 0x2204, 0x2503, 0x1EB8, 0x20B0
"""PCI numbers of chips."""


def error(code: int) -> Exception:
    """Return NVML's error of that number."""
    raised: Exception = pynvml.NVMLError(code)
    return raised


@dataclass
class FakeInstance:
    """A MIG instance."""

    uuid: str = "MIG-11111111-2222-3333-4444-555555555555"
    name: str | None = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    """`None`: the driver does not tell it."""
    memory: tuple[int, int] = (5 * GIB, 4 * GIB)
    slices: int = 1
    ids: tuple[int, int] = (7, 0)
    """Numbers of its GPU instance and its compute instance."""
    compute: Sequence[tuple[int, int | None]] = ()
    fails: Mapping[str, Exception] = field(default_factory=dict)


@dataclass
class FakeCard:
    """A card."""

    name: str = "NVIDIA GeForce RTX 3090"
    uuid: str = "GPU-aaaa0000-0000-0000-0000-000000000000"
    bus_id: str = "00000000:01:00.0"
    capability: tuple[int, int] = (8, 6)
    pcie_generation: int | None = 4
    pcie_lanes: int | None = 16
    """Of its link to the host, what card and slot can do."""
    memory: tuple[int, int] = (24 * GIB, 20 * GIB)
    """Total and free."""
    utilisation: int = 37
    temperature: int = 61
    power: int = 215_500
    """Milliwatts."""
    power_limit: int = 350_000
    energy: int | None = None
    """Millijoules since the driver was loaded; `None`: older than Volta."""
    clocks: Mapping[int, int] = field(default_factory=lambda: {1: 1980, 2: 9501})
    """NVML's number of a clock → MHz."""
    fan: int | None = 43
    """Percent; `None`: it has none."""
    reasons: int = 0
    """Bits of why its clocks are low."""
    compute: Sequence[tuple[int, int | None]] = ()
    """Process and its bytes."""
    graphics: Sequence[tuple[int, int | None]] = ()
    instances: Sequence[FakeInstance | None] | None = None
    """Its MIG instances, `None` for a free place; `None` altogether: the card knows no MIG mode."""
    fails: Mapping[str, Exception] = field(default_factory=dict)
    """Query → what it raises; `*`: all of them; `handle`: the card cannot be reached."""


class FakeNvml(ModuleType):
    """`pynvml`.

    Args:
        init: what `nvmlInit` raises.
        lacks: functions that this generation of the library has not.
        as_bytes: whether texts are bytes, as before nvidia-ml-py 11.5.
    """

    NVMLError = pynvml.NVMLError

    def __init__(
        self,
        cards: Sequence[FakeCard] = (),
        *,
        init: Exception | None = None,
        fails: Mapping[str, Exception] | None = None,
        lacks: Iterable[str] = (),
        as_bytes: bool = False,
        driver: str = "575.64",
    ) -> None:
        super().__init__("pynvml")
        self.cards = list(cards)
        self.init = init
        self.fails = dict(fails or {})
        self.as_bytes = as_bytes
        self.driver = driver
        self.opened = 0
        self.times_opened = 0
        self.asked: list[str] = []
        for name, answer in _ANSWERS.items():
            if name not in lacks:
                setattr(self, name, self._query(name, answer))

    def nvmlInit(self) -> None:
        if self.init is not None:
            raise self.init
        self.opened += 1
        self.times_opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        self._may_fail("nvmlSystemGetDriverVersion", self.fails)
        return self._text(self.driver)

    def nvmlDeviceGetCount(self) -> int:
        self._may_fail("nvmlDeviceGetCount", self.fails)
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        if "handle" in self.cards[index].fails:
            raise self.cards[index].fails["handle"]
        return self.cards[index]

    def _query(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def query(handle: Any, *args: Any) -> Any:
            assert self.opened > 0, "NVML is not open"
            self.asked.append(name)
            self._may_fail(name, handle.fails)
            value = answer(handle, *args)
            return self._text(value) if isinstance(value, str) else value

        return query

    def _may_fail(self, name: str, fails: Mapping[str, Exception]) -> None:
        raised = fails.get(name, fails.get("*"))
        if raised is not None:
            raise raised

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self.as_bytes else text


def _told(value: Any) -> Any:
    if value is None:
        raise error(NOT_SUPPORTED)
    return value


def _only_cards(handle: Any, value: str) -> Any:
    """An instance does not know it: `nvmlDeviceGetUtilizationRates` and the like answer `Not Supported`."""
    return _told(getattr(handle, value, None))


def _processes(pairs: Sequence[tuple[int, int | None]]) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in pairs]


def _instance(card: FakeCard, place: int) -> FakeInstance:
    one = (card.instances or ())[place]
    if one is None:
        raise error(NOT_FOUND)
    return one


def _ids(place: int) -> Callable[[FakeInstance], int]:
    return lambda instance: instance.ids[place]


_ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetUUID": lambda h: h.uuid,
    "nvmlDeviceGetName": lambda h: _told(h.name),
    "nvmlDeviceGetPciInfo": lambda h: SimpleNamespace(busId=h.bus_id),
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda h: _only_cards(h, "pcie_generation"),
    "nvmlDeviceGetMaxPcieLinkWidth": lambda h: _only_cards(h, "pcie_lanes"),
    "nvmlDeviceGetCudaComputeCapability": lambda h: _only_cards(h, "capability"),
    "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(total=h.memory[0], free=h.memory[1]),
    "nvmlDeviceGetUtilizationRates": lambda h: SimpleNamespace(gpu=_only_cards(h, "utilisation")),
    "nvmlDeviceGetTemperature": lambda h, sensor: _only_cards(h, "temperature"),
    "nvmlDeviceGetPowerUsage": lambda h: _only_cards(h, "power"),
    "nvmlDeviceGetTotalEnergyConsumption": lambda h: _only_cards(h, "energy"),
    "nvmlDeviceGetEnforcedPowerLimit": lambda h: _only_cards(h, "power_limit"),
    "nvmlDeviceGetClockInfo": lambda h, clock: _told(_only_cards(h, "clocks").get(clock)),
    "nvmlDeviceGetFanSpeed": lambda h: _only_cards(h, "fan"),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda h: _only_cards(h, "reasons"),
    "nvmlDeviceGetComputeRunningProcesses": lambda h: _processes(h.compute),
    "nvmlDeviceGetGraphicsRunningProcesses": lambda h: _processes(_only_cards(h, "graphics")),
    "nvmlDeviceGetMigMode": lambda h: _told([1, 1] if h.instances is not None else None),
    "nvmlDeviceGetMaxMigDeviceCount": lambda h: len(h.instances or ()),
    "nvmlDeviceGetMigDeviceHandleByIndex": _instance,
    "nvmlDeviceGetGpuInstanceId": _ids(0),
    "nvmlDeviceGetComputeInstanceId": _ids(1),
    "nvmlDeviceGetAttributes_v2": lambda h: SimpleNamespace(
        gpuInstanceSliceCount=h.slices, memorySizeMB=h.memory[0] // 2**20 - 256
    ),
}


def cards_like(card: FakeCard, count: int) -> list[FakeCard]:
    """Return so many cards like this one, each with its own UUID (`GPU-aaaa…`, `GPU-aabb…`) and address."""
    starts = [f"GPU-{word}{card.uuid[8:]}" for word in ("aaaa", "aabb", "cccc", "dddd", "eeee")]
    return [
        replace(card, uuid=starts[place], bus_id=f"00000000:{place + 1:02X}:00.0") for place in range(count)
    ]


def put_on_bus(root: Path, address: str, device_id: int = RTX_3090, driver: str | None = "nvidia") -> None:
    """Put an NVIDIA card on the recorded machine's PCI bus."""
    folder = root / "sys" / "bus" / "pci" / "devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x10de\n")
    (folder / "device").write_text(f"0x{device_id:04x}\n")
    (folder / "class").write_text("0x030000\n")
    if driver is not None:
        bound = root / "sys" / "bus" / "pci" / "drivers" / driver
        bound.mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(bound)


def put_file(root: Path, name: str, text: str = "") -> None:
    """Put a file on the recorded machine: `/dev/dxg`."""
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine_with(
    nvml: FakeNvml | None,
    root: Path,
    environ: Mapping[str, str] | None = None,
    sees: Sequence[Seen] = (),
    asked: list[str] | None = None,
) -> Machine:
    """Return a machine whose only vendor library is this one, `None` where it is missing.

    Args:
        root: what stands for `/`; an empty folder is a machine with no bus.
        sees: what a torch built for CUDA would see.
        asked: collects each question to torch.
    """

    def load(name: str) -> Any:
        if name != "pynvml" or nvml is None:
            raise ModuleNotFoundError(name)
        return nvml

    def torch_sees(kind: str) -> list[Seen]:
        if asked is not None:
            asked.append(kind)
        return list(sees) if kind == "cuda" else []

    return Machine(
        root=root,
        environ=dict(environ or {}),
        platform="linux",
        load=load,
        run=lambda command: None,
        torch_sees=torch_sees,
    )
