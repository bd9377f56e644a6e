"""AMD cards on recorded machines: cases 13 (unified memory), 18, 19 (lost) and 21 (two GPUs, two masks)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_drivers import (
    ARC_A380,
    GIB,
    RAPHAEL,
    RX_6600,
    RX_7900_XTX,
    STRIX_HALO,
    FakeAmdSmi,
    FakeCard,
    MustNotBeAsked,
    add_kfd_process,
    amd,
    fake_torch_module,
    gpu_id,
    pci_folder,
    recorded_machine,
    write,
)

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.backends.hip import HipBackend, native_precisions
from hetexp.hardware.detection.builds import TorchBuild
from hetexp.hardware.detection.detected import DetectedCard, Process, Reading
from hetexp.hardware.detection.inventory import Inventory, detect
from hetexp.hardware.detection.machine import Machine

ROCM = TorchBuild(None, version="2.13.0+rocm7.0", hip="7.0.0")
DISCRETE_UUID = "GPU-61ad34e0f1c2b3a4"


def cards_of(machine: Machine) -> list[DetectedCard]:
    return detect(machine, builds=[ROCM]).cards


def by_name(inventory: Inventory) -> dict[str, DetectedCard]:
    return {card.spec.name: card for card in inventory.cards}


class TestOneCard:
    @pytest.fixture
    def card(self, tmp_path: Path) -> DetectedCard:
        machine = recorded_machine(tmp_path, RX_7900_XTX, libraries={"amdsmi": FakeAmdSmi([RX_7900_XTX])})
        (found,) = cards_of(machine)
        return found

    def test_is_described(self, card: DetectedCard) -> None:
        assert card.spec == DeviceSpec(
            id="hip:0",
            backend="hip",
            index=0,
            name="AMD Radeon RX 7900 XTX",
            vendor="amd",
            memory_bytes=24 * GIB,
            uuid=DISCRETE_UUID,
            driver="amdgpu of Linux 6.14.0",
            number=0,
            pci="0000:03:00.0",
            architecture="gfx1100",
            precisions=("float64", "float32", "bfloat16", "float16"),
            mask=DISCRETE_UUID,
        )

    def test_is_available_and_read(self, card: DetectedCard) -> None:
        assert card.state == "available"
        assert card.reading == Reading(
            memory_free_bytes=21 * GIB,
            utilisation=0.07,
            temperature_celsius=51.0,
            power_watts=34.0,
            power_limit_watts=327.0,
            processes=(),
        )

    def test_a_rank_gets_one_mask(self, card: DetectedCard) -> None:
        assert HipBackend.environment(card.spec) == {"ROCR_VISIBLE_DEVICES": DISCRETE_UUID}


def test_without_a_uuid_the_mask_is_rocms_number(tmp_path: Path) -> None:
    machine = recorded_machine(
        tmp_path, replace(RX_7900_XTX, unique_id=0), RAPHAEL, kfd=[RAPHAEL, RX_7900_XTX]
    )
    masks = {card.spec.architecture: card.spec.mask for card in cards_of(machine)}
    assert masks == {"gfx1036": "0", "gfx1100": DISCRETE_UUID}


@pytest.mark.parametrize("error", [KeyError("ROCM"), OSError("libamd_smi.so"), ImportError("amdsmi")])
def test_without_amd_smi_the_kernel_tells_the_rest(tmp_path: Path, error: Exception) -> None:
    machine = recorded_machine(tmp_path, RX_7900_XTX, libraries={"amdsmi": error})
    (card,) = cards_of(machine)
    assert card.spec.name == "AMD Radeon RX 7900 XT/7900 XTX/7900 GRE"
    assert (card.spec.memory_bytes, card.state) == (24 * GIB, "available")


@pytest.mark.parametrize("market_name", ["N/A", "0x744c", ""])
def test_a_name_that_is_none_is_not_taken(tmp_path: Path, market_name: str) -> None:
    smi = FakeAmdSmi([RX_7900_XTX], market_name=market_name)
    (card,) = cards_of(recorded_machine(tmp_path, RX_7900_XTX, libraries={"amdsmi": smi}))
    assert card.spec.name == "AMD Radeon RX 7900 XT/7900 XTX/7900 GRE"


def test_a_boards_own_name_comes_before_that_of_its_chip(tmp_path: Path) -> None:
    card = replace(RX_7900_XTX, files={**RX_7900_XTX.files, "product_name": "Radeon PRO W7900"})
    (found,) = cards_of(recorded_machine(tmp_path, card))
    assert found.spec.name == "AMD Radeon PRO W7900"


QUERIES = [
    "amdsmi_init",
    "amdsmi_shut_down",
    "amdsmi_get_processor_handles",
    "amdsmi_get_gpu_device_bdf",
    "amdsmi_get_gpu_asic_info",
    "amdsmi_get_gpu_activity",
    "amdsmi_get_temp_metric",
    "amdsmi_get_power_info",
]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_that_raises_costs_its_field(tmp_path: Path, query: str) -> None:
    bare = replace(RX_7900_XTX, sensors={}, files={"mem_info_vram_total": 24 * GIB, "mem_info_vram_used": 0})
    smi = FakeAmdSmi([RX_7900_XTX], fails=[query])
    (card,) = cards_of(recorded_machine(tmp_path, bare, libraries={"amdsmi": smi}))
    all_of_it = query in QUERIES[:1] + QUERIES[2:4]
    table_name = all_of_it or query == "amdsmi_get_gpu_asic_info"
    assert card.spec.name == (
        "AMD Radeon RX 7900 XT/7900 XTX/7900 GRE" if table_name else "AMD Radeon RX 7900 XTX"
    )
    gone = {"amdsmi_get_gpu_activity", "amdsmi_get_temp_metric", "amdsmi_get_power_info"} & {query}
    told = card.reading
    assert told.utilisation == (None if all_of_it or "amdsmi_get_gpu_activity" in gone else 0.42)
    assert told.temperature_celsius == (None if all_of_it or "amdsmi_get_temp_metric" in gone else 63.0)
    assert told.power_watts == (None if all_of_it or "amdsmi_get_power_info" in gone else 88.0)
    assert (card.spec.memory_bytes, card.state) == (24 * GIB, "available")
    assert smi.opened == 0


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("gpu_busy_percent", "utilisation"),
        ("mem_info_vram_used", "memory_free_bytes"),
        ("hwmon/hwmon0/temp1_input", "temperature_celsius"),
        ("hwmon/hwmon0/power1_average", "power_watts"),
        ("hwmon/hwmon0/power1_cap", "power_limit_watts"),
        ("hwmon/hwmon0/freq1_input", "clock_mhz"),
        ("hwmon/hwmon0/freq2_input", "memory_clock_mhz"),
        ("hwmon/hwmon0/pwm1", "fan"),
    ],
)
@pytest.mark.parametrize("content", [OSError, "N/A", None])
def test_a_file_that_says_nothing_costs_its_field(
    tmp_path: Path, file: str, field: str, content: object
) -> None:
    clocks = {"freq1_input": 2_371_000_000, "freq2_input": 1_249_000_000, "pwm1": 51, "pwm1_max": 255}
    told = replace(RX_7900_XTX, sensors={**RX_7900_XTX.sensors, **clocks})
    machine = recorded_machine(tmp_path, told)
    path = pci_folder(tmp_path, RX_7900_XTX) / file
    path.unlink()
    if content is not None:
        write(tmp_path, {str(path.relative_to(tmp_path)): content})
    (card,) = cards_of(machine)
    empty = {name for name, value in vars(card.reading).items() if value is None}
    assert empty == {field, "fan_rpm", "throttled"}  # the kernel tells no AMD card's
    assert card.state == "available"


def test_newer_chips_tell_their_power_elsewhere(tmp_path: Path) -> None:
    card = replace(RX_7900_XTX, sensors={"power1_input": 120_000_000})
    (found,) = cards_of(recorded_machine(tmp_path, card))
    assert found.reading.power_watts == 120.0


def test_a_memory_of_0_is_not_known(tmp_path: Path) -> None:
    card = amd("0000:03:00.0", 0x744C, 110000, vram=0, gtt=0)
    (found,) = cards_of(recorded_machine(tmp_path, card))
    assert (found.spec.memory_bytes, found.reading.memory_free_bytes) == (None, None)
    assert found.state == "available"


class TestSharedMemory:
    """Case 13: 0.5 GiB set aside and 96 GiB that may be borrowed."""

    def test_is_the_larger_pool_and_flagged(self, tmp_path: Path) -> None:
        (card,) = cards_of(recorded_machine(tmp_path, STRIX_HALO, host_bytes=128 * GIB))
        assert (card.spec.integrated, card.spec.unified_memory) == (True, True)
        assert card.spec.memory_bytes == 96 * GIB
        assert card.reading.memory_free_bytes == 84 * GIB

    def test_is_never_more_than_the_host_has(self, tmp_path: Path) -> None:
        (card,) = cards_of(recorded_machine(tmp_path, STRIX_HALO, host_bytes=64 * GIB))
        assert card.spec.memory_bytes == 64 * GIB
        assert card.reading.memory_free_bytes == 48 * GIB  # what the host has available

    def test_is_what_the_firmware_set_aside_where_that_is_more(self, tmp_path: Path) -> None:
        card = amd("0000:c5:00.0", 0x1586, 110501, vram=96 * GIB, gtt=16 * GIB)
        (found,) = cards_of(recorded_machine(tmp_path, card, host_bytes=32 * GIB))
        assert found.spec.memory_bytes == 96 * GIB
        assert found.reading.memory_free_bytes == 84 * GIB

    def test_is_borrowed_only_where_nothing_was_set_aside(self, tmp_path: Path) -> None:
        card = amd("0000:c5:00.0", 0x1586, 110501, vram=0, gtt=16 * GIB)
        (found,) = cards_of(recorded_machine(tmp_path, card))
        assert found.spec.memory_bytes == 16 * GIB

    def test_of_a_discrete_card_is_its_own_only(self, tmp_path: Path) -> None:
        card = amd("0000:03:00.0", 0x743F, 100304, vram=4 * GIB, gtt=32 * GIB)
        (found,) = cards_of(recorded_machine(tmp_path, card))
        assert (found.spec.memory_bytes, found.spec.unified_memory) == (4 * GIB, False)

    def test_of_an_accelerator_with_a_processor_is_unified_and_not_integrated(self, tmp_path: Path) -> None:
        card = amd("0000:03:00.0", 0x74A0, 90402, vram=128 * GIB, gtt=64 * GIB, pci_class="0x120000")
        (found,) = cards_of(recorded_machine(tmp_path, card))
        assert (found.spec.integrated, found.spec.unified_memory) == (False, True)
        assert found.spec.memory_bytes == 128 * GIB

    @pytest.mark.parametrize(("vram", "integrated"), [(GIB // 2, True), (12 * GIB, False)])
    def test_of_a_chip_that_nobody_knows_is_told_by_its_size(
        self, tmp_path: Path, vram: int, integrated: bool
    ) -> None:
        card = amd("0000:03:00.0", 0xFFFE, None, vram=vram, gtt=32 * GIB)
        (found,) = HipBackend.cards(recorded_machine(tmp_path, card), _on_bus(card))
        assert (found.spec.integrated, found.spec.name) == (integrated, "AMD GPU 0xfffe")


def _on_bus(*cards: FakeCard) -> Any:
    return [SimpleNamespace(**vars(card)) for card in cards]


ORDERS = [[RX_7900_XTX, RAPHAEL], [RAPHAEL, RX_7900_XTX]]


class TestTwoGpus:
    """Case 21: a card beside the GPU of a Ryzen, in either order of ROCm's list."""

    @pytest.mark.parametrize("order", ORDERS)
    def test_ids_follow_the_bus_and_not_rocm(self, tmp_path: Path, order: list[FakeCard]) -> None:
        found = cards_of(recorded_machine(tmp_path, RX_7900_XTX, RAPHAEL, kfd=order))
        assert [(card.spec.id, card.spec.architecture, card.spec.integrated) for card in found] == [
            ("hip:0", "gfx1100", False),
            ("hip:1", "gfx1036", True),
        ]
        assert found[1].spec.mask == str(order.index(RAPHAEL))

    @pytest.mark.parametrize("order", ORDERS)
    def test_an_inherited_mask_counts_in_rocms_order(self, tmp_path: Path, order: list[FakeCard]) -> None:
        machine = recorded_machine(
            tmp_path, RX_7900_XTX, RAPHAEL, kfd=order, environ={"HIP_VISIBLE_DEVICES": "1"}
        )
        inventory = detect(machine, builds=[ROCM])
        states = {card.spec.architecture: (card.state, card.hidden_by) for card in inventory.cards}
        visible = "gfx1036" if order[1] is RAPHAEL else "gfx1100"
        (hidden,) = {"gfx1036", "gfx1100"} - {visible}
        assert states == {visible: ("available", None), hidden: ("hidden", "HIP_VISIBLE_DEVICES=1")}
        assert inventory.mask_problems == {}
        # Whatever was inherited, the rank's mask means the card itself.
        masks = {card.spec.architecture: HipBackend.environment(card.spec) for card in inventory.cards}
        assert masks["gfx1100"] == {"ROCR_VISIBLE_DEVICES": DISCRETE_UUID}
        assert masks["gfx1036"] == {"ROCR_VISIBLE_DEVICES": str(order.index(RAPHAEL))}

    def test_masks_that_together_hide_everything_are_told(self, tmp_path: Path) -> None:
        environ = {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}
        inventory = detect(recorded_machine(tmp_path, RX_7900_XTX, RAPHAEL, environ=environ), builds=[ROCM])
        assert [card.hidden_by for card in inventory.cards] == [
            "ROCR_VISIBLE_DEVICES=1",
            "HIP_VISIBLE_DEVICES=1",
        ]
        assert inventory.mask_problems == {
            "hip": [
                "`HIP_VISIBLE_DEVICES` must name the cards that ROCR_VISIBLE_DEVICES=1 leaves by 0, the only "
                "one's number, or UUID, each once, but names '1'. Set one of the two variables only."
            ]
        }


