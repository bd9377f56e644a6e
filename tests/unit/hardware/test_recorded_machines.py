"""Whole machines as their drivers describe them: the list, the choice, each rank's environment, the plan.

The answers are written from the vendors' documents (NVML, the kernel's amdgpu and KFD files, i915 and xe,
Level Zero), not taken from machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fake_drivers as drivers
import fake_nvml as nvml
import pytest
from support import unbuilt_config

from hetexp.core.config import read_config
from hetexp.core.device import GIB
from hetexp.core.plan import Plan
from hetexp.hardware.backend import VISIBILITY, backend_class
from hetexp.hardware.detection.builds import TorchBuild
from hetexp.hardware.detection.busy import who_is_busy
from hetexp.hardware.detection.detected import Seen
from hetexp.hardware.detection.inventory import Inventory, detect
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.selection.devices import select_devices
from hetexp.launch.processes.process import rank_environment
from hetexp.plan.planner import check_plan, make_plan
from hetexp.plan.run_spec import Request, RunSpec

CUDA = TorchBuild(None, version="2.13.0+cu126", cuda="12.6")
XPU = TorchBuild("/envs/xpu/bin/python", version="2.13.0+xpu", xpu="20250301")
ROCM = TorchBuild("/envs/rocm/bin/python", version="2.13.0+rocm7.0", hip="7.0")
CPU_ONLY = TorchBuild(None, version="2.13.0+cpu")

RTX_3090 = nvml.FakeCard(uuid="GPU-30900000-0000-0000-0000-000000000000", bus_id="00000000:01:00.0")
RTX_4090 = replace(
    RTX_3090,
    name="NVIDIA GeForce RTX 4090",
    uuid="GPU-40900000-0000-0000-0000-000000000000",
    capability=(8, 9),
)
RTX_2080_TI = replace(
    RTX_3090,
    name="NVIDIA GeForce RTX 2080 Ti",
    uuid="GPU-20800000-0000-0000-0000-000000000000",
    bus_id="00000000:0A:00.0",
    capability=(7, 5),
    memory=(11 * GIB, 10 * GIB),
)
GB10 = nvml.FakeCard(
    name="NVIDIA GB10",
    uuid="GPU-60b10000-0000-0000-0000-000000000000",
    bus_id="0000000F:01:00.0",
    capability=(12, 1),
    fails={"nvmlDeviceGetMemoryInfo": nvml.error(nvml.NOT_SUPPORTED)},
)
A100_SLICED = nvml.FakeCard(
    name="NVIDIA A100-SXM4-40GB",
    uuid="GPU-a1000000-0000-0000-0000-000000000000",
    bus_id="00000000:07:00.0",
    capability=(8, 0),
    memory=(40 * GIB, 39 * GIB),
    instances=[
        nvml.FakeInstance(uuid="MIG-11111111-2222-3333-4444-555555555555", ids=(7, 0)),
        nvml.FakeInstance(uuid="MIG-66666666-7777-8888-9999-aaaaaaaaaaaa", ids=(8, 0)),
    ],
)


def on_bus(card: nvml.FakeCard, device_id: int = nvml.RTX_3090) -> drivers.FakeCard:
    return drivers.FakeCard(card.bus_id[4:].lower(), "nvidia", device_id, "nvidia")


@dataclass
class Recorded:
    """A machine and what hetexp must make of it."""

    cards: Sequence[drivers.FakeCard]
    builds: Sequence[TorchBuild]
    listed: Sequence[tuple[str, str, str]]
    """Id, a part of the name, state; in the order of the numbers."""
    chosen: Sequence[str]
    """What `auto` takes."""
    environments: Mapping[str, dict[str, str]]
    """Device → visibility variables of its rank, all of them."""
    collective: str = "gloo"
    pythons: Sequence[str | None] = ()
    nvidia: nvml.FakeNvml | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `recorded_machine`."""
    facts: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Device → facts of its spec."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Device → words of the reason."""


def uuid(card: nvml.FakeCard) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": card.uuid}


RYZEN = (drivers.RX_7900_XTX, drivers.RAPHAEL)
"""The discrete card comes first on the bus, the processor's own second."""
HIP_FIRST = {"hip:0": {"ROCR_VISIBLE_DEVICES": f"GPU-{drivers.RX_7900_XTX.unique_id:016x}"}}

