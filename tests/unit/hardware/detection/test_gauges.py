"""Cards read again and again: what is not told is null, and a card that is lost hides no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest
from fake_drivers import (
    ARC_A770,
    GIB,
    RX_7900_XTX,
    UHD_770,
    FakeAmdSmi,
    FakeZes,
    ZesCard,
    mac_commands,
    pci_folder,
    recorded_machine,
    write,
)
from fake_nvml import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    NOT_SUPPORTED,
    UNINITIALIZED,
    FakeCard,
    FakeInstance,
    FakeNvml,
    cards_like,
    error,
    machine_with,
)

from hetexp.hardware.backends.mps import STATISTICS
from hetexp.hardware.base import CardLostError, Gauge
from hetexp.hardware.detection.detected import Reading
from hetexp.hardware.detection.inventory import detect, gauges
from hetexp.hardware.detection.machine import Machine

FIELDS = {
    "nvmlDeviceGetMemoryInfo": {"memory_free_bytes"},
    "nvmlDeviceGetUtilizationRates": {"utilisation"},
    "nvmlDeviceGetTemperature": {"temperature_celsius"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetClockInfo": {"clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetFanSpeed": {"fan"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"throttled"},
}
NEVER = {"fan_rpm", "processes"}


@contextmanager
def watched(machine: Machine) -> Iterator[list[Gauge | None]]:
    with gauges(detect(machine, builds=[]).cards, machine) as opened:
        yield opened


def unknown(reading: Reading) -> set[str]:
    return {field.name for field in fields(reading) if getattr(reading, field.name) is None}


@pytest.mark.parametrize("query", FIELDS)
def test_nvml_that_does_not_tell_a_field_costs_that_field(tmp_path: Path, query: str) -> None:
    card = FakeCard(fails={query: error(NOT_SUPPORTED)})
    with watched(machine_with(FakeNvml([card]), tmp_path)) as (gauge,):
        assert gauge is not None
        assert unknown(gauge()) == NEVER | FIELDS[query]


@pytest.mark.parametrize("code", [LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, UNINITIALIZED])
def test_nvml_that_does_not_start_any_more_tells_nothing(tmp_path: Path, code: int) -> None:
    nvml = FakeNvml([FakeCard()])
    machine = machine_with(nvml, tmp_path)
    cards = detect(machine, builds=[]).cards
    nvml.init = error(code)
    with gauges(cards, machine) as opened:
        assert opened == [None]


def test_a_card_that_is_lost_hides_no_other(tmp_path: Path) -> None:
    nvml = FakeNvml(cards_like(FakeCard(), 3))
    with watched(machine_with(nvml, tmp_path)) as opened:
        first, second, third = (gauge for gauge in opened if gauge is not None)
        assert second().utilisation == 0.37
        nvml.cards[1].fails = {"*": error(GPU_IS_LOST)}
        with pytest.raises(CardLostError, match="lost"):
            second()
        nvml.cards[2].utilisation = 99
        assert (first().utilisation, third().utilisation) == (0.37, 0.99)
        asked = len(nvml.asked)
        with pytest.raises(CardLostError):
            second()
        assert len(nvml.asked) == asked  # a driver may hang on such a card
    assert nvml.opened == 0


def test_nvml_is_opened_once_and_processes_are_not_asked(tmp_path: Path) -> None:
    nvml = FakeNvml(cards_like(FakeCard(), 2))
    with watched(machine_with(nvml, tmp_path)) as opened:
        times, asked = nvml.times_opened, len(nvml.asked)
        for gauge in [*opened, *opened]:
            assert gauge is not None
            gauge()
        assert nvml.times_opened == times
        assert not [name for name in nvml.asked[asked:] if "Processes" in name]


def test_an_instance_has_its_own_memory_and_not_its_cards_power(tmp_path: Path) -> None:
    card = FakeCard(name="NVIDIA A100-SXM4-40GB", instances=[FakeInstance()])
    with watched(machine_with(FakeNvml([card]), tmp_path)) as (gauge,):
        assert gauge is not None
        told = gauge()
    assert (told.memory_free_bytes, told.power_watts, told.temperature_celsius) == (4 * GIB, None, 61.0)


def test_amds_card(tmp_path: Path) -> None:
    clocks = {"freq1_input": 2_371_000_000, "freq2_input": 1_249_000_000, "pwm1": 51, "pwm1_max": 255}
    card = replace(RX_7900_XTX, sensors={**RX_7900_XTX.sensors, **clocks})
    smi = FakeAmdSmi([card])
    smi.throttling = 1 << 1 | 1 << 17 | 1 << 36
    with watched(recorded_machine(tmp_path, card, libraries={"amdsmi": smi})) as (gauge,):
        assert gauge is not None
        told = gauge()
        assert (told.utilisation, told.power_watts, told.memory_free_bytes) == (0.07, 34.0, 21 * GIB)
        assert (told.clock_mhz, told.memory_clock_mhz, told.fan) == (2371.0, 1249.0, 0.2)
        assert told.throttled == ("power cap", "current limit")
        folder = pci_folder(tmp_path, card)
        folder.rename(folder.with_name("gone"))
        with pytest.raises(CardLostError, match="no longer on the PCI bus"):
            gauge()
    assert smi.opened == 0


def test_intels_card_tells_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("hetexp.hardware.backends.xpu.time.monotonic", lambda: now)
    zes = ZesCard(ARC_A770.address, active=(1_000, 10_000))
    card = replace(
        ARC_A770,
        sensors={"energy1_input": 5_000_000, "fan1_input": 1200},
        drm_files={**ARC_A770.drm_files, "gt/gt0/rps_act_freq_mhz": 2400, "lmem_avail_bytes": 9 * GIB},
    )
    with watched(recorded_machine(tmp_path, card, UHD_770, libraries={"pyzes": FakeZes(zes)})) as opened:
        integrated, discrete = opened
        assert integrated is not None
        assert discrete is not None
        zes.active = (4_000, 16_000)
        (sensor,) = pci_folder(tmp_path, card).glob("hwmon/*/energy1_input")
        sensor.write_text("305000000\n")
        now += 2.0
        told = discrete()
        assert (told.utilisation, told.power_watts) == (0.5, 150.0)
        assert (told.clock_mhz, told.fan, told.fan_rpm) == (2400.0, None, 1200.0)
        assert (told.memory_free_bytes, told.throttled) == (9 * GIB, None)
        zes.active = (0, 17_000)  # the driver was loaded anew
        assert discrete().utilisation is None
        assert integrated().memory_free_bytes == 32 * GIB
        write(tmp_path, {f"/sys/bus/pci/devices/{card.address}/config": b"\xff\xff"})
        with pytest.raises(CardLostError, match="PCI bus"):
            discrete()
        assert integrated().utilisation is None  # nobody tells it


def test_apples_gpu(tmp_path: Path) -> None:
    told = '  "PerformanceStatistics" = {"Tiler Utilization %"=3,"Device Utilization %"=37,"x"=1}'
    commands = {**mac_commands(), " ".join(STATISTICS): told}
    with watched(recorded_machine(tmp_path, platform="darwin", commands=commands)) as (gauge,):
        assert gauge is not None
        reading = gauge()
    assert reading.utilisation == 0.37
    assert unknown(reading) == {field.name for field in fields(reading)} - {
        "memory_free_bytes",
        "utilisation",
    }