class TestBothVendors:
    def test_each_is_described_by_its_own_backend(self, tmp_path: Path) -> None:
        found = detect(recorded_machine(tmp_path, ARC_A380, RX_6600), builds=[ROCM]).cards
        assert [(card.spec.id, card.spec.name, card.state) for card in found] == [
            ("xpu:0", "Intel Arc A380", "unusable"),
            ("hip:0", "AMD Radeon RX 6600/6600 XT", "available"),
        ]
        assert found[0].unusable is not None and "hetexp env create xpu" in found[0].unusable
        assert found[1].spec.precisions == ("float64", "float32", "float16")

    def test_amds_masks_hide_no_card_of_intel(self, tmp_path: Path) -> None:
        machine = recorded_machine(tmp_path, ARC_A380, RX_6600, environ={"HIP_VISIBLE_DEVICES": ""})
        found = detect(machine, builds=[ROCM])
        assert [card.hidden_by for card in found.cards] == [None, "HIP_VISIBLE_DEVICES="]
        assert found.mask_problems == {}

    @pytest.mark.parametrize("value", ["1", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "0,1"])
    def test_a_mask_for_nvidias_cards_is_no_mistake_about_amds(self, tmp_path: Path, value: str) -> None:
        nvidia = FakeCard("0000:01:00.0", "nvidia", 0x2204, "nvidia")
        machine = recorded_machine(tmp_path, nvidia, RX_6600, environ={"CUDA_VISIBLE_DEVICES": value})
        inventory = detect(machine, builds=[ROCM])
        (amds,) = [card for card in inventory.cards if card.spec.backend == "hip"]
        assert amds.hidden_by == (None if value == "0,1" else f"CUDA_VISIBLE_DEVICES={value}")
        assert "hip" not in inventory.mask_problems