MACHINES = {
    "RTX 3090 and Arc A770": Recorded(
        cards=[on_bus(RTX_3090), drivers.ARC_A770],
        nvidia=nvml.FakeNvml([RTX_3090]),
        builds=[CUDA, XPU],
        listed=[("cuda:0", "RTX 3090", "available"), ("xpu:0", "A770", "available")],
        chosen=["cuda:0", "xpu:0"],
        pythons=[None, "/envs/xpu/bin/python"],
        environments={
            "cuda:0": uuid(RTX_3090),
            "xpu:0": {"ZE_AFFINITY_MASK": "0"},
        },
        facts={
            "cuda:0": {"architecture": "sm_86", "memory_bytes": 24 * GIB, "pci": "0000:01:00.0"},
            "xpu:0": {"memory_bytes": 16 * GIB, "integrated": False},
        },
    ),
    "RTX 3090 and Arc A770 without an Intel build": Recorded(
        cards=[on_bus(RTX_3090), drivers.ARC_A770],
        nvidia=nvml.FakeNvml([RTX_3090]),
        builds=[CUDA],
        listed=[("cuda:0", "RTX 3090", "available"), ("xpu:0", "A770", "unusable")],
        chosen=["cuda:0"],
        environments={"cuda:0": uuid(RTX_3090)},
        collective="nccl",
        why_not={"xpu:0": "hetexp env create xpu"},
    ),
    "RX 7900 XTX and RTX 2080 Ti": Recorded(
        cards=[drivers.RX_7900_XTX, on_bus(RTX_2080_TI, 0x1E07)],
        nvidia=nvml.FakeNvml([RTX_2080_TI]),
        builds=[CUDA, ROCM],
        listed=[("hip:0", "7900 XTX", "available"), ("cuda:0", "2080 Ti", "available")],
        chosen=["hip:0", "cuda:0"],
        pythons=["/envs/rocm/bin/python", None],
        environments={**HIP_FIRST, "cuda:0": uuid(RTX_2080_TI)},
        facts={"hip:0": {"architecture": "gfx1100"}, "cuda:0": {"architecture": "sm_75"}},
    ),
    "Arc A380 and RX 6600": Recorded(
        cards=[drivers.ARC_A380, drivers.RX_6600],
        builds=[CPU_ONLY, XPU, ROCM],
        listed=[("xpu:0", "A380", "available"), ("hip:0", "6600", "available")],
        chosen=["xpu:0", "hip:0"],
        pythons=["/envs/xpu/bin/python", "/envs/rocm/bin/python"],
        environments={
            "xpu:0": {"ZE_AFFINITY_MASK": "0"},
            "hip:0": {"ROCR_VISIBLE_DEVICES": f"GPU-{drivers.RX_6600.unique_id:016x}"},
        },
        facts={"xpu:0": {"memory_bytes": 6 * GIB}, "hip:0": {"memory_bytes": 8 * GIB}},
    ),
    "RTX 4090, RX 7800 XT and Arc A750": Recorded(
        cards=[
            on_bus(RTX_4090, 0x2684),
            drivers.amd("0000:04:00.0", 0x747E, 110001, vram=16 * GIB, unique_id=0x7800),
            drivers.intel("0000:09:00.0", 0x56A1, lmem=8 * GIB),
        ],
        nvidia=nvml.FakeNvml([RTX_4090]),
        builds=[CUDA, XPU, ROCM],
        listed=[
            ("cuda:0", "RTX 4090", "available"),
            ("hip:0", "7800 XT", "available"),
            ("xpu:0", "A750", "available"),
        ],
        chosen=["cuda:0", "hip:0", "xpu:0"],
        pythons=[None, "/envs/rocm/bin/python", "/envs/xpu/bin/python"],
        environments={
            "cuda:0": uuid(RTX_4090),
            "hip:0": {"ROCR_VISIBLE_DEVICES": "GPU-0000000000007800"},
            "xpu:0": {"ZE_AFFINITY_MASK": "0"},
        },
    ),
    "Radeon iGPU behind the dGPU, both in KFD's order": Recorded(
        cards=RYZEN,
        builds=[ROCM],
        listed=[("hip:0", "7900 XTX", "available"), ("hip:1", "Radeon", "available")],
        chosen=["hip:0"],
        environments=HIP_FIRST,
        collective="nccl",
        pythons=["/envs/rocm/bin/python"],
        facts={"hip:0": {"integrated": False}, "hip:1": {"integrated": True, "unified_memory": True}},
    ),
    "Radeon iGPU first in KFD's order, HIP_VISIBLE_DEVICES=1": Recorded(
        cards=RYZEN,
        more={"kfd": (drivers.RAPHAEL, drivers.RX_7900_XTX)},
        environ={"HIP_VISIBLE_DEVICES": "1"},
        builds=[ROCM],
        listed=[("hip:0", "7900 XTX", "available"), ("hip:1", "Radeon", "hidden")],
        chosen=["hip:0"],
        environments=HIP_FIRST,
        collective="nccl",
        pythons=["/envs/rocm/bin/python"],
    ),
    "Radeon dGPU first in KFD's order, HIP_VISIBLE_DEVICES=1": Recorded(
        cards=RYZEN,
        environ={"HIP_VISIBLE_DEVICES": "1"},
        builds=[ROCM],
        listed=[("hip:0", "7900 XTX", "hidden"), ("hip:1", "Radeon", "available")],
        chosen=["cpu:0"],  # what is left is integrated: told, and used only when named
        environments={"cpu:0": {"CUDA_VISIBLE_DEVICES": ""}},
        why_not={"hip:0": "HIP_VISIBLE_DEVICES=1"},
    ),
    "UHD 770 and Arc A770": Recorded(
        cards=[drivers.UHD_770, drivers.ARC_A770],
        builds=[XPU],
        listed=[("xpu:0", "UHD", "available"), ("xpu:1", "A770", "available")],
        chosen=["xpu:1"],
        environments={"xpu:1": {"ZE_AFFINITY_MASK": "0"}},  # Level Zero counts discrete cards first
        pythons=["/envs/xpu/bin/python"],
        facts={"xpu:0": {"integrated": True}, "xpu:1": {"integrated": False}},
        collective="any",
    ),
    "MIG": Recorded(
        cards=[on_bus(A100_SLICED, nvml.A100)],
        nvidia=nvml.FakeNvml([A100_SLICED]),
        builds=[CUDA],
        listed=[("cuda:0", "MIG 1g.5gb", "available"), ("cuda:1", "MIG 1g.5gb", "available")],
        chosen=["cuda:0", "cuda:1"],
        environments={
            "cuda:0": {"CUDA_VISIBLE_DEVICES": "MIG-11111111-2222-3333-4444-555555555555"},
            "cuda:1": {"CUDA_VISIBLE_DEVICES": "MIG-66666666-7777-8888-9999-aaaaaaaaaaaa"},
        },
        facts={"cuda:0": {"memory_bytes": 5 * GIB}},
    ),
    "GB10 with unified memory": Recorded(
        cards=[on_bus(GB10)],
        nvidia=nvml.FakeNvml([GB10]),
        more={"host_bytes": 128 * GIB},
        builds=[replace(CUDA, version="2.13.0+cu130", cuda="13.0")],
        listed=[("cuda:0", "GB10", "available")],
        chosen=["cuda:0"],
        environments={"cuda:0": uuid(GB10)},
        collective="nccl",
        facts={"cuda:0": {"unified_memory": True, "memory_bytes": 128 * GIB, "architecture": "sm_121"}},
    ),
    "WSL without NVML": Recorded(
        cards=[],
        more={"seen": [Seen(0, "NVIDIA GeForce RTX 3090", 24 * GIB, RTX_3090.uuid, None, "sm_86")]},
        builds=[CUDA],
        listed=[("cuda:0", "RTX 3090", "available")],
        chosen=["cuda:0"],
        environments={"cuda:0": uuid(RTX_3090)},
        collective="nccl",
        facts={"cuda:0": {"memory_bytes": 24 * GIB, "architecture": "sm_86"}},
    ),
    "a lost card between two": Recorded(
        cards=[on_bus(card) for card in nvml.cards_like(RTX_3090, 3)],
        nvidia=nvml.FakeNvml(
            [
                replace(card, fails={"handle": nvml.error(nvml.GPU_IS_LOST)}) if place == 1 else card
                for place, card in enumerate(nvml.cards_like(RTX_3090, 3))
            ]
        ),
        builds=[CUDA],
        listed=[
            ("cuda:0", "RTX 3090", "available"),
            ("cuda:1", "RTX 3090", "lost"),
            ("cuda:2", "RTX 3090", "available"),
        ],
        chosen=["cuda:0", "cuda:2"],
        environments={
            "cuda:0": uuid(nvml.cards_like(RTX_3090, 3)[0]),
            "cuda:2": uuid(nvml.cards_like(RTX_3090, 3)[2]),
        },
        collective="nccl",
        why_not={"cuda:1": "lost"},
    ),
}


