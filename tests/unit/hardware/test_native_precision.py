"""What a device computes in natively: read from its facts, asked of it, paced and counted when emulated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hetexp.core.device import DeviceSpec
from hetexp.core.precision import choose_precisions
from hetexp.hardware.backend import Backend
from hetexp.hardware.backends.accelerator import AcceleratorBackend
from hetexp.hardware.backends.cpu import CpuBackend, _native_precisions
from hetexp.hardware.catalogue import card
from hetexp.hardware.emulation.emulated import EmulatedBackend

FULL = ("float64", "float32")


@pytest.mark.parametrize(
    ("line", "half"),
    [
        ("flags\t\t: fpu avx2 avx512f f16c", ()),  # f16c converts and does not compute
        ("flags\t\t: avx512f avx512_bf16 amx_tile", ("bfloat16",)),
        ("flags\t\t: amx_bf16 avx512_fp16", ("bfloat16", "float16")),
        ("Features\t: fp asimd fphp asimdhp", ("float16",)),
        ("Features\t: asimd asimdhp bf16", ("bfloat16", "float16")),
        ("model name\t: a CPU with bf16 and avx512_bf16 in its name", ()),
    ],
)
def test_what_the_cores_compute_in(tmp_path: Path, line: str, half: tuple[str, ...]) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\nbugs\t\t: spectre_v1\n")
    assert _native_precisions(cpuinfo) == (*FULL, *half)


def test_a_system_without_such_a_list_claims_nothing(tmp_path: Path) -> None:
    assert _native_precisions(tmp_path / "cpuinfo") == FULL
    precisions = CpuBackend.describe(0).precisions
    assert precisions is not None and set(FULL) <= set(precisions)


def test_an_emulated_card_has_what_its_maker_states() -> None:
    names = ("rtx_3090", "rtx_2080_ti", "arc_a770")
    specs = [EmulatedBackend.describe_card(i, card(name)) for i, name in enumerate(names)]
    assert [set(spec.precisions or ()) for spec in specs] == [set(card(name).tflops) for name in names]
    assert choose_precisions("auto", specs) == ("bfloat16", "float16", "bfloat16")
    assert choose_precisions("auto_common", specs) == ("float16",) * 3


# ---------------------------------------------------------------- the context


def backend() -> CpuBackend:
    return CpuBackend(CpuBackend.describe(0))


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_full_precision_needs_no_context(precision: str) -> None:
    with backend().autocast(precision):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_computes_in_half_and_keeps_float32(precision: str) -> None:
    layer = nn.Linear(8, 4)
    with backend().autocast(precision):
        output = layer(torch.ones(2, 8))
    assert output.dtype is getattr(torch, precision)
    output.float().sum().backward()
    assert layer.weight.dtype is torch.float32
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------- the device in hand


class Card(AcceleratorBackend):
    """A card whose torch module says what the test wants; tensors are the CPU's."""

    torch_type = "cpu"

    def __init__(self, module: Any) -> None:
        super().__init__(DeviceSpec("cuda:0", "cuda", 0, "Card", "nvidia"))
        self.module = module

    @classmethod
    def environment(cls, spec: DeviceSpec) -> dict[str, str]:
        return {}

    def _module(self) -> Any:
        return self.module


@pytest.mark.parametrize("native", [True, False])
def test_imitated_bfloat16_does_not_count(native: bool) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or native

    in_hand = Card(SimpleNamespace(is_bf16_supported=supported))
    assert in_hand.computes_in("bfloat16") is native
    assert in_hand.computes_in("float16") is True


@pytest.mark.parametrize("error", [TypeError, RuntimeError])
def test_a_type_that_cannot_be_held_is_not_computed_in(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    ones = torch.ones

    def refuse(*size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        if dtype is torch.float64:
            raise error("this device has no float64")
        return ones(*size, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "ones", refuse)
    in_hand = Card(SimpleNamespace())
    assert in_hand.computes_in("float64") is False
    assert in_hand.computes_in("float32") is True
    assert in_hand.computes_in("bfloat16") is True  # a module that cannot be asked, a type that can be held


def test_the_cpu_is_not_asked() -> None:
    in_hand: Backend = backend()
    assert in_hand.computes_in("bfloat16") is None


# ---------------------------------------------------------------- emulated


def attached(model: nn.Module, precision: str | None, width: int, **changes: Any) -> EmulatedBackend:
    spec = dataclasses.replace(EmulatedBackend.describe_card(0, card("rtx_2080_ti")), **changes)
    emulated = EmulatedBackend(spec)
    emulated.precision = precision
    emulated.attach(model, torch.optim.SGD(model.parameters()), torch.zeros(2, width))
    return emulated


@pytest.mark.parametrize(
    ("precision", "tflops"), [(None, 13.4), ("float32", 13.4), ("float16", 53.8), ("float64", 0.42)]
)
def test_passes_take_what_they_take_in_the_ranks_precision(precision: str | None, tflops: float) -> None:
    """The weights are float32 all the time, and so is what an update moves."""
    emulated = attached(nn.Linear(512, 512, bias=False), precision, 512)
    work = emulated.modelled_work([1 << 20], 0)
    rate, fixed = tflops * 1e12 * emulated.card.efficiency, emulated.card.overhead_seconds
    assert work.backward[0] == pytest.approx(fixed + 2 * 512 * 512 * (1 << 20) / rate, rel=1e-9)
    bandwidth = emulated.card.bandwidth_gb_per_second * 1e9
    assert work.update == pytest.approx(fixed + 7 * 4 * 512 * 512 / bandwidth, rel=1e-9)


def test_activations_take_half_the_memory_in_half_precision() -> None:
    batch, width, depth = 256, 64, 6
    peaks = {}
    for precision in ("float32", "float16"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))
        emulated = attached(model, precision, width)
        before = emulated.peak_memory_bytes()
        with emulated.autocast(precision):
            model(torch.zeros(batch, width)).sum()
        after = emulated.peak_memory_bytes()
        assert before is not None and after is not None
        peaks[precision] = after - before
    inputs, weights = batch * width * 4, width * width
    assert peaks["float32"] == inputs + depth * batch * width * 4
    # Half of it, and what autocast holds beside it: the inputs and the weights once more, in float16.
    extra = inputs // 2 + depth * weights * 2
    assert peaks["float16"] <= inputs + depth * batch * width * 2 + extra
    assert peaks["float16"] >= inputs + depth * batch * width * 2
