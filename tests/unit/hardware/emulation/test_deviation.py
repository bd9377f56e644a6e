"""The hidden truth about an emulated card: bounded, seeded, and nowhere to be read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.hardware.catalogue import card
from hetexp.hardware.emulation.deviation import FACTOR_RANGE, JITTER, KINK_BATCHES, KINK_RANGE, Deviation
from hetexp.hardware.emulation.emulated import EmulatedBackend

FIXED, PER_SAMPLE = 0.25, 0.5
seeds, indices = st.integers(0, 2**40), st.integers(0, 63)


def mean(deviation: Deviation, samples: int, passes: int = 400) -> float:
    """Jitter averages out: its mean over so many passes is within 0.5 %."""
    return sum(deviation.seconds(FIXED, PER_SAMPLE, samples) for _ in range(passes)) / passes


def factor(deviation: Deviation) -> float:
    return mean(deviation, 1) / (FIXED + PER_SAMPLE)


@given(indices, st.integers(0, 4096))
def test_without_a_seed_a_card_is_its_model(index: int, samples: int) -> None:
    deviation = Deviation(None, index)
    assert [deviation.seconds(FIXED, PER_SAMPLE, samples) for _ in range(3)] == [
        FIXED + PER_SAMPLE * samples
    ] * 3


@given(seeds, indices, st.integers(0, KINK_BATCHES[0]))
def test_factor_and_jitter_are_bounded(seed: int, index: int, samples: int) -> None:
    deviation = Deviation(seed, index)
    model = FIXED + PER_SAMPLE * samples
    ratios = [deviation.seconds(FIXED, PER_SAMPLE, samples) / model for _ in range(50)]
    assert min(ratios) >= FACTOR_RANGE[0] * (1 - JITTER)
    assert max(ratios) <= FACTOR_RANGE[1] * (1 + JITTER)
    assert max(ratios) / min(ratios) <= (1 + JITTER) / (1 - JITTER) + 1e-12
    assert len(set(ratios)) > 40  # every pass is a little different


def test_factors_fill_their_range() -> None:
    found = [factor(Deviation(seed, 0)) for seed in range(60)]
    assert min(found) < 0.75 and max(found) > 1.35
    assert any(one < 0.97 for one in found) and any(one > 1.03 for one in found)


@pytest.mark.parametrize("seed", range(8))
def test_one_kink(seed: int) -> None:
    """A sample costs the same up to some batch size and more from there on."""
    low, high = KINK_BATCHES
    sizes = [*range(0, 4 * high + 1, 8)]
    # The same jitter for every size: what is left is the curve.
    curve = [Deviation(seed, 0).seconds(FIXED, PER_SAMPLE, size) for size in sizes]
    slopes = [(b - a) / 8 for a, b in zip(curve, curve[1:], strict=False)]
    before, after = slopes[0], slopes[-1]
    assert KINK_RANGE[0] - 1e-9 <= after / before <= KINK_RANGE[1] + 1e-9
    kinks = [i for i, slope in enumerate(slopes) if slope != pytest.approx(before, rel=1e-9)]
    first = kinks[0]
    assert kinks == list(range(first, len(slopes)))
    assert slopes[first + 1 :] == pytest.approx([after] * (len(slopes) - first - 1))
    assert low - 8 <= sizes[first] <= high


def test_the_same_seed_is_the_same_card() -> None:
    one, other = Deviation(7, 2), Deviation(7, 2)
    sizes = [1, 64, 512, 3]
    assert [one.seconds(FIXED, PER_SAMPLE, n) for n in sizes] == [
        other.seconds(FIXED, PER_SAMPLE, n) for n in sizes
    ]


def test_devices_and_seeds_differ() -> None:
    cards = [(seed, index) for seed in (0, 1, 12, 123) for index in range(8)]
    found = {Deviation(*card).seconds(FIXED, PER_SAMPLE, 1) for card in cards}
    assert len(found) == len(cards)


def test_nothing_of_it_can_be_read(tmp_path: Path) -> None:
    """What planner and policies see of a device that deviates: the seed, and the figures of its card."""
    assert not {field.name for field in dataclasses.fields(DeviceSpec)} & {"deviation", "factor", "kink"}
    spec = EmulatedBackend.describe_card(0, card("rtx_3090"))
    before = dataclasses.asdict(spec)
    backend = EmulatedBackend(spec)
    backend.deviation_seed = 7
    assert dataclasses.asdict(backend.spec) == before
    plan = Plan(
        run_id="x",
        run_dir=str(tmp_path),
        name="x",
        group=None,
        config={"hardware": {"deviation_seed": 7}},
        devices=(backend.spec,),
        strategy="ddp",
        shares=(1.0,),
        local_batch_sizes=(1,),
        collective_backend="gloo",
        threads=(1,),
    )
    plan.write(tmp_path / "plan.json")
    hidden = Deviation(7, 0)
    secrets = {hidden._factor, hidden._kink}

    def numbers(value: object) -> set[float]:
        if isinstance(value, dict):
            return set().union(*map(numbers, value.values())) if value else set()
        if isinstance(value, list):
            return set().union(*map(numbers, value)) if value else set()
        return {float(value)} if isinstance(value, (int, float)) else set()

    written = numbers(json.loads((tmp_path / "plan.json").read_text()))
    assert 7.0 in written
    assert not {n for n in written for s in secrets if abs(n - s) < 1e-9}
