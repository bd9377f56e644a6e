"""Intel cards on recorded machines: cases 10 (no float64), 18 and 19, and the older AMP package."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_drivers import (
    ARC_A380,
    ARC_A770,
    ARC_B580,
    GIB,
    UHD_630,
    UHD_770,
    FakeZes,
    MustNotBeAsked,
    ZesCard,
    add_drm_client,
    fake_torch_module,
    intel,
    recorded_machine,
)
from torch import nn

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.backend import backend_class
from hetexp.hardware.backends.accelerator import AcceleratorBackend
from hetexp.hardware.backends.xpu import EXTENSION, XpuBackend, usable_extension
from hetexp.hardware.detection.builds import TorchBuild
from hetexp.hardware.detection.detected import DetectedCard, Process, Reading, Seen
from hetexp.hardware.detection.inventory import detect
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.emulation import altered

XPU = TorchBuild(None, version="2.13.0+xpu", xpu="20250301")


def cards_of(machine: Machine) -> list[DetectedCard]:
    return detect(machine, builds=[XPU]).cards


class TestOneCardBesideGraphicsInTheProcessor:
    @pytest.fixture
    def found(self, tmp_path: Path) -> list[DetectedCard]:
        arc = replace(ARC_A770, sensors={"temp1_input": 48000, "power1_max": 190_000_000, "energy1_input": 5})
        return cards_of(recorded_machine(tmp_path, arc, UHD_770))

    def test_both_are_described(self, found: list[DetectedCard]) -> None:
        common: dict[str, Any] = {"backend": "xpu", "vendor": "intel", "driver": "i915 of Linux 6.14.0"}
        assert [card.spec for card in found] == [
            DeviceSpec(
                id="xpu:0",
                index=0,
                number=0,
                name="Intel UHD Graphics 770",
                memory_bytes=32 * GIB,  # half of the host's
                pci="0000:00:02.0",
                architecture="xe-lp",
                integrated=True,
                unified_memory=True,
                precisions=("float32", "float16"),
                mask="1",
                **common,
            ),
            DeviceSpec(
                id="xpu:1",
                index=1,
                number=1,
                name="Intel Arc A770",
                memory_bytes=16 * GIB,
                pci="0000:03:00.0",
                architecture="xe-hpg",
                precisions=("float32", "bfloat16", "float16"),  # case 10: no float64
                mask="0",
                **common,
            ),
        ]

    def test_both_are_available_and_read(self, found: list[DetectedCard]) -> None:
        assert [card.state for card in found] == ["available", "available"]
        assert found[0].reading == Reading(memory_free_bytes=32 * GIB, processes=())
        assert found[1].reading == Reading(
            temperature_celsius=48.0, power_limit_watts=190.0, power_watts=None, processes=()
        )

    def test_a_ranks_mask_counts_whole_cards_discrete_ones_first(self, found: list[DetectedCard]) -> None:
        assert XpuBackend.environment(found[1].spec) == {
            "ZE_AFFINITY_MASK": "0",
            "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "0",
            "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
        }


class TestMasks:
    def test_cards_that_cannot_be_opened_do_not_count(self, tmp_path: Path) -> None:
        passed_on = intel("0000:03:00.0", 0x56A0, driver="vfio-pci")
        machine = recorded_machine(tmp_path, passed_on, ARC_A380, ARC_B580, denied=["/dev/dri/renderD129"])
        assert [(card.spec.name, card.spec.mask) for card in cards_of(machine)] == [
            ("Intel Arc A770", None),
            ("Intel Arc B580", "0"),
            ("Intel Arc A380", None),
        ]

    def test_graphics_before_xe_do_not_count_and_say_why(self, tmp_path: Path) -> None:
        found = cards_of(recorded_machine(tmp_path, UHD_630, ARC_A770))
        assert [card.spec.mask for card in found] == [None, "0"]
        assert "older than Xe" in (found[0].why_not or "")

    def test_inherited_masks_hide_cards(self, tmp_path: Path) -> None:
        inventory = detect(
            recorded_machine(tmp_path, UHD_770, ARC_A770, environ={"ZE_AFFINITY_MASK": "1"}), builds=[XPU]
        )
        assert [card.hidden_by for card in inventory.cards] == [None, "ZE_AFFINITY_MASK=1"]
        assert [card.spec.mask for card in inventory.cards] == ["1", "0"]
        assert inventory.mask_problems == {}

    def test_numbers_along_the_bus_are_unclear_beside_graphics_before_xe(self, tmp_path: Path) -> None:
        environ = {"ZE_AFFINITY_MASK": "0", "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}
        inventory = detect(recorded_machine(tmp_path, UHD_630, ARC_A770, environ=environ), builds=[XPU])
        assert inventory.cards[1].hidden_by == "ZE_AFFINITY_MASK=0"
        (problem,) = inventory.mask_problems["xpu"]
        assert "`ZE_AFFINITY_MASK` must not count along the bus" in problem

    def test_what_cannot_be_understood_hides_all_and_is_told(self, tmp_path: Path) -> None:
        environ = {"ONEAPI_DEVICE_SELECTOR": "arc"}
        inventory = detect(recorded_machine(tmp_path, ARC_A770, environ=environ), builds=[XPU])
        assert inventory.cards[0].state == "hidden"
        assert inventory.mask_problems == {
            "xpu": ["`ONEAPI_DEVICE_SELECTOR` must hold terms like level_zero:0, but holds 'arc'."]
        }

    @pytest.mark.parametrize(("device_id", "mask", "visible"), [(0x0BD5, "0", 0), (0x0BDA, "0", 1)])
    def test_a_card_of_two_tiles_is_two_devices_to_an_inherited_mask(
        self, tmp_path: Path, device_id: int, mask: str, visible: int
    ) -> None:
        card = intel("0000:4b:00.0", device_id, pci_class="0x038000")
        inventory = detect(recorded_machine(tmp_path, card, environ={"ZE_AFFINITY_MASK": mask}), builds=[XPU])
        assert sum(card.hidden_by is None for card in inventory.cards) == visible


class TestMemory:
    def test_of_a_card_with_the_xe_driver_comes_from_sysman(self, tmp_path: Path) -> None:
        zes = FakeZes(ZesCard(ARC_B580.address, memory=(12 * GIB,), free=11 * GIB))
        (card,) = cards_of(recorded_machine(tmp_path, ARC_B580, libraries={"pyzes": zes}))
        assert (card.spec.memory_bytes, card.reading.memory_free_bytes) == (12 * GIB, 11 * GIB)
        assert card.spec.driver == "1.6.33578"

    def test_or_from_the_command(self, tmp_path: Path) -> None:
        commands = {"xpu-smi discovery -d 0000:04:00.0 -j": f'{{"memory_physical_size_byte": "{12 * GIB}"}}'}
        (card,) = cards_of(recorded_machine(tmp_path, ARC_B580, commands=commands))
        assert card.spec.memory_bytes == 12 * GIB

    @pytest.mark.parametrize("answer", ["", "no device", "[]", '{"memory_physical_size_byte": "N/A"}', "{}"])
    def test_an_answer_that_says_nothing_is_none(self, tmp_path: Path, answer: str) -> None:
        commands = {"xpu-smi discovery -d 0000:04:00.0 -j": answer}
        (card,) = cards_of(recorded_machine(tmp_path, ARC_B580, commands=commands))
        assert (card.spec.memory_bytes, card.state) == (None, "available")

    def test_or_from_torch_where_its_answer_is_about_the_card(self, tmp_path: Path) -> None:
        seen = [
            Seen(0, "Intel(R) Arc(TM) B580 Graphics", 12 * GIB),
            Seen(1, "Intel(R) UHD Graphics 770", 30 * GIB),
        ]
        (card,) = cards_of(recorded_machine(tmp_path, ARC_B580, seen=seen))
        assert card.spec.memory_bytes == 12 * GIB

    def test_is_not_guessed_where_torch_tells_two_sizes(self, tmp_path: Path) -> None:
        name = "Intel(R) Arc(TM) B580 Graphics"
        (card,) = cards_of(recorded_machine(tmp_path, ARC_B580, seen=[Seen(0, name, 1), Seen(1, name, 2)]))
        assert card.spec.memory_bytes is None

    def test_that_the_kernel_tells_asks_nobody_else(self, tmp_path: Path) -> None:
        def must_not_be_asked(_: Any) -> Any:
            raise MustNotBeAsked

        machine = recorded_machine(tmp_path, ARC_A770, UHD_770)
        machine = replace(machine, run=must_not_be_asked, torch_sees=must_not_be_asked)
        assert [card.spec.memory_bytes for card in cards_of(machine)] == [32 * GIB, 16 * GIB]

    def test_of_the_processors_graphics_is_never_more_than_the_host_has_available(
        self, tmp_path: Path
    ) -> None:
        machine = recorded_machine(tmp_path, UHD_770, host_bytes=16 * GIB)
        (tmp_path / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 2097152 kB\n")
        (card,) = cards_of(machine)
        assert (card.spec.memory_bytes, card.reading.memory_free_bytes) == (8 * GIB, 2 * GIB)


class TestNames:
    def test_a_card_that_the_table_has_not_is_named_by_its_driver(self, tmp_path: Path) -> None:
        zes = FakeZes(ZesCard("0000:03:00.0", "Intel(R) Arc(TM) C990 Graphics"))
        new = intel("0000:03:00.0", 0xF999, driver="xe")
        (card,) = cards_of(recorded_machine(tmp_path, new, libraries={"pyzes": zes}))
        assert card.spec.name == "Intel Arc C990 Graphics"
        assert (card.spec.architecture, card.spec.precisions, card.spec.integrated) == (None, None, False)

    def test_or_by_the_command_or_its_id(self, tmp_path: Path) -> None:
        new = intel("0000:03:00.0", 0xF999, driver="xe")
        command = {
            "xpu-smi discovery -d 0000:03:00.0 -j": '{"device_name": "Intel(R) Arc(TM) C990 Graphics"}'
        }
        (card,) = cards_of(recorded_machine(tmp_path / "a", new, commands=command))
        assert card.spec.name == "Intel Arc C990 Graphics"
        (card,) = cards_of(recorded_machine(tmp_path / "b", new))
        assert card.spec.name == "Intel GPU 0xf999"

    def test_where_a_processor_keeps_its_graphics_is_known(self, tmp_path: Path) -> None:
        (card,) = cards_of(recorded_machine(tmp_path, intel("0000:00:02.0", 0xF998, driver="xe")))
        assert card.spec.integrated


@pytest.mark.parametrize("error", [OSError("libze_loader.so.1: cannot open"), ImportError("pyzes")])
def test_without_sysman_the_kernel_tells_the_rest(tmp_path: Path, error: Exception) -> None:
    (card,) = cards_of(recorded_machine(tmp_path, ARC_A770, libraries={"pyzes": error}))
    assert (card.spec.name, card.spec.memory_bytes, card.state) == ("Intel Arc A770", 16 * GIB, "available")


@pytest.mark.parametrize("function", FakeZes.FUNCTIONS)
def test_a_query_that_fails_costs_no_card(tmp_path: Path, function: str) -> None:
    zes = FakeZes(ZesCard(ARC_A770.address), raises=[function])
    (card,) = cards_of(recorded_machine(tmp_path, ARC_A770, libraries={"pyzes": zes}))
    assert (card.spec.name, card.spec.memory_bytes, card.state) == ("Intel Arc A770", 16 * GIB, "available")


def test_on_windows_sysman_alone_tells_the_cards(tmp_path: Path) -> None:
    zes = FakeZes(ZesCard("0000:03:00.0"))
    machine = replace(recorded_machine(tmp_path, libraries={"pyzes": zes}), platform="win32")
    (card,) = cards_of(machine)
    assert (card.spec.name, card.spec.memory_bytes) == ("Intel Arc A770 Graphics", 16 * GIB)
    assert (card.state, card.spec.mask) == ("available", "0")


def test_a_machine_without_intels_cards_asks_no_library(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, libraries={"pyzes": MustNotBeAsked()})
    assert XpuBackend.cards(machine, []) == []


class TestReadings:
    def test_xe_counts_its_sensors_from_2(self, tmp_path: Path) -> None:
        card = replace(ARC_B580, sensors={"temp2_input": 55000, "power2_max": 200_000_000})
        (found,) = cards_of(recorded_machine(tmp_path, card))
        assert (found.reading.temperature_celsius, found.reading.power_limit_watts) == (55.0, 200.0)

    @pytest.mark.parametrize("driver", ["i915", "xe"])
    def test_why_a_clock_is_held_back(self, tmp_path: Path, driver: str) -> None:
        reasons = {"status": 1, "pl1": 1, "pl4": 1, "thermal": 1, "vr_tdc": 0}
        if driver == "i915":
            files: dict[str, Any] = {f"gt/gt0/throttle_reason_{name}": bit for name, bit in reasons.items()}
            card = replace(ARC_A770, drm_files=files)
        else:
            files = {f"tile0/gt0/freq0/throttle/reason_{name}": bit for name, bit in reasons.items()}
            card = replace(ARC_B580, files=files)
        (found,) = cards_of(recorded_machine(tmp_path, card))
        assert found.reading.throttled == ("power cap", "too hot")

    def test_who_holds_it(self, tmp_path: Path) -> None:
        machine = recorded_machine(tmp_path, ARC_A770, ARC_A380)
        facts = {"drm-pdev": ARC_A770.address, "drm-client-id": 3, "drm-engine-compute": "812345 ns"}
        add_drm_client(tmp_path, 100, 5, {**facts, "drm-resident-local0": "500 MiB"})
        found = cards_of(machine)
        assert found[0].reading.processes == (Process(100, 500 * 2**20, computes=True),)
        assert found[1].reading.processes == ()


class TestUndriven:
    def test_no_right_to_the_device_names_the_group(self, tmp_path: Path) -> None:
        (card,) = cards_of(recorded_machine(tmp_path, ARC_A770, denied=["/dev/dri/renderD128"]))
        assert card.why_not == (
            "this user may not open /dev/dri/renderD128; add it to the group render (sudo usermod -aG render "
            "$USER) and log in again"
        )
        assert card.spec.memory_bytes == 16 * GIB

    def test_a_driver_that_made_no_device_file(self, tmp_path: Path) -> None:
        (card,) = cards_of(recorded_machine(tmp_path, replace(ARC_A770, has_render_node=False)))
        assert card.why_not == "its driver i915 made no device file for it; see sudo dmesg"

    def test_a_card_that_cannot_be_used_starts_no_program_and_no_torch(self, tmp_path: Path) -> None:
        def must_not_be_asked(_: Any) -> Any:
            raise MustNotBeAsked

        machine = recorded_machine(tmp_path, intel("0000:04:00.0", 0xF999, driver="vfio-pci"))
        (card,) = cards_of(replace(machine, run=must_not_be_asked, torch_sees=must_not_be_asked))
        assert card.spec.name == "Intel GPU 0xf999"


def test_a_card_off_the_bus_is_lost_and_hides_no_other(tmp_path: Path) -> None:
    found = cards_of(recorded_machine(tmp_path, replace(ARC_A770, answers=False), ARC_A380))
    assert [(card.state, card.spec.mask) for card in found] == [("lost", None), ("available", "0")]


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (XPU, None),
        (TorchBuild(None, version="2.13.0+cpu"), "torch 2.13.0+cpu of this interpreter is not built for XPU"),
        (TorchBuild("/v/python", problem="it has no torch"), "/v/python cannot drive it: it has no torch"),
    ],
)
def test_only_an_xpu_build_drives_it(build: TorchBuild, problem: str | None) -> None:
    assert XpuBackend.build_problem(_spec(), build) == problem


@pytest.mark.parametrize(
    ("device_id", "float64", "bfloat16"),
    [
        (0xA780, False, False),
        (0x7D55, True, False),
        (0x56A0, False, True),
        (0xE20B, True, True),
        (0x64A0, True, True),
        (0x0BD5, True, True),
    ],
)
def test_what_each_generation_computes_in(
    tmp_path: Path, device_id: int, float64: bool, bfloat16: bool
) -> None:
    (card,) = cards_of(recorded_machine(tmp_path, intel("0000:03:00.0", device_id, driver="xe")))
    assert card.spec.precisions is not None
    assert ("float64" in card.spec.precisions, "bfloat16" in card.spec.precisions) == (float64, bfloat16)
    assert {"float32", "float16"} <= set(card.spec.precisions)


def _spec(**more: Any) -> DeviceSpec:
    facts = {"id": "xpu:0", "backend": "xpu", "index": 0, "name": "Intel Arc A770", "vendor": "intel"}
    return DeviceSpec(**{**facts, "architecture": "xe-hpg", "mask": "0", **more})


class _Event:
    """An event as a build has it that measures time, or one that does not."""

    clock = 0.0
    measures = True

    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing
        self.at: float | None = None

    def record(self) -> None:
        type(self).clock += 250.0
        self.at = type(self).clock

    def elapsed_time(self, end: _Event) -> float:
        if not self.measures:
            raise NotImplementedError("elapsed_time is not supported by XPUEvent.")
        assert self.timed and end.timed and self.at is not None and end.at is not None
        return end.at - self.at


class TestInTheRank:
    @pytest.fixture
    def drive(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., XpuBackend]:
        def make(event: type[_Event] = _Event, spec: DeviceSpec | None = None, **facts: Any) -> XpuBackend:
            module = fake_torch_module(**facts)
            module.Event = event
            module.waited = 0

            def synchronize() -> None:
                module.waited += 1

            module.synchronize = synchronize
            monkeypatch.setattr(XpuBackend, "_module", lambda self: module)
            return XpuBackend(spec or _spec())

        return make

    def test_its_own_card_is_taken(self, drive: Callable[..., XpuBackend]) -> None:
        assert drive(device_id=0x56A0, uuid=b"whatever").torch_device() == torch.device("xpu", 0)

    def test_another_card_is_refused(self, drive: Callable[..., XpuBackend]) -> None:
        with pytest.raises(SetupError, match=r"but torch sees another card \(Intel UHD Graphics 770\)"):
            drive(device_id=0xA780).torch_device()

    @pytest.mark.parametrize("facts", [{}, {"device_id": 0xF999}, {"device_id": None}])
    def test_an_id_that_says_nothing_refuses_nothing(
        self, drive: Callable[..., XpuBackend], facts: dict[str, Any]
    ) -> None:
        assert drive(**facts).torch_device().type == "xpu"

    def test_events_measure(self, drive: Callable[..., XpuBackend]) -> None:
        backend = drive()
        start, end = backend.mark(), backend.mark()
        assert isinstance(start, _Event)
        assert backend.seconds_between(start, end) == 0.25

    def test_where_events_do_not_measure_the_clock_does_after_waiting(
        self, drive: Callable[..., XpuBackend]
    ) -> None:
        backend = drive(event=type("OldEvent", (_Event,), {"measures": False}))
        module = backend._module()
        start = backend.mark()
        waited = module.waited
        end = backend.mark()
        assert isinstance(start, float) and isinstance(end, float)
        assert module.waited == waited + 1  # whatever was queued before the mark is done
        assert backend.seconds_between(start, end) == end - start >= 0.0

    def test_an_older_torch_is_limited_by_the_model_of_memory(
        self, drive: Callable[..., XpuBackend], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limited = _spec(memory_bytes=GIB, limited=True)
        module = drive(spec=limited, total_memory=4 * GIB)._module()
        called: list[str] = []
        monkeypatch.setattr(altered, "ModelledAllocator", lambda *_: called.append("model"))
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backend_class("xpu")(limited).attach(model, optimizer, None)
        assert called == ["model"]
        module.set_per_process_memory_fraction = lambda fraction, index: called.append(str(fraction))
        backend_class("xpu")(limited).attach(model, optimizer, None)
        assert called == ["model", "0.25"]

    def test_the_shared_part_is_that_of_all_accelerators(self) -> None:
        assert issubclass(XpuBackend, AcceleratorBackend)


class TestTheOlderPackage:
    """intel-extension-for-pytorch: used where it is installed and works, missed by nobody elsewhere."""

    @pytest.fixture
    def install(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        def make(version: str | None, package: Any = None) -> None:
            own = importlib.metadata.version
            imports = importlib.import_module

            def version_of(name: str) -> str:
                if name != "intel-extension-for-pytorch":
                    return own(name)
                if version is None:
                    raise importlib.metadata.PackageNotFoundError(name)
                return version

            def load(name: str, package_name: str | None = None) -> Any:
                if name != EXTENSION:
                    return imports(name, package_name)
                if isinstance(package, BaseException):
                    raise package
                return package

            monkeypatch.setattr(importlib.metadata, "version", version_of)
            monkeypatch.setattr(importlib, "import_module", load)
            monkeypatch.setattr(torch, "__version__", "2.8.0+xpu")

        return make

    @pytest.fixture
    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2).eval()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def test_is_applied_in_place_and_leaves_the_weights_as_they_are(
        self, install: Callable[..., None], trained: tuple[nn.Module, torch.optim.Optimizer]
    ) -> None:
        calls: list[tuple[Any, dict[str, Any]]] = []

        def optimize(model: nn.Module, **options: Any) -> None:
            assert model.training  # it refuses an optimizer for a model that is not being trained
            calls.append((model, options))

        install("2.8.10+xpu", SimpleNamespace(optimize=optimize))
        model, optimizer = trained
        XpuBackend(_spec()).attach(model, optimizer, None)
        ((given, options),) = calls
        assert given is model
        assert options == {"optimizer": optimizer, "dtype": torch.float32, "inplace": True}
        assert not model.training

    @pytest.mark.parametrize("version", [None, "2.8.0", "2.8.0+cpu", "2.7.10+xpu", "2.13.0+xpu", "1.13+xpu"])
    def test_is_not_even_imported_where_it_does_not_fit(
        self, install: Callable[..., None], version: str | None
    ) -> None:
        install(version, MustNotBeAsked())
        assert usable_extension() is None

    @pytest.mark.parametrize(
        "error", [ImportError("libsycl"), OSError("x"), AttributeError("y"), SystemExit(127)]
    )
    def test_that_does_not_load_is_told_and_not_used(
        self, install: Callable[..., None], caplog: pytest.LogCaptureFixture, error: BaseException
    ) -> None:
        install("2.8.10+xpu", error)
        with caplog.at_level(logging.WARNING):
            assert usable_extension() is None
        assert "is installed and not used" in caplog.text

    def test_that_fails_on_the_model_is_told_and_not_used(
        self,
        install: Callable[..., None],
        caplog: pytest.LogCaptureFixture,
        trained: tuple[nn.Module, torch.optim.Optimizer],
    ) -> None:
        def optimize(model: nn.Module, **_: Any) -> None:
            raise RuntimeError("no such layer")

        install("2.8.10+xpu", SimpleNamespace(optimize=optimize))
        with caplog.at_level(logging.WARNING):
            XpuBackend(_spec()).attach(*trained, None)
        assert "optimize failed (no such layer)" in caplog.text
        assert not trained[0].training

    def test_faults_and_limits_are_attached_all_the_same(
        self,
        install: Callable[..., None],
        monkeypatch: pytest.MonkeyPatch,
        trained: tuple[nn.Module, torch.optim.Optimizer],
    ) -> None:
        install(None)
        limited: list[int] = []

        def limit(_: XpuBackend, num_bytes: int) -> bool:
            limited.append(num_bytes)
            return True

        monkeypatch.setattr(XpuBackend, "limit_memory", limit)
        backend_class("xpu")(_spec(memory_bytes=GIB, limited=True)).attach(*trained, None)
        assert limited == [GIB]
