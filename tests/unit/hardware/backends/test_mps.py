"""Apple's GPU on recorded Macs, and what the backend does without torch's counters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_drivers import GIB, mac_commands, recorded_machine

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.backends.mps import MpsBackend
from hetexp.hardware.detection.builds import TorchBuild
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.inventory import detect
from hetexp.hardware.detection.machine import Machine

MPS = TorchBuild(None, version="2.13.0", mps=True)


def mac(tmp_path: Path, commands: dict[str, str] | None = None, **facts: Any) -> Machine:
    commands = mac_commands(**facts) if commands is None else commands
    return replace(recorded_machine(tmp_path, commands=commands), platform="darwin")


def only_card(machine: Machine) -> DetectedCard:
    (card,) = detect(machine, builds=[MPS]).cards
    return card


def test_a_mac_has_one_card_whose_memory_is_the_hosts(tmp_path: Path) -> None:
    card = only_card(mac(tmp_path))
    assert card.spec == DeviceSpec(
        id="mps:0",
        backend="mps",
        index=0,
        number=0,
        name="Apple M2 Max",
        vendor="apple",
        memory_bytes=32 * GIB,
        driver="macOS 15.5",
        integrated=False,
        unified_memory=True,
        precisions=("float32", "float16"),
    )
    assert card.state == "available"
    assert card.reading.memory_free_bytes == 215_000 * 16384


def test_no_more_is_free_than_metal_lends(tmp_path: Path) -> None:
    card = only_card(mac(tmp_path, memory=4 * GIB))
    assert card.reading.memory_free_bytes == int(4 * GIB * 0.65)


@pytest.mark.parametrize(
    ("chip", "bfloat16"),
    [
        ("Apple M1", False),
        ("Apple M2 Ultra", False),
        ("Apple M3", True),
        ("Apple M4 Max", True),
        ("Apple M10 Pro", True),
        ("Apple A18 Pro", False),
    ],
)
def test_bfloat16_is_native_from_the_third_generation_on(tmp_path: Path, chip: str, bfloat16: bool) -> None:
    precisions = only_card(mac(tmp_path, chip=chip)).spec.precisions
    assert precisions is not None
    assert ("bfloat16" in precisions) == bfloat16
    assert "float64" not in precisions


def test_an_old_system_is_told_with_the_fix(tmp_path: Path) -> None:
    card = only_card(mac(tmp_path, system="13.7.4"))
    assert card.why_not == "torch needs macOS 14 or newer for it, and this is 13.7.4; update macOS"


def test_what_a_command_does_not_tell_is_not_known(tmp_path: Path) -> None:
    commands = {key: "hw.optional.arm64: 1" for key in mac_commands() if key.startswith("sysctl")}
    card = only_card(mac(tmp_path, commands=commands))
    assert (card.spec.name, card.spec.memory_bytes, card.spec.driver) == ("Apple GPU", None, None)
    assert (card.reading.memory_free_bytes, card.state) == (None, "available")


@pytest.mark.parametrize("memory", ["0", "", "a lot"])
def test_a_memory_that_says_nothing_is_none(tmp_path: Path, memory: str) -> None:
    commands = {key: text.replace(str(32 * GIB), memory) for key, text in mac_commands().items()}
    assert only_card(mac(tmp_path, commands=commands)).spec.memory_bytes is None


@pytest.mark.parametrize("commands", [{}, mac_commands(arm64="0")])
def test_an_intel_mac_or_one_that_does_not_answer_has_none(tmp_path: Path, commands: dict[str, str]) -> None:
    assert detect(mac(tmp_path, commands=commands), builds=[MPS]).cards == []


def test_other_systems_are_not_asked(tmp_path: Path) -> None:
    machine = recorded_machine(tmp_path, commands=mac_commands())
    assert MpsBackend.cards(machine, []) == []


def test_it_needs_no_mask() -> None:
    assert MpsBackend.environment(_spec()) == {}


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (MPS, None),
        (
            TorchBuild(None, version="2.13.0"),
            "torch 2.13.0 of this interpreter is not built for Apple's GPUs",
        ),
        (TorchBuild("/v/python", problem="it has no torch"), "/v/python cannot drive it: it has no torch"),
    ],
)
def test_only_a_build_for_apples_chips_drives_it(build: TorchBuild, problem: str | None) -> None:
    assert MpsBackend.build_problem(_spec(), build) == problem


def _spec(**more: Any) -> DeviceSpec:
    return DeviceSpec(
        **{"id": "mps:0", "backend": "mps", "index": 0, "name": "Apple M2", "vendor": "apple", **more}
    )


class TestInTheRank:
    """torch.mps has no set_device, no properties and no peak: nothing may ask for them."""

    @pytest.fixture
    def metal(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return 125.0

        metal = SimpleNamespace(
            Event=Event,
            synchronize=lambda: None,
            allocated=GIB,
            recommended_max_memory=lambda: 20 * GIB,
        )
        metal.driver_allocated_memory = lambda: metal.allocated
        monkeypatch.setattr(MpsBackend, "_module", lambda self: metal)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        return metal

    def test_the_device_is_the_only_one(self, metal: SimpleNamespace) -> None:
        assert MpsBackend(_spec()).torch_device() == torch.device("mps", 0)

    @pytest.mark.parametrize(("built", "why"), [(False, "which has no MPS"), (True, "which sees no GPU")])
    def test_a_torch_that_cannot_is_told(
        self, metal: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, built: bool, why: str
    ) -> None:
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
        with pytest.raises(SetupError, match=why):
            MpsBackend(_spec()).torch_device()

    def test_events_measure(self, metal: SimpleNamespace) -> None:
        backend = MpsBackend(_spec())
        assert backend.seconds_between(backend.mark(), backend.mark()) == 0.125

    def test_the_peak_is_the_most_that_was_seen(self, metal: SimpleNamespace) -> None:
        backend = MpsBackend(_spec())
        for allocated in (GIB, 5 * GIB, 2 * GIB):
            metal.allocated = allocated
            backend.mark()
        assert backend.peak_memory_bytes() == 5 * GIB
        metal.allocated = 6 * GIB
        backend.synchronize()
        metal.allocated = GIB
        assert backend.peak_memory_bytes() == 6 * GIB
        assert MpsBackend(_spec()).peak_memory_bytes() == GIB  # each backend looks for itself

    @pytest.mark.parametrize(("memory", "fraction"), [(5 * GIB, 0.25), (30 * GIB, 1.0)])
    def test_a_limit_is_a_fraction_of_what_metal_lends(
        self, metal: SimpleNamespace, memory: int, fraction: float
    ) -> None:
        given: list[float] = []
        metal.set_per_process_memory_fraction = given.append
        assert MpsBackend(_spec(memory_bytes=memory, limited=True)).limit_memory(memory)
        assert given == [fraction]