class TestUndriven:
    def test_no_right_to_kfd_names_the_group(self, tmp_path: Path) -> None:
        (card,) = cards_of(recorded_machine(tmp_path, RX_7900_XTX, denied=["/dev/kfd"]))
        assert card.state == "unusable"
        assert card.why_not == (
            "this user may not open /dev/kfd; add it to the group render (sudo usermod -aG render $USER) and "
            "log in again"
        )
        assert card.spec.memory_bytes == 24 * GIB  # it is listed with what is known

    def test_no_right_to_the_render_node(self, tmp_path: Path) -> None:
        (card,) = cards_of(recorded_machine(tmp_path, RX_7900_XTX, denied=["/dev/dri/renderD128"]))
        assert "may not open /dev/dri/renderD128" in (card.why_not or "")

    def test_a_container_without_the_devices(self, tmp_path: Path) -> None:
        (card,) = cards_of(recorded_machine(tmp_path, RX_7900_XTX, absent=["/dev/kfd"]))
        assert card.why_not == (
            "/dev/kfd is absent; a container is given it with docker run --device /dev/kfd --device /dev/dri"
        )

    def test_a_container_with_one_of_two_cards(self, tmp_path: Path) -> None:
        machine = recorded_machine(tmp_path, RX_7900_XTX, RX_6600, absent=["/dev/dri/renderD128"])
        found = {card.spec.architecture: card for card in cards_of(machine)}
        assert "/dev/dri/renderD128 is absent" in (found["gfx1100"].why_not or "")
        assert found["gfx1032"].state == "available"

    def test_a_chip_that_rocm_does_not_know(self, tmp_path: Path) -> None:
        old = amd("0000:05:00.0", 0x67DF, None, vram=8 * GIB)
        found = {card.spec.pci: card for card in cards_of(recorded_machine(tmp_path, RX_7900_XTX, old))}
        assert "does not list it" in (found[old.address].why_not or "")
        assert found[RX_7900_XTX.address].state == "available"

    def test_the_driver_is_looked_at_first(self, tmp_path: Path) -> None:
        card = amd("0000:03:00.0", 0x744C, None, driver="vfio-pci")
        (found,) = cards_of(recorded_machine(tmp_path, card))
        assert found.why_not == "it is reserved for a virtual machine (vfio-pci); give it back to amdgpu"


