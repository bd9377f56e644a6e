"""The sampler on recorded machines: every device once, whatever one of them does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_drivers import ARC_A380, ARC_A770, RX_7900_XTX, UHD_770, FakeAmdSmi, recorded_machine, write
from fake_nvml import GPU_IS_LOST, FakeCard, FakeNvml, cards_like, error, machine_with, put_on_bus
from support import plan_on

from hetexp.core.device import GIB, DeviceSpec
from hetexp.hardware.detection.inventory import detect
from hetexp.hardware.detection.machine import Machine
from hetexp.monitor import sampler as module
from hetexp.monitor.runs import RunWatch
from hetexp.monitor.sample import Sample, User
from hetexp.monitor.sampler import Sampler

CONFIG = {"trainer": {"global_batch_size": 64}, "fault": {"events": []}}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock()


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml(cards_like(FakeCard(), 3))


@pytest.fixture
def sampler(nvml: FakeNvml, tmp_path: Path, clock: Clock) -> Iterator[Sampler]:
    for card in nvml.cards:
        put_on_bus(tmp_path, card.bus_id[4:].lower())
    with Sampler(machine_with(nvml, tmp_path), clock) as opened:
        yield opened


def by_device(samples: list[Sample]) -> dict[str, Sample]:
    return {sample.device.device: sample for sample in samples}


def run_on(folder: Path, *devices: DeviceSpec) -> RunWatch:
    plan_on(devices, CONFIG, run_dir=str(folder)).write(folder / "plan.json")
    watch = RunWatch(folder)
    watch.look()
    return watch


def test_each_card_and_the_processor(sampler: Sampler) -> None:
    found = by_device(sampler.sample())
    assert list(found) == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    card = found["cuda:1"]
    assert (card.utilisation, card.memory_used_bytes, card.memory_total_bytes) == (0.37, 4 * GIB, 24 * GIB)
    assert (card.power_watts, card.clock_mhz, card.fan, card.throttled) == (215.5, 1980, 0.43, ())
    assert len({sample.device.key for sample in found.values()}) == 4


def test_a_card_that_is_lost_hides_no_other(sampler: Sampler, nvml: FakeNvml, clock: Clock) -> None:
    sampler.sample()
    nvml.cards[1].fails = {"*": error(GPU_IS_LOST)}
    found = by_device(sampler.sample())
    lost = found["cuda:1"]
    assert (lost.state, lost.utilisation, lost.memory_used_bytes) == ("lost", None, None)
    assert "lost" in (lost.reason or "")
    assert (found["cuda:0"].utilisation, found["cuda:2"].utilisation) == (0.37, 0.37)
    nvml.cards[1].fails = {"handle": error(GPU_IS_LOST)}  # as it is listed from then on
    clock.now += module.LOST_SECONDS
    again = sampler.sample()
    assert [one.state for one in again] == ["ok", "lost", "ok", "ok"]
    assert again[1].device == lost.device  # the same one, though its driver tells neither UUID nor name
    nvml.cards[1].fails = {}  # it was reset
    clock.now += module.LOST_SECONDS
    assert [one.state for one in sampler.sample()] == ["ok"] * 4


def test_a_driver_that_hangs_on_a_card_hides_no_other(
    sampler: Sampler, nvml: FakeNvml, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.05)
    sampler.sample()
    hanging, second = threading.Event(), nvml.cards[1]
    ask = nvml.nvmlDeviceGetTemperature

    def hangs(handle: FakeCard, *args: int) -> object:
        if handle is second:
            hanging.wait()
        return ask(handle, *args)

    monkeypatch.setattr(nvml, "nvmlDeviceGetTemperature", hangs)
    found = by_device(sampler.sample())
    assert (found["cuda:1"].state, found["cuda:1"].utilisation) == ("ok", None)  # not known yet
    clock.now += module.HANGS_SECONDS
    found = by_device(sampler.sample())
    assert found["cuda:1"].state == "lost"
    assert "has not answered" in (found["cuda:1"].reason or "")
    assert (found["cuda:0"].utilisation, found["cuda:2"].utilisation) == (0.37, 0.37)
    hanging.set()
    for _ in range(100):
        if by_device(sampler.sample())["cuda:1"].utilisation is not None:
            break
    assert by_device(sampler.sample())["cuda:1"].state == "ok"


def test_cards_are_listed_again_now_and_then(sampler: Sampler, nvml: FakeNvml, clock: Clock) -> None:
    sampler.sample()
    times = nvml.times_opened
    for _ in range(30):
        clock.now += 1
        sampler.sample()
    assert nvml.times_opened == times
    nvml.cards.append(cards_like(FakeCard(), 4)[3])
    clock.now += module.LIST_SECONDS
    assert "cuda:3" in by_device(sampler.sample())


def test_who_uses_a_card(sampler: Sampler, nvml: FakeNvml, tmp_path: Path) -> None:
    cards = [card.spec for card in detect(machine_with(nvml, tmp_path / "again"), builds=[]).cards]
    run = run_on(tmp_path, cards[2], cards[0])
    found = by_device(sampler.sample([run]))
    assert found["cuda:0"].users == (User("run", 1),)
    assert found["cuda:1"].users == ()
    assert found["cuda:2"].users == (User("run", 0),)


def test_emulated_devices_are_their_runs_own(tmp_path: Path) -> None:
    specs = [
        DeviceSpec(
            f"emulated:{place}",
            "emulated",
            place,
            "T4",
            "nvidia",
            16 * GIB,
            power_limit_watts=70.0,
        )
        for place in range(2)
    ]
    cpu = DeviceSpec("cpu:0", "cpu", 0, "CPU", "cpu")
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        told = {"step": 1, "train/loss": 1.0, "samples_per_second": 10.0}
        told |= {"device/emulated:0/share": 1.0, "device/emulated:0/samples_per_second": 20.0}
        (folder / "metrics.jsonl").write_text(f"{told}\n".replace("'", '"'))
    runs = [run_on(folder, *specs, cpu) for folder in folders]
    with Sampler(recorded_machine(tmp_path / "machine")) as sampler:
        samples = sampler.sample(runs)
    processor, *emulated = samples
    assert processor.users == (User("run", 2), User("run", 2))
    assert [one.device.emulated for one in emulated] == [True] * 4
    first, second = emulated[:2]
    assert (first.utilisation, first.power_watts, first.users) == (0.5, 35.0, (User("run", 0),))
    assert (first.temperature_celsius, first.clock_mhz, first.fan) == (None, None, None)
    assert (second.utilisation, second.power_watts) == (None, None)
    for run in runs:
        run.close()


def test_the_processors_use_is_that_since_the_last_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2}, raising=False)
    machine = recorded_machine(tmp_path)

    def cores(busy: int, idle: int) -> None:
        other = "cpu1 999 0 0 0 0 0 0 0 0 0"  # not this process's
        own = "\n".join(f"cpu{core} {busy} 0 0 {idle} 0 0 0 0 0 0" for core in (0, 2))
        write(tmp_path, {"/proc/stat": f"cpu 1 2 3 4\n{own}\n{other}\nintr 5"})

    cores(100, 100)
    with Sampler(machine) as sampler:
        assert sampler.sample()[-1].utilisation is None
        cores(130, 110)
        told = sampler.sample()[-1]
        assert told.utilisation == 0.75
        assert (told.memory_total_bytes, told.memory_used_bytes) == (64 * GIB, 16 * GIB)


def test_cards_of_all_vendors_and_integrated_ones(tmp_path: Path) -> None:
    machine: Machine = recorded_machine(
        tmp_path, ARC_A380, UHD_770, RX_7900_XTX, libraries={"amdsmi": FakeAmdSmi([RX_7900_XTX])}
    )
    with Sampler(machine) as sampler:
        found = sampler.sample()
    assert {(one.device.vendor, one.device.integrated) for one in found} == {
        ("intel", False),
        ("intel", True),
        ("amd", False),
        ("cpu", False),
    }


def test_a_card_that_no_program_can_use_is_told(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, ARC_A770, denied=["/dev/dri/renderD128"])
    with Sampler(machine) as sampler:
        card = sampler.sample()[0]
    assert card.state == "unusable"
    assert "render" in (card.reason or "")


def test_a_machine_without_anything_still_has_its_processor(tmp_path: Path) -> None:
    with Sampler(recorded_machine(tmp_path)) as sampler:
        assert [one.device.device for one in sampler.sample()] == ["cpu"]
