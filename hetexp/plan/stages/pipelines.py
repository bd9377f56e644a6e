"""The time and memory of a pipeline with a given cut of the model over some devices.

A device's time for some layers is its time for the whole model (`hetexp.core.cost.speed`) × their part of the
work. The schedule is simulated (`hetexp.core.cost.pipeline`), including messages between the devices.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hetexp.core.cost.calibration import DeviceCalibration
from hetexp.core.cost.pipeline import Order, PipelineStep, PreparedOrder, StageTimes, most_in_flight, order_of
from hetexp.core.cost.speed import BACKWARD_SHARE, SpeedCurve
from hetexp.core.cost.step import Channel
from hetexp.core.stage import Layer

Send = Callable[[int, int, float], float]
"""(device that sends, device that receives, bytes) → seconds from host to host."""
Link = Callable[[int], Channel]
"""Device → its own link to the host, which a pass waits for."""


@dataclass(frozen=True)
class StageDevice:
    """One device that may compute a stage."""

    calibration: DeviceCalibration
    """Speed of a pass over the whole model."""
    memory_bytes: int | None = None
    """Memory for tensors; `None`: not known."""
    fixed_by_work: bool = True
    """Whether a part of the model has a part of a pass's fixed costs, like its kernels; an emulated card has
    all fixed costs in every pass."""
    name: str = field(default="", compare=False)
    """Name in messages."""

    @classmethod
    def of_share(cls, share: float, memory_bytes: int | None = None, name: str = "") -> StageDevice:
        """Return a device of which only its share of the work is known; its times are relative."""
        curve = SpeedCurve(0.0, 1.0 / share)
        return cls(DeviceCalibration(curve, BACKWARD_SHARE, 0.0, 0.0), memory_bytes, name=name)

    def seconds(self, work: float, samples: int) -> tuple[float, float]:
        """Return forward and backward seconds of a part of the model over so many samples."""
        if samples == 0:
            return 0.0, 0.0
        curve = self.calibration.curve
        fixed = curve.fixed_seconds
        whole = curve.pass_seconds(samples) - fixed
        spent = work * whole + (work if self.fixed_by_work else 1.0) * fixed
        backward = spent * self.calibration.backward_share
        return spent - backward, backward


@dataclass(frozen=True)
class Cut:
    """One pipeline: the layers of each device, and its step."""

    group: tuple[int, ...]
    """Its devices, in the order of their first stages."""
    devices: tuple[int, ...]
    """Device of each stage; a device may have several stages."""
    ends: tuple[int, ...]
    """First layer after each stage."""
    samples: int
    """Samples of a step."""
    step: PipelineStep
    memory_bytes: tuple[int, ...]
    """Memory need of each device of the group."""

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Return `[first, end)` of each stage."""
        return list(zip((0, *self.ends[:-1]), self.ends, strict=True))


