"""NVIDIA cards as NVML tells them, with a faked library: no card is needed, and none is touched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from hetexp.core.device import DeviceSpec
from hetexp.hardware.cpu import CpuBackend
from hetexp.hardware.cuda import CudaBackend

UUIDS = ["GPU-aaaa-0001", "GPU-aabb-0002", "GPU-cccc-0003"]
NAMES = ["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3060", "Tesla T4"]


class FakeNvml(ModuleType):
    """`pynvml` with three cards."""

    class NVMLError(Exception):
        """The library's own error."""

    def __init__(self, as_bytes: bool = False) -> None:
        super().__init__("pynvml")
        self.opened = 0
        self.fails_in = ""
        self.count = len(UUIDS)
        self._text: Callable[[str], str | bytes] = str.encode if as_bytes else str

    def _may_fail(self, name: str) -> None:
        if self.fails_in == name:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:
        self._may_fail("init")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self._text("555.42")

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._may_fail("handle")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        return self._text(UUIDS[handle])

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self._text(NAMES[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        self._may_fail("memory")
        return SimpleNamespace(total=(handle + 1) * 10**9)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_every_card_is_described(nvml: FakeNvml) -> None:
    cards = CudaBackend.detect()
    assert [card.id for card in cards] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [card.name for card in cards] == NAMES
    assert [card.uuid for card in cards] == UUIDS
    assert [card.memory_bytes for card in cards] == [10**9, 2 * 10**9, 3 * 10**9]
    assert {(card.vendor, card.backend, card.driver) for card in cards} == {("nvidia", "cuda", "555.42")}
    assert nvml.opened == 0


def test_older_libraries_return_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(as_bytes=True))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    card = CudaBackend.detect()[0]
    assert (card.name, card.uuid, card.driver) == (NAMES[0], UUIDS[0], "555.42")


def test_no_cards(nvml: FakeNvml) -> None:
    nvml.count = 0
    assert CudaBackend.detect() == []
    assert nvml.opened == 0


@pytest.mark.parametrize("call", ["init", "handle", "memory"])
def test_a_driver_that_fails_means_no_card(nvml: FakeNvml, call: str) -> None:
    nvml.fails_in = call
    assert CudaBackend.detect() == []
    assert nvml.opened == 0


def test_a_library_that_is_not_there_means_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert CudaBackend.detect() == []


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        ("", []),
        ("0", [0]),
        ("1", [1]),
        ("2,0", [2, 0]),  # in the mask's order
        (" 1 , 2 ", [1, 2]),
        ("GPU-cccc-0003", [2]),
        ("GPU-cccc", [2]),  # a prefix that is one card's only
        ("GPU-aab,GPU-aaa", [1, 0]),
        ("GPU-cccc-0003,0", [2, 0]),
        ("GPU-aa", []),  # a prefix of two cards names none
        ("GPU-dddd", []),
        ("3", []),
        ("-1", []),
        ("0,-1,1", [0]),  # the list ends at the first entry that names no card
        ("0,GPU-dddd,1", [0]),
        ("1,9,0", [1]),
        ("MIG-1234", []),
        ("none", []),
        ("1,1,0", [1, 0]),
        ("0,GPU-aaaa", [0]),
    ],
)
def test_the_mask_is_honoured(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, mask: str, visible: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    cards = CudaBackend.detect()
    assert [card.uuid for card in cards] == [UUIDS[i] for i in visible]
    assert [card.name for card in cards] == [NAMES[i] for i in visible]
    assert [card.memory_bytes for card in cards] == [(i + 1) * 10**9 for i in visible]
    # Numbered as torch would number them under the same mask.
    assert [card.id for card in cards] == [f"cuda:{i}" for i in range(len(visible))]
    assert nvml.opened == 0


def test_a_rank_sees_its_card_by_uuid(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    environments = [CudaBackend.environment(card) for card in CudaBackend.detect()]
    assert environments == [{"CUDA_VISIBLE_DEVICES": UUIDS[2]}, {"CUDA_VISIBLE_DEVICES": UUIDS[1]}]


def test_without_a_uuid_the_index_has_to_do() -> None:
    spec = DeviceSpec(id="cuda:3", backend="cuda", index=3, name="old", vendor="nvidia")
    assert CudaBackend.environment(spec) == {"CUDA_VISIBLE_DEVICES": "3"}


def test_a_cpu_rank_sees_no_card() -> None:
    assert CpuBackend.environment(CpuBackend.describe(0)) == {"CUDA_VISIBLE_DEVICES": ""}
