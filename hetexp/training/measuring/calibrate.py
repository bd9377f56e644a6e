"""Measures each device before a run: its own work at several batch sizes, then a few steps of all together.

Those steps have the split that the sizes tell of, and what each device works in them counts for its curve as
well: it is measured most often where it will be used. All ranks measure at the same time, as they will train,
and none waits for another inside what is timed (invariant 4). Weights, optimizer and random states are left
as they were.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

from hetexp.balancing.fit import fit_curve, median_errors, sizes_to_measure
from hetexp.balancing.solver import solve
from hetexp.comm.rendezvous import exchange
from hetexp.comm.step_message import StepMessage
from hetexp.core.call import call_model
from hetexp.core.cost.calibration import DeviceCalibration, Exchange, joint_seconds
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel
from hetexp.core.split import Split
from hetexp.data.loader import cut, local_batches
from hetexp.data.sampler import GlobalSampler
from hetexp.hardware.links import links_of
from hetexp.hardware.memory.out_of_memory import first_line, is_out_of_memory
from hetexp.training.compiled import any_batch_size
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.measuring.warmup_calibration import undone
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import ends_with_shortage
from hetexp.training.state import Progress, TrainState

log = logging.getLogger(__name__)

NUM_SIZES = 7
FIRST_PASSES = 3
"""Of the size by which the ranks find their likely shares."""
LONG_SECONDS, GROWTH = 2.0, 4
"""No pass should take longer while nothing is known yet; how much larger the next size tried is."""
PASSES = 2
"""Of each size on the way up, and again on the way down: one that slows meanwhile does so for all sizes."""
MOST_PASSES = 16
"""Of a size, where passes spread."""
SURE = 0.015
"""Standard error of a size's median, as a fraction of it, below which it is not measured again."""
LEAST_EXTRA_SECONDS = 1.0
"""What measuring again may take; or as long as all sizes took before, where that is longer."""
MOST_OF_SHARE = 2.0
"""How far beyond its likely share a device is measured: shares move, and the line goes on from there."""
WARM_STEPS, JOINT_STEPS = 3, 8
SMALL_BYTES, LARGE_BYTES = 2**16, 2**24
"""Messages whose times separate an all-reduce's latency from its rate."""


@dataclass(frozen=True)
class Joint:
    """Training steps of all ranks, timed on one of them; real seconds."""

    seconds: float
    """Median of a step: the first after a rest may take twice as long on a card."""
    data_seconds: float
    """Median of the wait for samples in a step."""
    own: tuple[float, ...]
    """This rank's own work in each step."""


@dataclass
class _Passes:
    """Single passes of one rank, timed."""

    points: list[tuple[int, float]]
    updates: list[float]
    backward: list[float]
    """Fraction of each pass that was backward."""
    most: int | None = None
    """Samples of the largest pass that fits, where the memory did not suffice for more."""


def calibrate(state: TrainState, store: dist.Store) -> dict[str, Any]:
    """Return what was measured, the same on every rank: `devices` and `exchange`, as plain types.

    Times of emulated devices are modelled seconds.
    """
    scale = state.time_scale or 1.0
    with undone(state):
        passes = _measure_passes(state, scale)
        devices = _exchanged(state, store, "calibration", _fitted(state, passes))
        state.microbatch_limits = [
            min((n for n in (limit, device.curve.microbatch_size) if n is not None), default=None)
            for limit, device in zip(state.microbatch_limits, devices, strict=True)
        ]
        if state.plan.world_size == 1:
            return {"devices": [device.to_dict() for device in devices], "exchange": Exchange().to_dict()}
        split = solve([device.curve for device in devices], state.config.trainer.global_batch_size)
        measured = _measure_exchange(state) if not state.plan.paced else None
        joint = joint_steps(state, split)
        passes.points += _single_passes(state, split.counts[state.rank], joint.own, scale)
        devices = _exchanged(state, store, "calibration/joint", _fitted(state, passes))
        known = _beside_work(state, devices, split, joint, measured, scale)
    return {"devices": [device.to_dict() for device in devices], "exchange": known.to_dict()}


def _exchanged(
    state: TrainState, store: dist.Store, topic: str, mine: DeviceCalibration
) -> list[DeviceCalibration]:
    """Tell all ranks what this one measured, and return what each of them did."""
    limit = state.config.comm.timeout_seconds
    rows = exchange(store, topic, state.rank, state.plan.world_size, mine.to_dict(), limit)
    return [DeviceCalibration.from_dict(row) for row in rows]