class TestLost:
    """Case 19: one card that is gone hides no other."""

    def test_off_the_bus(self, tmp_path: Path) -> None:
        lost = replace(RX_7900_XTX, answers=False)
        found = cards_of(recorded_machine(tmp_path, lost, RX_6600))
        assert [card.state for card in found] == ["lost", "available"]
        assert found[0].reading == Reading()
        assert "no longer answers on the PCI bus" in (found[0].why_not or "")

    @pytest.mark.parametrize("raises", [True, False])
    def test_the_drivers_files_are_gone_or_raise(self, tmp_path: Path, raises: bool) -> None:
        machine = recorded_machine(tmp_path, RX_7900_XTX, RX_6600)
        path = pci_folder(tmp_path, RX_7900_XTX) / "mem_info_vram_total"
        path.unlink()
        if raises:
            path.mkdir()
        found = cards_of(machine)
        assert [card.state for card in found] == ["lost", "available"]
        assert found[0].spec.memory_bytes is None

    def test_the_kernels_list_has_it_no_more_and_rocms_has(self, tmp_path: Path) -> None:
        machine = recorded_machine(tmp_path, RX_7900_XTX, RX_6600)
        pci_folder(tmp_path, RX_7900_XTX).rename(tmp_path / "gone")
        found = cards_of(machine)
        assert [(card.spec.id, card.state) for card in found] == [("hip:0", "lost"), ("hip:1", "available")]

    def test_amd_smi_that_cannot_reach_one_tells_the_other(self, tmp_path: Path) -> None:
        smi = FakeAmdSmi([RX_7900_XTX, RX_6600], market_name="Radeon RX 6600", lost=RX_7900_XTX)
        found = cards_of(recorded_machine(tmp_path, RX_7900_XTX, RX_6600, libraries={"amdsmi": smi}))
        assert [card.spec.name for card in found] == [
            "AMD Radeon RX 7900 XT/7900 XTX/7900 GRE",
            "AMD Radeon RX 6600",
        ]


