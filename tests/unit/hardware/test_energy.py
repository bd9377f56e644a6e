"""What devices draw, by counters as drivers give them: case 18 (a query that fails costs the field only)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_clock import Clock
from fake_drivers import ARC_A770, ARC_B580, RX_7900_XTX, FakeAmdSmi, pci_folder, recorded_machine
from fake_drivers import FakeCard as KernelCard
from fake_nvml import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    NOT_SUPPORTED,
    FakeCard,
    FakeInstance,
    FakeNvml,
    cards_like,
    machine_with,
)
from fake_nvml import error as nvml_error

from hetexp.core.device import DeviceSpec
from hetexp.hardware.backend import Backend, Counter
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.backends.cuda import CudaBackend
from hetexp.hardware.backends.hip import HipBackend
from hetexp.hardware.backends.xpu import XpuBackend
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.energy import LONGEST_SECONDS, EnergyMeter


def spec(backend: str, number: int = 0, **facts: object) -> DeviceSpec:
    return DeviceSpec(f"{backend}:{number}", backend, number, "Card", "vendor", **facts)  # type: ignore[arg-type]


class Counted(CpuBackend):
    """A device whose counter gives these readings, one after another."""

    def __init__(self, *readings: float | None, limit: float | None = None) -> None:
        super().__init__(spec("cuda", uuid="GPU-1", power_limit_watts=limit))
        self.left, self.opened = list(readings), 0

    @contextmanager
    def energy_counter(self, machine: Machine) -> Iterator[Counter | None]:
        self.opened += 1
        yield lambda: self.left.pop(0)
        self.opened -= 1


def drawn(meter: EnergyMeter, do: Callable[[], object] = lambda: None) -> Sequence[float | None]:
    """Return what a meter counts while something is done."""
    meter.start()
    do()
    return meter.joules()


class TestMeter:
    def test_a_counter_that_fell_is_of_no_use_even_if_it_rises_again(self) -> None:
        clock = Clock()
        device = Counted(100.0, 150.0, 50.0, 400.0)
        meter = EnergyMeter([device], clock=clock.perf_counter)
        meter.start()
        for _ in range(2):
            clock.now += LONGEST_SECONDS
            meter.keep_up()
        assert meter.joules() == [None]

    def test_counts_what_is_drawn_while_it_runs(self) -> None:
        device = Counted(100.0, 130.0, 500.0, 507.0)
        meter = EnergyMeter([device])
        meter.start()
        meter.start()  # it runs already
        assert device.opened == 1
        meter.stop()
        meter.stop()
        assert drawn(meter) == [37.0]  # not what an evaluation in between drew
        assert (device.left, device.opened) == ([], 0)

    @pytest.mark.parametrize(
        "readings",
        [(None, 5.0), (5.0, None), (5.0, 4.0), (5.0, 5.0)],
        ids=["none at the start", "none at the end", "fell", "stood still"],
    )
    def test_a_counter_that_cannot_be_believed_gives_nothing(self, readings: Sequence[float | None]) -> None:
        assert drawn(EnergyMeter([Counted(*readings)])) == [None]

    def test_one_failure_is_enough(self) -> None:
        device = Counted(0.0, None)
        meter = EnergyMeter([device])
        assert drawn(meter) == [None]
        assert drawn(meter) == [None]  # it is asked no more: there is no reading left

    @pytest.mark.parametrize(
        ("limit", "joules", "expected"),
        [(300.0, 2900.0, 2900.0), (300.0, 5000.0, None), (None, 5e6, 5e6)],
        ids=["below the limit", "above it", "no limit known"],
    )
    def test_more_than_the_card_may_draw_is_not_believed(
        self, limit: float | None, joules: float, expected: float | None
    ) -> None:
        clock = Clock()
        meter = EnergyMeter([Counted(0.0, joules, limit=limit)], clock=clock.perf_counter)
        assert drawn(meter, lambda: clock.work(10.0)) == [expected]

    def test_counters_that_overflow_are_read_in_time(self) -> None:
        clock = Clock()
        device = Counted(0.0, 10.0, 25.0)
        meter = EnergyMeter([device], clock=clock.perf_counter)
        meter.start()
        for _ in range(3):  # log lines
            clock.work(LONGEST_SECONDS / 2 - 0.001)
            meter.keep_up()
        assert device.left == [25.0]
        assert meter.joules() == [25.0]
        meter.keep_up()  # it does not run

    def test_a_card_of_two_ranks_is_counted_by_none(self) -> None:
        one, other = Counted(0.0, 1.0), spec("cuda", 1, uuid="GPU-1")
        assert drawn(EnergyMeter([one], [one.spec, other])) == [None]
        assert drawn(EnergyMeter([one], [one.spec, replace(other, uuid="GPU-2")])) == [1.0]

    def test_a_processor_has_no_counter_of_its_own(self) -> None:
        device = CpuBackend(spec("cpu"))
        meter = EnergyMeter([device], [device.spec])
        assert meter.joules() == [None]  # nothing was started
        assert drawn(meter) == [None]


class TestNvidia:
    def two_cards(self) -> list[FakeCard]:
        return [replace(card, energy=5_000_000) for card in cards_like(FakeCard(), 2)]

    def measure(
        self, nvml: FakeNvml | None, root: Path, drawing: FakeCard, uuid: str | None, pci: str | None = None
    ) -> float | None:
        device = CudaBackend(spec("cuda", uuid=uuid, pci=pci))
        meter = EnergyMeter([device], machine=machine_with(nvml, root))

        def draw() -> None:
            if drawing.energy is not None:
                drawing.energy += 12_500

        (told,) = drawn(meter, draw)
        assert nvml is None or nvml.opened == 0
        return told

    def test_millijoules_of_the_card_by_uuid(self, tmp_path: Path) -> None:
        cards = self.two_cards()
        nvml = FakeNvml(cards)
        assert self.measure(nvml, tmp_path, cards[1], cards[1].uuid) == 12.5
        assert self.measure(nvml, tmp_path, cards[1], cards[0].uuid) is None  # the other stood still

    def test_by_address_where_there_is_no_uuid(self, tmp_path: Path) -> None:
        cards = self.two_cards()
        assert self.measure(FakeNvml(cards), tmp_path, cards[1], None, "0000:02:00.0") == 12.5
        assert self.measure(FakeNvml(cards), tmp_path, cards[1], None, None) is None

    @pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND, GPU_IS_LOST])
    def test_a_query_that_fails(self, tmp_path: Path, code: int) -> None:
        failing = {"nvmlDeviceGetTotalEnergyConsumption": nvml_error(code)}
        card = FakeCard(energy=1, fails=failing)
        assert self.measure(FakeNvml([card]), tmp_path, card, card.uuid) is None

    def test_cards_before_volta_and_old_libraries(self, tmp_path: Path) -> None:
        pascal, card = FakeCard(), FakeCard(energy=1)
        assert self.measure(FakeNvml([pascal]), tmp_path, pascal, pascal.uuid) is None
        old = FakeNvml([card], lacks=["nvmlDeviceGetTotalEnergyConsumption"])
        assert self.measure(old, tmp_path, card, card.uuid) is None

    def test_no_library_and_no_driver(self, tmp_path: Path) -> None:
        card = FakeCard(energy=1)
        assert self.measure(None, tmp_path, card, card.uuid) is None
        assert self.measure(FakeNvml([card], init=nvml_error(9)), tmp_path, card, card.uuid) is None

    def test_an_instance_is_not_told_its_cards_energy(self, tmp_path: Path) -> None:
        instance = FakeInstance()
        card = FakeCard(energy=1, instances=[instance])
        assert self.measure(FakeNvml([card]), tmp_path, card, instance.uuid, "0000:01:00.0") is None


class TestAmd:
    def measure(self, smi: FakeAmdSmi | None, root: Path, counts: Sequence[object]) -> float | None:
        libraries = {"amdsmi": smi} if smi is not None else {}
        machine = recorded_machine(root, RX_7900_XTX, libraries=libraries)
        meter = EnergyMeter([HipBackend(spec("hip", pci=RX_7900_XTX.address))], machine=machine)
        (name, *_) = smi.energy if smi is not None else ("",)
        if smi is not None:
            smi.energy[name] = counts[0]

        def draw() -> None:
            if smi is not None:
                smi.energy[name] = counts[1]

        (told,) = drawn(meter, draw)
        assert smi is None or smi.opened == 0
        return told

    @pytest.mark.parametrize("name", ["energy_accumulator", "power"], ids=["ROCm 6.4", "before"])
    def test_a_count_times_its_resolution(self, tmp_path: Path, name: str) -> None:
        smi = FakeAmdSmi([RX_7900_XTX])
        smi.energy = {name: 0, "counter_resolution": 15.3}
        assert self.measure(smi, tmp_path, [1_000_000, 3_000_000]) == pytest.approx(30.6)

    def test_what_is_not_told(self, tmp_path: Path) -> None:
        assert self.measure(None, tmp_path / "none", [0, 0]) is None
        failing = FakeAmdSmi([RX_7900_XTX], fails=["amdsmi_get_energy_count"])
        assert self.measure(failing, tmp_path / "fails", [1, 2]) is None
        assert self.measure(FakeAmdSmi([RX_7900_XTX]), tmp_path / "text", ["N/A", "N/A"]) is None
        assert self.measure(FakeAmdSmi([RX_7900_XTX]), tmp_path / "zero", [0, 0]) is None


class TestIntel:
    @pytest.mark.parametrize(
        ("card", "file"),
        [(ARC_A770, "energy1_input"), (ARC_B580, "energy1_input"), (ARC_B580, "energy2_input")],
        ids=["i915", "xe", "xe's package"],
    )
    def test_microjoules_of_the_kernel(self, tmp_path: Path, card: KernelCard, file: str) -> None:
        known = replace(card, sensors={file: 1_000_000})
        machine = recorded_machine(tmp_path, known)
        meter = EnergyMeter([XpuBackend(spec("xpu", pci=known.address))], machine=machine)
        (folder,) = (pci_folder(tmp_path, known) / "hwmon").iterdir()
        assert drawn(meter, lambda: (folder / file).write_text("43000000\n")) == [42.0]

    @pytest.mark.parametrize("sensors", [{}, {"temp1_input": 4}, {"energy1_input": "off"}])
    def test_what_is_not_told(self, tmp_path: Path, sensors: dict[str, object]) -> None:
        known = replace(ARC_A770, sensors=sensors)
        machine = recorded_machine(tmp_path, known)
        assert drawn(EnergyMeter([XpuBackend(spec("xpu", pci=known.address))], machine=machine)) == [None]
        assert drawn(EnergyMeter([XpuBackend(spec("xpu"))], machine=machine)) == [None]


@pytest.mark.parametrize("backend", [CudaBackend, HipBackend, XpuBackend, CpuBackend])
def test_this_machine_may_be_asked(backend: type[Backend]) -> None:
    """Whatever it has or lacks: a device that is not there has no counter."""
    uuid, pci = "GPU-00000000-0000-0000-0000-000000000000", "ffff:ff:1f.7"
    assert drawn(EnergyMeter([backend(spec("cuda", uuid=uuid, pci=pci))])) == [None]
