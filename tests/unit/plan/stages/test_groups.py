"""Groups of pipelines: by hand, against every grouping and split, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetexp.core.cost.calibration import DeviceCalibration
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.stage import Layer
from hetexp.plan.stages.groups import Grouping, choose_groups
from hetexp.plan.stages.pipelines import Cut, Pipeline, StageDevice
from hetexp.plan.stages.search import choose_stages


def of(count: int) -> Callable[[int, int, int], int]:
    return lambda stages, ranks, samples: min(count, samples)


def layers(count: int, weight: int = 0) -> list[Layer]:
    return [Layer("a layer", 1 / count, weight, weight, 0, 0, 0)] * count


def device(per_sample: float = 1.0, memory: int | None = None, fixed: float = 0.0) -> StageDevice:
    return StageDevice(DeviceCalibration(SpeedCurve(fixed, per_sample), 0.5, 0.0, 0.0), memory)


def shape(grouping: Grouping) -> list[tuple[int, ...]]:
    return [cut.group for cut in grouping.cuts]


def test_devices_that_hold_the_model_go_by_themselves() -> None:
    """No bubble: nothing is quicker where the exchange costs nothing."""
    pipeline = Pipeline(layers(4), [device(1.0), device(3.0)], microbatches=of(4))
    found = choose_groups(pipeline, [0, 1], 16)
    assert sorted(shape(found)) == [(0,), (1,)]
    assert sorted(found.batch_sizes) == [4, 12]
    assert found.step_seconds == pytest.approx(12.0)
    assert found.bubble == pytest.approx(0.0)


def test_a_dear_exchange_makes_one_pipeline() -> None:
    pipeline = Pipeline(layers(4), [device(1.0), device(3.0)], microbatches=of(4))
    found = choose_groups(pipeline, [0, 1], 16, lambda cuts: 100.0 if len(cuts) > 1 else 0.0)
    assert shape(found) == [(0, 1)]
    assert found.batch_sizes == (16,)


def test_memory_makes_pairs() -> None:
    """No device holds the model, two do: two pipelines of two have smaller bubbles than one of four."""
    devices = [device(memory=130) for _ in range(4)]
    pipeline = Pipeline(layers(4, weight=25), devices, microbatches=of(4))
    found = choose_groups(pipeline, range(4), 16)
    assert [len(group) for group in shape(found)] == [2, 2]
    assert found.batch_sizes == (8, 8)
    with pytest.raises(ValueError, match="no cut fits"):
        choose_groups(Pipeline(layers(4, weight=500), devices), range(4), 16)


def test_unequal_groups_get_unequal_parts() -> None:
    """Three small devices and one that is three times as fast and holds the model alone."""
    devices = [device(1.0, memory=300), *[device(3.0, memory=100)] * 3]
    pipeline = Pipeline(layers(6, weight=25), devices, microbatches=of(8))
    found = choose_groups(pipeline, range(4), 64)
    assert sorted(map(len, shape(found))) == [1, 3]
    alone = next(cut for cut in found.cuts if len(cut.group) == 1)
    assert alone.samples > 32
    assert sum(found.batch_sizes) == 64
    seconds = [cut.step.step_seconds for cut in found.cuts]
    assert max(seconds) == pytest.approx(min(seconds), rel=0.1)


def test_several_groups_that_are_pipelines() -> None:
    """Alone each device would be quicker; but that is no pipeline at all."""
    pipeline = Pipeline(layers(4), [device(1.0)] * 3, microbatches=of(4))
    assert len(choose_groups(pipeline, range(3), 16).cuts) == 3
    assert sorted(map(len, shape(choose_groups(pipeline, range(3), 16, fewest=2)))) == [1, 2]


def test_given_groups_are_kept() -> None:
    pipeline = Pipeline(layers(4), [device(1.0), device(1.0), device(2.0)], microbatches=of(4))
    found = choose_groups(pipeline, range(3), 16, groups=[[2, 0], [1]])
    assert [set(group) for group in shape(found)] == [{0, 2}, {1}]
    assert sum(found.batch_sizes) == 16
    with pytest.raises(ValueError, match="2 samples are too few for 3 pipelines"):
        choose_groups(pipeline, range(3), 2, groups=[[0], [1], [2]])


def partitions(devices: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    if not devices:
        yield []
        return
    head, *rest = devices
    for count in range(len(rest) + 1):
        for others in combinations(rest, count):
            left = [one for one in rest if one not in others]
            for way in partitions(left):
                yield [(head, *others), *way]


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in splits(total - first, parts - 1):
            yield (first, *rest)


@st.composite
def pipelines(draw: Any) -> Pipeline:
    count = draw(st.integers(1, 3))
    devices = [
        device(draw(st.floats(0.2, 3.0)), draw(st.none() | st.integers(30, 200)), draw(st.floats(0.0, 0.3)))
        for _ in range(count)
    ]
    return Pipeline(layers(draw(st.integers(2, 4)), weight=draw(st.integers(1, 20))), devices, "1F1B", of(3))


@settings(max_examples=25, deadline=None)
@given(pipelines(), st.integers(3, 9), st.floats(0.0, 3.0))
def test_no_grouping_is_much_better(pipeline: Pipeline, samples: int, each: float) -> None:
    def exchange(cuts: Sequence[Cut]) -> float:
        return each * (len(cuts) - 1)

    best = None
    for way in partitions(range(len(pipeline.devices))):
        for counts in splits(samples, len(way)):
            try:
                cuts = [choose_stages(pipeline, group, n) for group, n in zip(way, counts, strict=True)]
            except ValueError:
                continue
            seconds = max(cut.step.step_seconds for cut in cuts) + exchange(cuts)
            best = seconds if best is None else min(best, seconds)
    if best is None:
        with pytest.raises(ValueError, match="no cut fits|cannot be cut"):
            choose_groups(pipeline, range(len(pipeline.devices)), samples, exchange)
        return
    found = choose_groups(pipeline, range(len(pipeline.devices)), samples, exchange)
    assert sum(found.batch_sizes) == samples
    assert sorted(d for group in shape(found) for d in group) == list(range(len(pipeline.devices)))
    assert best * (1 - 1e-9) <= found.step_seconds <= best * 1.1


@pytest.mark.parametrize("count", [8, 12])
def test_many_devices_are_grouped_soon(count: int) -> None:
    """Half of them hold only a third of the model; nobody is left out and no group is far behind."""
    devices = [device(1.0 + i % 4, memory=None if i % 2 else 160) for i in range(count)]
    found = choose_groups(Pipeline(layers(12, weight=20), devices, microbatches=of(8)), range(count), 256)
    assert sorted(d for group in shape(found) for d in group) == list(range(count))
    ideal = 256 / sum(1 / (1.0 + i % 4) for i in range(count))
    assert ideal <= found.step_seconds <= 1.6 * ideal
