"""What the catalogue says of a step: the seconds that emulated devices are paced by, and DDP's buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hetexp.app import compose_config
from hetexp.core.compose.plain import plain
from hetexp.core.config import Config, read_config
from hetexp.core.device import DeviceSpec
from hetexp.data.base import build_data
from hetexp.data.loader import cut
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.catalogue import shipped
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.model.base import build_model
from hetexp.optimizer.build import build_optimizer
from hetexp.plan.device_estimates import CATALOGUE, NOTHING, DeviceEstimates
from hetexp.strategy.ddp import DDP
from hetexp.training.measuring import estimate
from hetexp.training.measuring.catalogue_curves import in_buckets, known_from_catalogue
from hetexp.training.measuring.estimate import RunMemory

GPT = ["model=gpt", "data=text", "model.num_layers=1", "model.embedding_size=16", "data.sequence_length=8"]
RTX = EmulatedBackend.describe_card(0, shipped().cards["rtx_3090"])
ARC = EmulatedBackend.describe_card(1, shipped().cards["arc_a770"])


def config_of(*overrides: str) -> Config:
    return read_config(plain(compose_config(["trainer.global_batch_size=16", *overrides]))[0])


def ask(
    config: Config, *devices: DeviceSpec, precision: str = "float32", emulated: bool = True
) -> DeviceEstimates:
    precisions = (precision,) * len(devices)
    built = RunMemory(config, devices, [1] * len(devices), precisions, DDP())
    return known_from_catalogue(config, devices, precisions, DDP(bucket_cap_mb=25.0), built, emulated)


@pytest.mark.parametrize("overrides", [["model=mlp"], GPT], ids=["mlp", "gpt"])
@pytest.mark.parametrize("cuts", [(1, None), (2, None), (1, 3)], ids=["whole", "accumulate", "microbatch"])
def test_a_step_is_what_the_emulated_device_takes(overrides: list[str], cuts: tuple[int, int | None]) -> None:
    accumulate, size = cuts
    extra = [f"trainer.accumulate={accumulate}", f"trainer.microbatch_size={size or 'null'}"]
    config = config_of(*overrides, *extra)
    known = ask(config, RTX, ARC)
    assert known.sources == (CATALOGUE, CATALOGUE)
    data = build_data(config.data)
    model = build_model(config.model, data.facts)
    inputs, _ = next(iter(DataLoader(data.train, batch_size=2)))
    sample_bytes = inputs[:1].numel() * inputs.element_size()
    for spec, one in zip((RTX, ARC), known.devices, strict=True):
        assert one is not None
        backend = EmulatedBackend(spec)
        backend.attach(model, build_optimizer(config.optimizer, model), inputs)
        for count in (4, 6, 9, 16):
            work = backend.modelled_work(cut(count, accumulate, size), sample_bytes)
            step = sum(work.forward) + sum(work.backward) + work.update
            assert one.curve.seconds(count) == pytest.approx(step, rel=1e-12)
        likely = backend.modelled_work([8], sample_bytes)
        expected = likely.backward[0] / (likely.forward[0] + likely.backward[0])
        assert one.backward_share == pytest.approx(expected)


def test_a_slowed_device_and_another_efficiency() -> None:
    config = config_of("model=mlp", "data.size=8")
    facts = shipped().cards["rtx_3090"].model_copy(update={"efficiency": 0.9})
    quick = replace(RTX, card_facts=facts.model_dump(mode="json"))
    found = ask(config, RTX, replace(RTX, slow=3.0), quick).devices
    one, slow, better = (d.curve for d in found if d is not None)
    assert slow.update_seconds == pytest.approx(3 * one.update_seconds)
    link = shipped().cards["rtx_3090"].host_link
    travel = 64 * 4 / (link.gb_per_second * 1e9 * link.efficiency)
    compute = one.seconds_per_sample - travel
    assert slow.seconds_per_sample - travel == pytest.approx(3 * compute)
    assert better.seconds_per_sample - travel == pytest.approx(compute / 2)


def test_real_cards_are_known_by_name_and_others_are_not_known() -> None:
    real = DeviceSpec("cuda:0", "cuda", 0, "NVIDIA GeForce RTX 3090", "nvidia")
    odd = DeviceSpec("cuda:1", "cuda", 1, "NVIDIA Something 9000", "nvidia")
    known = ask(config_of("model=mlp"), real, odd, CpuBackend.describe(0), RTX, emulated=False)
    assert known.sources == (CATALOGUE, NOTHING, NOTHING, CATALOGUE)
    assert known.devices[0] == known.devices[3]
    assert known.devices[1] is known.devices[2] is None
    assert not known.complete
    assert known.linked[0].card_facts == RTX.card_facts
    assert known.linked[1] == odd


def test_a_precision_that_a_card_does_not_have_is_not_guessed() -> None:
    config = config_of("model=mlp", "trainer.precision=float64")
    known = ask(config, RTX, ARC, precision="float64")
    assert known.sources == (CATALOGUE, NOTHING)


def test_attention_is_counted_for_real_cards_too() -> None:
    real = DeviceSpec("cuda:0", "cuda", 0, "NVIDIA GeForce RTX 3090", "nvidia")
    one, other = ask(config_of(*GPT), real, emulated=False).devices, ask(config_of(*GPT), RTX).devices
    assert one[0] is not None
    assert other[0] is not None
    assert one[0].curve.seconds_per_sample >= other[0].curve.seconds_per_sample


def test_a_model_that_does_not_work_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_nets.py").write_text(
        "import torch\n"
        "class Refuses(torch.nn.Module):\n"
        "    def __init__(self): raise RuntimeError('not today')\n"
        "class Breaks(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(64, 10)\n"
        "    def forward(self, x): raise RuntimeError('not this')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, told in (("Refuses", "could not be built"), ("Breaks", "work could not be counted")):
        known = ask(config_of("model=custom", f"model._target_=odd_nets.{name}"), RTX)
        assert known.devices == (None,)
        assert known.reason is not None
        assert told in known.reason


Sized = list[tuple[float, int]]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 100))
def test_buckets_are_those_of_ddp(sizes: list[int], cap: int) -> None:
    """DDP gives one limit where the cap is given, and so does this to torch's own function."""
    tensors = [torch.empty(size) for size in sizes]
    compute: Callable[..., Any] = dist._compute_bucket_assignment_by_size
    indices, _ = compute(tensors, [cap * 4])
    gradients = [(1 / len(sizes), size * 4) for size in sizes]
    found = in_buckets(gradients, cap * 4)
    assert [size for _, size in found] == [sum(sizes[i] * 4 for i in bucket) for bucket in indices]
    done = 0
    for bucket, (fraction, _) in zip(indices, found, strict=True):
        done += len(bucket)
        assert fraction == pytest.approx(done / len(sizes))


def test_a_large_model_is_counted_without_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("model=mlp")
    counted = ask(config, RTX, ARC)
    monkeypatch.setattr(estimate, "LARGE_BYTES", 0)

    def build(*_: Any) -> None:
        raise AssertionError("the model was built with values")

    monkeypatch.setattr(RunMemory, "model_with_values", build)
    assert ask(config, RTX, ARC) == counted