@dataclass
class Pipeline:
    """A model with the devices and the schedule of its pipelines, to judge cuts by."""

    layers: Sequence[Layer]
    devices: Sequence[StageDevice]
    schedule: str = "1f1b"
    """In torch's spelling or ours; a similar one replaces a schedule that cannot be simulated."""
    microbatches: Callable[[int, int, int], int] = lambda stages, ranks, samples: 4 * stages
    """(stages, devices, samples of a step) → microbatches of a step; some may be empty."""
    stages_a_rank: int = 1
    returns: bool = False
    """Whether the devices' second stages go through them backwards (a V)."""
    send: Send = lambda sender, receiver, num_bytes: 0.0
    link: Link = lambda device: Channel()
    _sums: dict[str, list[float]] = field(init=False, repr=False)
    _orders: dict[tuple[int, int], tuple[PreparedOrder, tuple[int, ...]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        self._sums = {
            name: [0.0, *accumulate(float(getattr(layer, name)) for layer in self.layers)]
            for name in ("work", "trained_bytes", "activation_bytes")
        }
        held = [
            layer.weight_bytes + layer.buffer_bytes + layer.trained_bytes + layer.state_bytes
            for layer in self.layers
        ]
        self._sums["held"] = [0.0, *accumulate(map(float, held))]

    def order(self, num_ranks: int, microbatches: int) -> tuple[PreparedOrder, tuple[int, ...]]:
        """Return each device's actions in a pipeline, and the most microbatches that each stage keeps."""
        key = (num_ranks, microbatches)
        if key not in self._orders:
            order, stages = self._order(*key), self.num_stages(num_ranks)
            prepared = PreparedOrder(order, [microbatches] * stages)
            self._orders[key] = prepared, most_in_flight(order, stages)
        return self._orders[key]

    def _order(self, num_ranks: int, microbatches: int) -> Order:
        several = "zbvzerobubble" if self.returns else "loopedbfs"
        with contextlib.suppress(ValueError):
            return order_of(self.schedule, num_ranks, microbatches, self.stages_a_rank)
        return order_of(
            several if self.stages_a_rank > 1 else "1f1b", num_ranks, microbatches, self.stages_a_rank
        )

    def num_stages(self, num_ranks: int) -> int:
        return num_ranks * self.stages_a_rank

    def places(self, num_ranks: int) -> list[int]:
        """Return the place in its group of the device of each stage."""
        turns = [divmod(stage, num_ranks) for stage in range(self.num_stages(num_ranks))]
        return [num_ranks - 1 - at if self.returns and turn % 2 else at for turn, at in turns]

    def sizes(self, num_ranks: int, samples: int) -> list[int]:
        """Return the samples of each microbatch; they differ by at most one."""
        count = self.microbatches(self.num_stages(num_ranks), num_ranks, samples)
        small, larger = divmod(samples, count)
        return [small + 1] * larger + [small] * (count - larger)

    def of(self, name: str, first: int, end: int) -> float:
        """Return a sum over layers: `work`, `trained_bytes`, `activation_bytes`, or `held` (all others)."""
        return self._sums[name][end] - self._sums[name][first]

    def need(self, first: int, end: int, in_flight: int, size: int) -> int:
        """Return the bytes of a stage: weights, buffers, gradients, optimizer state and activations."""
        kept = in_flight * size * self.of("activation_bytes", first, end)
        return math.ceil(self.of("held", first, end) + kept)

    def judge(self, group: Sequence[int], ends: Sequence[int], samples: int) -> Cut:
        """Return a cut with its step and memory."""
        sizes = self.sizes(len(group), samples)
        order, kept = self.order(len(group), len(sizes))
        devices = [group[place] for place in self.places(len(group))]
        bounds = list(zip((0, *ends[:-1]), ends, strict=True))
        whole = self._sums["trained_bytes"][-1] or 1.0
        stages, updates, memory = [], dict.fromkeys(group, 0.0), dict.fromkeys(group, 0)
        for index, (device, (first, end)) in enumerate(zip(devices, bounds, strict=True)):
            alike = {size: self.pass_seconds(devices, index, first, end, size) for size in set(sizes)}
            both = [alike[size] for size in sizes]
            after = self._message(devices, index, index + 1, end, sizes)
            before = self._message(devices, index, index - 1, first, sizes)
            stages.append(StageTimes(tuple(f for f, _ in both), tuple(b for _, b in both), after, before))
            update = self.devices[device].calibration.curve.update_seconds
            updates[device] += update * self.of("trained_bytes", first, end) / whole
            memory[device] += self.need(first, end, kept[index], sizes[0])
        step = order.play(stages, list(updates.values()))
        return Cut(tuple(group), tuple(devices), tuple(ends), samples, step, tuple(memory.values()))

    def pass_seconds(
        self, devices: Sequence[int], index: int, first: int, end: int, size: int
    ) -> tuple[float, float]:
        """Return forward and backward seconds of a stage, including copies over its device's link.

        Args:
            devices: of all stages.
            size: samples.
        """
        device = devices[index]
        forward, backward = self.devices[device].seconds(self.of("work", first, end), size)
        if size == 0:
            return forward, backward
        link = self.link(device)
        if index > 0 and devices[index - 1] != device:
            num_bytes = size * self.layers[first - 1].output_bytes
            forward += num_bytes / link.bytes_per_second  # every pass has the latency of its inputs already
            backward += link.seconds(num_bytes)
        if index + 1 < len(devices) and devices[index + 1] != device:
            given = link.seconds(size * self.layers[end - 1].output_bytes)
            forward, backward = forward + given, backward + given
        return forward, backward

    def fits(self, cut: Cut) -> bool:
        """Return whether each device holds its stages."""
        limits = [self.devices[device].memory_bytes for device in cut.group]
        pairs = zip(limits, cut.memory_bytes, strict=True)
        return all(limit is None or need <= limit for limit, need in pairs)

    def _message(
        self, devices: Sequence[int], index: int, to: int, boundary: int, sizes: Sequence[int]
    ) -> tuple[float, ...]:
        """Return the seconds of each message, with the size of the largest microbatch."""
        if not 0 <= to < len(devices) or devices[index] == devices[to]:
            return ()
        num_bytes = sizes[0] * self.layers[boundary - 1].output_bytes
        return (self.send(devices[index], devices[to], num_bytes),) * len(sizes)