def test_who_computes_is_told(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, RX_7900_XTX, RX_6600)
    first, second = gpu_id(RX_7900_XTX), gpu_id(RX_6600)
    add_kfd_process(tmp_path, 100, {first: 5 * GIB, second: 0}, queues=[first])
    add_kfd_process(tmp_path, 200, {first: 0, second: 0}, queues=[second])
    add_kfd_process(tmp_path, 300, {first: 0, second: 0})  # only asked how many cards there are
    found = cards_of(machine)
    assert found[0].reading.processes == (Process(100, 5 * GIB),)
    assert found[1].reading.processes == (Process(200, None),)


def test_a_machine_without_amds_cards_asks_no_library(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, ARC_A380, libraries={"amdsmi": MustNotBeAsked()})
    assert HipBackend.cards(machine, []) == []


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (ROCM, None),
        (TorchBuild("/v/bin/python", version="2.13.0+cu130", cuda="13.0"), "is not built for ROCm"),
        (
            TorchBuild("/v/bin/python", problem="it has no torch"),
            "/v/bin/python cannot drive it: it has no torch",
        ),
    ],
)
def test_only_a_rocm_build_drives_it(build: TorchBuild, problem: str | None) -> None:
    told = HipBackend.build_problem(_spec(), build)
    assert (told is None) if problem is None else (problem in (told or ""))