def _measure_passes(state: TrainState, scale: float) -> _Passes:
    """Time passes of growing sizes, up to somewhat more than the device's likely share."""
    trainer = state.config.trainer
    total = trainer.global_batch_size
    batch = _samples(state, total)
    passes = _Passes([], [], [])
    first = _first_size(state, batch, max(1, total // (4 * state.plan.world_size)), scale)
    # Nobody waits for this rank while it tries sizes: it finds out by itself what fits, and says so.
    while not _time_if_it_fits(state, batch, first, passes, scale, FIRST_PASSES):
        first //= 2
    speeds = torch.zeros(state.plan.world_size, dtype=torch.float64)
    speeds[state.rank] = first / statistics.median(seconds for _, seconds in passes.points)
    speeds = state.communicator.all_reduce(speeds)
    likely = total * float(speeds[state.rank] / speeds.sum())
    largest = min(total, max(4, round(MOST_OF_SHARE * likely)))
    largest = min(largest, state.microbatch_size or largest)
    began = time.perf_counter()
    fits: list[int] = []
    for size in sizes_to_measure(largest, NUM_SIZES):
        if not _time_if_it_fits(state, batch, size, passes, scale):
            passes.most = max([first, *fits])
            break
        fits.append(size)
    for size in reversed(fits):
        _measure_more(state, batch, size, passes, scale)
    _measure_again(state, batch, passes, scale, time.perf_counter() - began)
    return passes


def _first_size(state: TrainState, batch: tuple[Any, Any], most: int, scale: float) -> int:
    """Return a size up to `most` at which a pass takes this device no long time: it may be a CPU."""
    size = 1
    while size < most:
        tried = _Passes([], [], [])
        if not _time_if_it_fits(state, batch, size, tried, scale, repetitions=1):
            break
        if tried.points[0][1] * scale * GROWTH > LONG_SECONDS:
            break
        size = min(size * GROWTH, most)
    return size


def _measure_more(
    state: TrainState,
    batch: tuple[Any, Any],
    size: int,
    passes: _Passes,
    scale: float,
    repetitions: int = PASSES,
) -> None:
    """Time more passes of a size that fitted before; where it no longer does, that is the limit."""
    if passes.most is not None and size > passes.most:
        return
    if not _time_if_it_fits(state, batch, size, passes, scale, repetitions, warm=True):
        passes.most = max((other for other, _ in passes.points if other < size), default=1)


def _measure_again(
    state: TrainState, batch: tuple[Any, Any], passes: _Passes, scale: float, took_seconds: float
) -> None:
    """Repeat the sizes whose passes spread, in turn, until all are sure or it takes too long.

    Args:
        took_seconds: what all sizes took before.
    """
    deadline = time.perf_counter() + max(LEAST_EXTRA_SECONDS, took_seconds)
    while True:
        errors = median_errors(passes.points)
        counts = Counter(size for size, _ in passes.points)
        unsure = [
            size
            for size in errors
            if errors[size] > SURE and counts[size] < MOST_PASSES and size <= (passes.most or size)
        ]
        if not unsure:
            return
        for size in unsure:
            if time.perf_counter() > deadline:
                return
            more = min(PASSES, MOST_PASSES - counts[size])
            _measure_more(state, batch, size, passes, scale, more)


def _time_if_it_fits(
    state: TrainState,
    batch: tuple[Any, Any],
    size: int,
    passes: _Passes,
    scale: float,
    repetitions: int = PASSES,
    warm: bool = False,
) -> bool:
    """Time passes of a size; return whether the memory suffices for them.

    Raises:
        DeviceMemoryError: it does not even suffice for one sample. The launcher then ends all ranks.
    """
    try:
        with ends_with_shortage(state, -1, [1], "No share fits.") if size == 1 else nullcontext():
            _time_steps(state, batch, size, passes, scale, repetitions, warm)
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        log.warning("a pass over %d samples does not fit: %s", size, first_line(error))
    # Only now the frames are gone that held what the pass had computed.
    state.optimizer.zero_grad(set_to_none=True)
    state.backend.release_memory()
    return False


def _time_steps(
    state: TrainState,
    batch: tuple[Any, Any],
    size: int,
    passes: _Passes,
    scale: float,
    repetitions: int,
    warm: bool = False,
) -> None:
    """Do steps of one pass each, without exchange, and add their times.

    Where the size is new, one more comes first and is left out: kernels are chosen and memory is taken once
    for each size.

    Args:
        warm: whether passes of this size were done before.
    """
    inputs, targets = (_first(value, size) for value in batch)
    backend = state.backend
    marks: list[tuple[Any, Any, Any]] = []
    began = 0.0
    for repetition in range(1 if warm else 0, repetitions + 1):
        if repetition == 1:
            backend.pause()
            backend.synchronize()
            marks.clear()
            began = time.perf_counter()
        if repetition <= 1:
            backend.resume()
        backend.begin_step(-1)
        start = backend.mark()
        with state.autocast():
            loss = state.local_loss(_output(state, inputs), targets) / size
        middle = backend.mark()
        loss.backward()
        marks.append((start, middle, backend.mark()))
        backend.begin_update()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
    backend.pause()  # an emulated device ends its update
    backend.synchronize()
    cycle = (time.perf_counter() - began) / repetitions / scale
    seconds = [backend.seconds_between(start, end) / scale for start, _, end in marks]
    passes.points += [(size, one) for one in seconds]
    passes.updates.append(max(0.0, cycle - statistics.fmean(seconds)))
    passes.backward += [
        backend.seconds_between(middle, end) / backend.seconds_between(start, end)
        for start, middle, end in marks
    ]


def _output(state: TrainState, inputs: Any) -> Any:
    """Return what the model makes of inputs on the host, by the passes that training will run."""
    moved = state.to_device(inputs)
    if state.compiled is None:
        return call_model(state.model, moved)
    any_batch_size(moved)
    return call_model(state.compiled, moved)


def _fitted(state: TrainState, passes: _Passes) -> DeviceCalibration:
    """Return the curve of a whole step, with the microbatches that the configuration cuts it into."""
    fit = fit_curve(passes.points)
    pieces, size, cap = state.config.trainer.accumulate, state.microbatch_size, None
    if passes.most is not None and pieces > 1:  # as many pieces as the person wants, and no larger ones
        cap = passes.most * pieces
    elif passes.most is not None:
        size = passes.most
    curve = replace(
        _in_pieces(fit.curve, pieces),
        update_seconds=statistics.median(passes.updates),
        microbatch_size=size,
        cap=cap,
    )
    return DeviceCalibration(
        curve=curve,
        backward_share=statistics.median(passes.backward),
        spread=fit.spread,
        standard_error=fit.standard_error,
        points=tuple(passes.points),
    )


def _in_pieces(curve: SpeedCurve, pieces: int) -> SpeedCurve:
    """Return the curve of a local batch that is always cut into so many passes."""
    if pieces == 1:
        return curve
    kinks = tuple((at * pieces, slope) for at, slope in curve.kinks)
    return replace(curve, fixed_seconds=curve.fixed_seconds * pieces, kinks=kinks)


def _single_passes(
    state: TrainState, samples: int, own: Sequence[float], scale: float
) -> list[tuple[int, float]]:
    """Return the passes of joint steps as points of the curve.

    Args:
        samples: of this rank in each of them.
        own: real seconds of this rank's own work in each.
    """
    sizes = cut(samples, state.config.trainer.accumulate, state.microbatch_size)
    if not sizes:
        return []
    size = max(sizes)  # they differ by at most one sample
    return [(size, seconds * size / samples / scale) for seconds in own]


def _beside_work(
    state: TrainState,
    devices: list[DeviceCalibration],
    split: Split,
    joint: Joint,
    measured: Channel | None,
    scale: float,
) -> Exchange:
    """Return what joint steps took beyond the devices' own work, the same on every rank."""
    agreed = torch.tensor([joint.seconds, joint.data_seconds], dtype=torch.float64)
    seconds, data = (state.communicator.all_reduce(agreed, "max") / scale).tolist()
    known = Exchange(_buckets(state), measured, data_seconds=data)
    links = links_of(state.plan, measured=measured)
    seen = state.strategy.step_exchange(known, state.plan, state.plan.devices)
    other = seconds - joint_seconds(devices, split.counts, links, seen)
    return replace(known, other_seconds=max(0.0, other))


def joint_steps(
    state: TrainState, split: Split, warm_steps: int = WARM_STEPS, steps: int = JOINT_STEPS
) -> Joint:
    """Time training steps with this split, exchange included; full batches only, where there are any.

    All ranks call it together. It trains: `undone` takes that back.
    """
    divisor = state.strategy.gradient_divisor(state.communicator.world_size)
    normalizer = LossNormalizer(StepMessage(state.communicator), divisor)
    trainer = state.config.trainer
    num_samples = len(state.train_data)  # type: ignore[arg-type]  # map-style, as build_data checked
    total = trainer.global_batch_size
    sampler = GlobalSampler(num_samples, total, trainer.seed, num_samples >= total, trainer.overfit_batches)
    batches = local_batches(
        state.train_data,
        sampler,
        Progress().position,
        warm_steps + steps,
        lambda step, n: split if n == split.total else state.balancer.split(step, n),
        state.rank,
        *state.engine.loaded_in(),
        page_locked=state.backend.copies_page_locked,
    )
    meters: list[StepTimer] = []
    took: list[float] = []
    waited: list[float] = []
    for step in range(warm_steps + steps):
        if step in (0, warm_steps):
            _rest(state)
            meters, took, waited = [], [], []
        asked = time.perf_counter()
        batch = next(batches)
        waited.append(time.perf_counter() - asked)
        meters.append(StepTimer(state.backend))  # one a step, read at the end: nothing waits for it meanwhile
        state.engine.step(-1, batch, normalizer, meters[-1])
        took.append(time.perf_counter() - asked)  # each step waits for the others' counts
    batches.close()
    _rest(state)
    own = tuple(meter.take()[0] for meter in meters)
    return Joint(statistics.median(took), statistics.median(waited), own)


def _rest(state: TrainState) -> None:
    """Let all ranks finish what they do, and start again together."""
    state.backend.pause()
    state.backend.synchronize()
    state.communicator.barrier()
    state.backend.resume()


def _measure_exchange(state: TrainState) -> Channel:
    """Return the exchange of gradients as a channel of the cost model: a host's memory, or a ring.

    Of memory it is the latency of a sum, and the rate as between two ranks; of a ring the latency of a round.
    """
    assert state.exchange is not None
    seconds = []
    for num_bytes in (SMALL_BYTES, LARGE_BYTES):
        tensor = torch.zeros(num_bytes // 4, device=state.device)
        times = []
        for _ in range(6):
            state.communicator.barrier()
            state.backend.synchronize()
            start = time.perf_counter()
            state.exchange.sum_(tensor)
            state.backend.synchronize()
            times.append(time.perf_counter() - start)
        seconds.append(statistics.median(times[1:]))
    slowest = state.communicator.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max")
    small, large = slowest.tolist()
    return channel_of(small, large, state.communicator.world_size, state.exchange.name == "shm")


def channel_of(small: float, large: float, ranks: int, shared: bool) -> Channel:
    """Return the channel by which sums of `SMALL_BYTES` and `LARGE_BYTES` take these seconds.

    Args:
        ranks: at least two.
        shared: whether it is memory that they share.
    """
    travelled = Channel(0.0, 1.0, shared).sum_seconds(1.0, ranks)  # for each byte of a rank
    rate = (LARGE_BYTES - SMALL_BYTES) * travelled / max(large - small, 1e-9)
    rounds = 1 if shared else 2 * (ranks - 1)
    return Channel(max(0.0, small - SMALL_BYTES * travelled / rate) / rounds, rate, shared)


def _buckets(state: TrainState) -> tuple[tuple[float, int], ...]:
    """Return what leaves this model in a step; the first rank with samples tells all."""
    if state.paced is not None and state.paced.buckets:
        return tuple(state.paced.buckets)
    num_bytes = sum(p.numel() * p.element_size() for p in state.model.parameters() if p.requires_grad)
    cap = int(getattr(state.strategy, "bucket_cap_mb", 25.0) * 2**20)
    sizes = [min(cap, num_bytes - start) for start in range(0, num_bytes, cap)]
    done, buckets = 0, []
    for size in sizes:  # by bytes: where the work lies is not counted on real devices
        done += size
        buckets.append((done / num_bytes, size))
    return tuple(buckets)


def _samples(state: TrainState, count: int) -> tuple[Any, Any]:
    """Return so many training samples as one batch on the host; they repeat where there are not as many."""
    indices = [i % len(state.train_data) for i in range(count)]  # type: ignore[arg-type]
    loader = DataLoader(Subset(state.train_data, indices), batch_size=count)
    inputs, targets = next(iter(loader))
    return inputs, targets


def _first(value: Any, count: int) -> Any:
    """Return the first samples of a batch, whatever it is made of."""
    if isinstance(value, torch.Tensor):
        return value[:count]
    if isinstance(value, dict):
        return {key: _first(item, count) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_first(item, count) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
