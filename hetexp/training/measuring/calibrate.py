"""Measures each device before a run: its own work at several batch sizes, then a few steps of all together.

Those steps use the split that the first curves suggest, and their times are points of the curves as well: so
each device is measured most often near the size that it will get. All ranks measure at the same time, as they
will train, and no timed span contains a wait for another rank (invariant 4). Weights, optimizer and random
states are restored afterwards.
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

from hetexp.balancing.fit import fit_curve, median_errors, sizes_to_measure
from hetexp.balancing.solver import solve
from hetexp.comm.rendezvous import all_gather_json
from hetexp.comm.step_message import StepMessage
from hetexp.core.call import call_model
from hetexp.core.cost.calibration import DeviceCalibration, Exchange, joint_seconds
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel
from hetexp.core.split import Split
from hetexp.data.base import indexed, stream_of
from hetexp.data.loader import cut, local_batches
from hetexp.data.sampler import GlobalSampler
from hetexp.data.samples import read
from hetexp.data.streams.stream import StreamSampler
from hetexp.hardware.links import links_of
from hetexp.hardware.memory.out_of_memory import first_line, is_out_of_memory
from hetexp.training.compiled import any_batch_size
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.measuring.warmup_calibration import restored_after
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import fatal_out_of_memory, part_of
from hetexp.training.state import Progress, TrainState

log = logging.getLogger(__name__)

NUM_SIZES = 7
FIRST_PASSES = 3
"""Passes of the size by which the ranks estimate their shares."""
LONG_SECONDS, GROWTH = 2.0, 4
"""Longest pass that the search for that size should run, and its factor from one size to the next."""
PASSES = 2
"""Passes of each size on the way up, and again on the way down: a device that slows does so for all sizes."""
MOST_PASSES = 16
"""Most passes of a size whose times spread."""
SURE = 0.015
"""A size is not measured again if the relative standard error of its median is below this."""
LEAST_EXTRA_SECONDS = 1.0
"""Time for repeated measurements, or the time that all sizes took before if that is longer."""
MOST_OF_SHARE = 2.0
"""Largest measured size ÷ the likely share: shares move, and a curve is extrapolated from there."""
WARM_STEPS, JOINT_STEPS = 3, 8
STEADY_PASSES, STEADY_OF_SHARE, STEADY_STEPS = 2, 1.25, (1, 3)
"""The same where passes always take the same time, as an emulated card's do: passes of a size, largest size ÷
likely share, and joint steps (not timed, timed). The quickest pass of a size counts."""
SMALL_BYTES, LARGE_BYTES = 2**16, 2**24
"""Messages whose times separate an all-reduce's latency from its rate."""


@dataclass(frozen=True)
class Joint:
    """Training steps of all ranks, timed on one of them; real seconds."""

    seconds: float
    """Median of a step: the first after a rest may take twice as long on a card."""
    data_seconds: float
    """Median of the wait for samples in a step."""
    local_seconds: tuple[float, ...]
    """This rank's own work in each step."""


@dataclass
class _Passes:
    """Single passes of one rank, timed."""

    points: list[tuple[int, float]]
    updates: list[float]
    backward: list[float]
    """Fraction of each pass that was backward."""
    most: int | None = None
    """Samples of the largest pass that fits, if memory ran out with more."""


def calibrate(state: TrainState, store: dist.Store) -> dict[str, Any]:
    """Return the measured `devices` and `exchange` as plain types, the same on every rank.

    Times of emulated devices are modelled seconds, and `time_scale` is the pace at which they were measured.
    """
    scale = state.time_scale or 1.0
    with restored_after(state):
        passes = _measure_passes(state, scale)
        devices = _all_gathered(state, store, "calibration", _fitted(state, passes))
        state.microbatch_limits = [
            min((n for n in (limit, device.curve.microbatch_size) if n is not None), default=None)
            for limit, device in zip(state.microbatch_limits, devices, strict=True)
        ]
        if state.plan.world_size == 1:
            return {"devices": [device.to_dict() for device in devices], "exchange": Exchange().to_dict()}
        split = solve([device.curve for device in devices], state.config.trainer.global_batch_size)
        measured = _measure_exchange(state) if not state.plan.paced else None
        steps = STEADY_STEPS if _steady(state) else (WARM_STEPS, JOINT_STEPS)
        joint = joint_steps(state, split, *steps)
        passes.points += _single_passes(state, split.counts[state.rank], joint.local_seconds, scale)
        devices = _all_gathered(state, store, "calibration/joint", _fitted(state, passes))
        exchange = _beside_work(state, devices, split, joint, measured, scale)
    return {
        "devices": [device.to_dict() for device in devices],
        "exchange": exchange.to_dict(),
        "time_scale": state.time_scale,
    }