@pytest.mark.parametrize(
    ("architecture", "bfloat16"),
    [
        ("gfx906", False),
        ("gfx908", True),
        ("gfx90a", True),
        ("gfx90c", False),
        ("gfx942", True),
        ("gfx950", True),
        ("gfx1030", False),
        ("gfx1036", False),
        ("gfx1100", True),
        ("gfx1151", True),
        ("gfx1201", True),
    ],
)
def test_bfloat16_is_native_from_cdna_and_rdna_3_on(architecture: str, bfloat16: bool) -> None:
    precisions = native_precisions(architecture)
    assert precisions is not None
    assert ("bfloat16" in precisions) == bfloat16
    assert {"float64", "float32", "float16"} <= set(precisions)


@pytest.mark.parametrize("architecture", [None, "gfx803", "gfx1300"])
def test_of_other_chips_nothing_is_claimed(architecture: str | None) -> None:
    assert native_precisions(architecture) is None


def _spec(**more: Any) -> DeviceSpec:
    facts = {"id": "hip:0", "backend": "hip", "index": 0, "name": "AMD Radeon RX 7900 XTX", "vendor": "amd"}
    return DeviceSpec(
        **{**facts, "architecture": "gfx1100", "uuid": DISCRETE_UUID, "mask": DISCRETE_UUID, **more}
    )


class TestInTheRank:
    def _backend(
        self, monkeypatch: pytest.MonkeyPatch, hip: str | None = "7.0.0", **facts: Any
    ) -> HipBackend:
        module = fake_torch_module(**facts)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(HipBackend, "_module", lambda self: module)
        return HipBackend(_spec())

    def test_the_card_is_recognised_by_hips_spelling_of_its_uuid(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # hipDeviceProp_t.uuid holds the digits themselves, which torch writes as if they were bytes.
        text = DISCRETE_UUID.removeprefix("GPU-").encode().hex()
        dashed = "-".join([text[:8], text[8:12], text[12:16], text[16:20], text[20:]])
        device = self._backend(monkeypatch, uuid=dashed).torch_device()
        assert device == torch.device("cuda", 0)

    def test_another_card_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = self._backend(monkeypatch, uuid=b"00000000deadbeef".hex())
        with pytest.raises(SetupError, match=r"torch sees another card \(GPU-00000000deadbeef\)") as refused:
            backend.torch_device()
        assert "HSA_OVERRIDE" not in str(refused.value)  # it is no question of the chip

    @pytest.mark.parametrize("uuid", ["00000000-0000-0000-0000-000000000000", "", "not a uuid", b"0" * 16])
    def test_a_uuid_that_says_nothing_refuses_nothing(
        self, monkeypatch: pytest.MonkeyPatch, uuid: Any
    ) -> None:
        uuid = uuid.hex() if isinstance(uuid, bytes) else uuid
        assert self._backend(monkeypatch, uuid=uuid).torch_device().index == 0

    def test_a_build_for_cuda_is_refused_though_it_answers_as_cuda(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = self._backend(monkeypatch, hip=None, uuid=None)
        with pytest.raises(SetupError, match="hetexp env create rocm"):
            backend.torch_device()

    def test_a_torch_that_sees_no_card_is_told_with_the_chip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = self._backend(monkeypatch, uuid=None)
        monkeypatch.setattr(backend._module(), "is_available", lambda: False)
        with pytest.raises(SetupError, match=r"without code for gfx1100 .* HSA_OVERRIDE_GFX_VERSION"):
            backend.torch_device()

    @pytest.mark.parametrize(("architecture", "native"), [("gfx1100", True), ("gfx1030", False)])
    def test_bfloat16_is_asked_of_the_chip_and_not_of_torch(self, architecture: str, native: bool) -> None:
        assert HipBackend(_spec(architecture=architecture)).computes_in("bfloat16") is native