@pytest.fixture(params=MACHINES.values(), ids=list(MACHINES))
def recorded(request: pytest.FixtureRequest) -> Recorded:
    found: Recorded = request.param
    return found


@pytest.fixture
def machine(recorded: Recorded, tmp_path: Path) -> Machine:
    libraries = {"pynvml": recorded.nvidia} if recorded.nvidia is not None else {}
    if not recorded.cards:
        drivers.write(tmp_path, {"/dev/dxg": ""})
    return drivers.recorded_machine(
        tmp_path, *recorded.cards, environ=recorded.environ, libraries=libraries, **recorded.more
    )


@pytest.fixture
def inventory(recorded: Recorded, machine: Machine) -> Inventory:
    return detect(machine, recorded.builds, who_is_busy(machine))


def plan_of(inventory: Inventory, **hardware: Any) -> Plan:
    raw = unbuilt_config(
        hardware={"devices": ["auto"], **hardware}, trainer={"global_batch_size": 12, "max_steps": 1}
    )
    config = read_config(raw)
    selection = select_devices(config.hardware, inventory)
    spec = RunSpec(config, raw, selection, Request(Path("/tmp/run"), Path("/tmp")))
    assert check_plan(spec) == []
    return make_plan(spec)


def test_the_list(recorded: Recorded, inventory: Inventory) -> None:
    assert [(card.spec.id, card.state) for card in inventory.cards] == [
        (device, state) for device, _, state in recorded.listed
    ]
    assert [card.spec.number for card in inventory.cards] == list(range(len(recorded.listed)))
    for card, (_, name, _) in zip(inventory.cards, recorded.listed, strict=True):
        assert name in card.spec.name
        for fact, value in recorded.facts.get(card.spec.id, {}).items():
            assert getattr(card.spec, fact) == value, (card.spec.id, fact)
        assert recorded.why_not.get(card.spec.id, "") in (card.why_not or "")
    assert inventory.mask_problems == {}