def _all_gathered(
    state: TrainState, store: dist.Store, topic: str, local: DeviceCalibration
) -> list[DeviceCalibration]:
    """Return the calibrations of all ranks, on every rank."""
    limit = state.config.comm.timeout_seconds
    rows = all_gather_json(store, topic, state.rank, state.plan.world_size, local.to_dict(), limit)
    return [DeviceCalibration.from_dict(row) for row in rows]


def _measure_passes(state: TrainState, scale: float) -> _Passes:
    """Time passes of growing sizes, up to somewhat more than the device's likely share."""
    trainer = state.config.trainer
    total = trainer.global_batch_size
    batch = _samples(state, total)
    passes = _Passes([], [], [])
    first = _first_size(state, batch, max(1, total // (4 * state.plan.world_size)), scale)
    # No other rank waits for this one while it tries sizes, so it may fail and go on.
    while not _time_if_it_fits(state, batch, first, passes, scale, FIRST_PASSES):
        first //= 2
    speeds = torch.zeros(state.plan.world_size, dtype=torch.float64)
    speeds[state.rank] = first / statistics.median(seconds for _, seconds in passes.points)
    speeds = state.communicator.all_reduce(speeds)
    likely = total * float(speeds[state.rank] / speeds.sum())
    steady = state.backend.steady
    largest = min(total, max(4, round((STEADY_OF_SHARE if steady else MOST_OF_SHARE) * likely)))
    largest = min(largest, state.microbatch_size or largest)
    began = time.perf_counter()
    fits: list[int] = []
    repetitions = STEADY_PASSES if steady else PASSES
    # Two sizes besides the first one show a line, and that it is one.
    sizes = sorted({max(1, largest // 2), largest}) if steady else sizes_to_measure(largest, NUM_SIZES)
    for size in sizes:
        if not _time_if_it_fits(state, batch, size, passes, scale, repetitions, warm=steady):
            passes.most = max([first, *fits])
            break
        fits.append(size)
    if steady:  # a pass that this machine was late with is longer than the emulated card's
        tried = {size for size, _ in passes.points}
        passes.points = [(size, min(s for n, s in passes.points if n == size)) for size in sorted(tried)]
        return passes
    for size in reversed(fits):
        _measure_more(state, batch, size, passes, scale)
    _measure_again(state, batch, passes, scale, time.perf_counter() - began)
    return passes


def _steady(state: TrainState) -> bool:
    """Return whether all ranks' passes always take the same time."""
    unsteady = torch.tensor([not state.backend.steady], dtype=torch.float64)
    return not float(state.communicator.all_reduce(unsteady, "max"))


def _first_size(state: TrainState, batch: tuple[Any, Any], most: int, scale: float) -> int:
    """Return a size up to `most` whose pass is short on this device, which may be a CPU."""
    size = 1
    while size < most:
        trial = _Passes([], [], [])
        if not _time_if_it_fits(state, batch, size, trial, scale, repetitions=1):
            break
        if trial.points[0][1] * scale * GROWTH > LONG_SECONDS:
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
    """Time more passes of a size that fitted before; if it no longer does, lower the limit."""
    if passes.most is not None and size > passes.most:
        return
    if not _time_if_it_fits(state, batch, size, passes, scale, repetitions, warm=True):
        passes.most = max((other for other, _ in passes.points if other < size), default=1)


def _measure_again(
    state: TrainState, batch: tuple[Any, Any], passes: _Passes, scale: float, took_seconds: float
) -> None:
    """Repeat the sizes whose passes spread, in turn, until their medians are precise or time is up.

    Args:
        took_seconds: time that all sizes took before.
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
    """Time passes of a size; return whether they fit in memory.

    Raises:
        DeviceMemoryError: not even one sample fits. The launcher then ends all ranks.
    """
    try:
        with fatal_out_of_memory(state, -1, [1], "No share fits.") if size == 1 else nullcontext():
            _time_steps(state, batch, size, passes, scale, repetitions, warm)
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        log.warning("a pass over %d samples does not fit: %s", size, first_line(error))
    # Only now are the frames freed that held the pass's tensors.
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
    """Run steps of one pass each, without exchange, and add their times.

    An untimed pass comes first if the size is new: kernels are chosen and memory is allocated once a size.

    Args:
        warm: whether passes of this size ran before.
    """
    inputs, targets = part_of(batch, 0, size)
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
            loss = state.local_loss(_output(state, inputs), targets, size) / size
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
    passes.points += [(size, duration) for duration in seconds]
    passes.updates.append(max(0.0, cycle - statistics.fmean(seconds)))
    passes.backward += [
        backend.seconds_between(middle, end) / backend.seconds_between(start, end)
        for start, middle, end in marks
    ]


def _output(state: TrainState, inputs: Any) -> Any:
    """Return the model's output for inputs on the host, compiled if training compiles it."""
    moved = state.to_device(inputs)
    if state.compiled is None:
        return call_model(state.model, moved)
    any_batch_size(moved)
    return call_model(state.compiled, moved)


def _fitted(state: TrainState, passes: _Passes) -> DeviceCalibration:
    """Return the curve of a whole step, with the microbatches that the configuration asks for."""
    fit = fit_curve(passes.points)
    accumulate, size, cap = state.config.trainer.accumulate, state.microbatch_size, None
    if passes.most is not None and accumulate > 1:  # as many microbatches as the user wants, and no larger
        cap = passes.most * accumulate
    elif passes.most is not None:
        size = passes.most
    curve = replace(
        _accumulated(fit.curve, accumulate),
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


def _accumulated(curve: SpeedCurve, accumulate: int) -> SpeedCurve:
    """Return the curve of a local batch in `accumulate` passes, from that of a single pass."""
    if accumulate == 1:
        return curve
    kinks = tuple((at * accumulate, slope) for at, slope in curve.kinks)
    return replace(curve, fixed_seconds=curve.fixed_seconds * accumulate, kinks=kinks)


def _single_passes(
    state: TrainState, samples: int, local_seconds: Sequence[float], scale: float
) -> list[tuple[int, float]]:
    """Return the passes of joint steps as points of the curve.

    Args:
        samples: of this rank in each step.
        local_seconds: real seconds of this rank's own work in each step.
    """
    sizes = cut(samples, state.config.trainer.accumulate, state.microbatch_size)
    if not sizes:
        return []
    size = max(sizes)  # they differ by at most one sample
    return [(size, seconds * size / samples / scale) for seconds in local_seconds]


def _beside_work(
    state: TrainState,
    devices: list[DeviceCalibration],
    split: Split,
    joint: Joint,
    measured: Channel | None,
    scale: float,
) -> Exchange:
    """Return the time of joint steps beyond the devices' own work, the same on every rank."""
    slowest = torch.tensor([joint.seconds, joint.data_seconds], dtype=torch.float64)
    seconds, data = (state.communicator.all_reduce(slowest, "max") / scale).tolist()
    known = Exchange(_buckets(state), measured, data_seconds=data)
    links = links_of(state.plan, measured=measured)
    seen = state.strategy.step_exchange(known, state.plan, state.plan.devices)
    other = seconds - joint_seconds(devices, split.counts, links, seen)
    return replace(known, other_seconds=max(0.0, other))


def joint_steps(
    state: TrainState, split: Split, warm_steps: int = WARM_STEPS, steps: int = JOINT_STEPS
) -> Joint:
    """Time training steps with this split, exchange included; all ranks call it together.

    Batches are full unless the data set is smaller than one. The steps train: see `restored_after`.
    """
    divisor = state.strategy.gradient_divisor(state.communicator.world_size)
    normalizer = LossNormalizer(StepMessage(state.communicator), divisor)
    sampler = _full_batches(state)
    batches = local_batches(
        state.train_data,
        sampler,
        Progress().position,
        warm_steps + steps,
        lambda step, n: split if n == split.total else state.balancer.split(step, n),
        state.rank,
        *state.engine.loaded_in(),
        collate=state.collate,
        page_locked=state.backend.copies_page_locked,
    )
    meters: list[StepTimer] = []
    seconds: list[float] = []
    waited: list[float] = []
    for step in range(warm_steps + steps):
        if step in (0, warm_steps):
            _rest(state)
            meters, seconds, waited = [], [], []
        began = time.perf_counter()
        batch = next(batches)
        waited.append(time.perf_counter() - began)
        meters.append(
            StepTimer(state.backend)
        )  # one a step, read at the end: so no step waits for the device
        state.engine.step(-1, batch, normalizer, meters[-1])
        seconds.append(time.perf_counter() - began)  # each step waits for the others' counts
    batches.close()
    _rest(state)
    local_seconds = tuple(meter.take()[0] for meter in meters)
    return Joint(statistics.median(seconds), statistics.median(waited), local_seconds)


def _full_batches(state: TrainState) -> GlobalSampler:
    """Return a sampler that leaves out short batches, unless the training data is smaller than one."""
    trainer, stream = state.config.trainer, stream_of(state.train_data)
    total = trainer.global_batch_size
    if stream is not None:
        full = len(stream.first(total)) == total
        return StreamSampler(stream, total, trainer.seed, full, trainer.overfit_batches)
    num_samples = len(state.train_data)  # type: ignore[arg-type]
    return GlobalSampler(num_samples, total, trainer.seed, num_samples >= total, trainer.overfit_batches)


def _rest(state: TrainState) -> None:
    """Wait for the device and for all ranks, and start the device's clock again."""
    state.backend.pause()
    state.backend.synchronize()
    state.communicator.barrier()
    state.backend.resume()


def _measure_exchange(state: TrainState) -> Channel:
    """Return the exchange of gradients as a channel of the cost model: a host's memory, or a ring.

    A channel of memory has the latency of a sum and the rate between two ranks; a ring that of a round.
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
        shared: whether the ranks exchange through shared memory.
    """
    travelled = Channel(0.0, 1.0, shared).sum_seconds(1.0, ranks)  # for each byte of a rank
    rate = (LARGE_BYTES - SMALL_BYTES) * travelled / max(large - small, 1e-9)
    rounds = 1 if shared else 2 * (ranks - 1)
    return Channel(max(0.0, small - SMALL_BYTES * travelled / rate) / rounds, rate, shared)


def _buckets(state: TrainState) -> tuple[tuple[float, int], ...]:
    """Return the buckets of a step: the fraction of backward done when each leaves, and its bytes."""
    if state.hook.buckets:
        return tuple(state.hook.buckets)
    num_bytes = sum(p.numel() * p.element_size() for p in state.model.parameters() if p.requires_grad)
    cap = state.strategy.bucket_cap_bytes(num_bytes)
    sizes = [min(cap, num_bytes - start) for start in range(0, num_bytes, cap)]
    done, buckets = 0, []
    for size in sizes:  # by bytes: where the work lies is not counted on real devices
        done += size
        buckets.append((done / num_bytes, size))
    return tuple(buckets)


def _samples(state: TrainState, count: int) -> tuple[Any, Any]:
    """Return `count` training samples as one batch on the host; they repeat if the data set has fewer."""
    head = indexed(state.train_data, count)
    indices = [i % len(head) for i in range(count)]  # type: ignore[arg-type]
    samples = read(head, indices)  # once: each size collates as many of them as it needs
    return state.collate.load(samples, range(count))  # type: ignore[arg-type]  # a list, too, has indices