def test_the_choice_and_the_plan(recorded: Recorded, inventory: Inventory) -> None:
    plan = plan_of(inventory)
    assert [device.id for device in plan.devices] == recorded.chosen
    if recorded.pythons:
        assert [device.python for device in plan.devices] == list(recorded.pythons)
    assert recorded.collective in (plan.collective_backend, "any")
    assert sum(plan.local_batch_sizes) == 12
    told = " ".join(plan.reasons)
    for card in inventory.cards:
        if card.spec.id not in recorded.chosen:
            assert card.spec.name in told  # whoever is left out is named, with the reason


def test_each_rank_sees_its_card_and_no_other(recorded: Recorded, inventory: Inventory) -> None:
    inherited = {"PATH": "/usr/bin", **dict.fromkeys(VISIBILITY, "7"), **recorded.environ}
    for device in plan_of(inventory).devices:
        own = backend_class(device.backend).environment(device)
        environment = rank_environment(inherited, own, 1, None)
        seen = {name: environment[name] for name in VISIBILITY if name in environment}
        assert seen == recorded.environments[device.id]


def test_by_number_uuid_and_address_it_is_the_same_card(recorded: Recorded, inventory: Inventory) -> None:
    usable = [card for card in inventory.cards if card.state == "available"]
    for card in usable:
        names: list[Any] = [card.spec.number, card.spec.id, card.spec.uuid]
        alone = [other.spec.pci for other in inventory.cards].count(card.spec.pci) == 1
        names.append(card.spec.pci if alone else None)
        for name in names:
            if name is not None:
                (device,) = plan_of(inventory, gpu_ids=[name]).devices
                assert (device.id, device.uuid, device.pci) == (card.spec.id, card.spec.uuid, card.spec.pci)
