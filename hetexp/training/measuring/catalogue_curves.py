"""Speed curves from the catalogue, before anything is measured: counted work ÷ the cards' rates.

The same figures pace emulated devices (`hetexp.hardware.emulation.emulated.CardTimes`), so a run of such
devices without hidden deviations takes the predicted time. For real cards they are the data sheets' rates.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hetexp.core.config import Config, TrainerConfig
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import logged
from hetexp.hardware.catalogue import Card, card_of, load_catalogue
from hetexp.hardware.emulation.emulated import UPDATE_PASSES, CardTimes
from hetexp.hardware.emulation.pacing import count_work, tensors
from hetexp.plan.device_estimates import CATALOGUE, NOTHING, DeviceEstimates
from hetexp.plan.strategy import Strategy
from hetexp.torch_private import tree_map_only
from hetexp.training.measuring.estimate import RunMemory


@dataclass(frozen=True)
class CountedWork:
    """One model's work, whatever the device."""

    forward_flops: float
    """Of one sample."""
    backward_flops: float
    sample_bytes: int
    """Bytes of one sample's inputs on the way to the device."""
    weight_bytes: int
    """Of the trained parameters, as they are exchanged."""
    gradients: tuple[tuple[float, int], ...]
    """Each gradient's fraction of backward and bytes, in the order in which backward ends them."""


def known_from_catalogue(
    config: Config,
    devices: Sequence[DeviceSpec],
    precisions: Sequence[str],
    strategy: Strategy,
    built: RunMemory,
    emulated: bool,
) -> DeviceEstimates:
    """Return the catalogue's curve of each device that it knows, and what they exchange.

    Args:
        devices: one a rank, as `precisions` are.
        built: holds the run's model and a sample.
        emulated: whether the ranks will count the model's work on the CPU, as emulated devices do; otherwise,
            and for a large model, it is counted without data. The counts differ by kernels that torch does
            not count on the CPU.
    """
    catalogue = load_catalogue(config.hardware.catalogue)
    cards = [card_of(d) if d.backend == "emulated" else catalogue.real(d) for d in devices]
    pairs = zip(cards, precisions, strict=True)
    cards = [card if card is not None and precision in card.tflops else None for card, precision in pairs]
    nothing = DeviceEstimates((None,) * len(devices), (NOTHING,) * len(devices), tuple(devices), Exchange())
    if built.reason is not None:
        return replace(nothing, reason=f"the model could not be built ({built.reason})")
    if not any(cards):
        return nothing
    try:
        work = count(config, built, emulated)
    except Exception as error:  # the user's own model runs any code
        first_line = str(error).strip().partition("\n")[0]
        return replace(
            nothing, reason=f"the model's work could not be counted ({type(error).__name__}: {first_line})"
        )
    likely = -(-config.trainer.global_batch_size // len(devices))
    curves = [
        calibration_of(card, precision, work, config.trainer, device.slow, likely)
        if card is not None
        else None
        for card, precision, device in zip(cards, precisions, devices, strict=True)
    ]
    linked = [
        replace(d, backend="emulated", card_facts=card.model_dump(mode="json")) if card is not None else d
        for d, card in zip(devices, cards, strict=True)
    ]
    return DeviceEstimates(
        devices=tuple(curves),
        sources=tuple(CATALOGUE if card is not None else NOTHING for card in cards),
        linked=tuple(linked),
        exchange=_exchange(work, strategy),
    )


def exchange_of(config: Config, strategy: Strategy, built: RunMemory, emulated: bool) -> Exchange:
    """Return a run's exchange as its model alone determines it; an empty one if the model cannot be built.

    Args:
        built, emulated: as for `known_from_catalogue`.
    """
    if built.reason is not None:
        return Exchange()
    with logged("the exchange of gradients counts as free in the prediction", logging.INFO):
        return _exchange(count(config, built, emulated), strategy)
    return Exchange()


def _exchange(work: CountedWork, strategy: Strategy) -> Exchange:
    cap_bytes = strategy.bucket_cap_bytes(sum(size for _, size in work.gradients))
    return Exchange(in_buckets(work.gradients, cap_bytes))


def count(config: Config, built: RunMemory, emulated: bool) -> CountedWork:
    """Count the work of a run's model on one sample."""
    recompute = config.trainer.activation_checkpointing
    model = built.model_with_values(recompute) if emulated and not built.large else built.model
    inputs = _moved(built.sample[0], model)
    forward, backward, fractions = count_work(model, inputs, samples=1)
    sized = [(fraction, p.numel() * p.element_size()) for p, fraction in fractions]
    return CountedWork(
        forward_flops=forward,
        backward_flops=backward,
        sample_bytes=sum(t.numel() * t.element_size() for t in tensors(inputs)),
        weight_bytes=sum(size for _, size in sized),
        gradients=tuple(reversed(sized)),  # backward goes through the model from its end
    )


def calibration_of(
    card: Card, precision: str, work: CountedWork, trainer: TrainerConfig, slow: float, likely: int
) -> DeviceCalibration:
    """Return the calibration of a card by the catalogue's rates.

    Args:
        slow: factor by which the device is slowed down.
        likely: local samples for which forward and backward are separated.
    """
    figures = (work.forward_flops, work.backward_flops, UPDATE_PASSES * work.weight_bytes)
    times = CardTimes(card, precision, *figures)
    times.slower = slow
    fixed = times.forward(0, 0) + times.backward(0)
    forward, backward = times.forward(likely, likely * work.sample_bytes), times.backward(likely)
    curve = SpeedCurve(
        fixed_seconds=fixed * trainer.accumulate,
        seconds_per_sample=(forward + backward - fixed) / likely,
        update_seconds=times.update(),
        microbatch_size=trainer.microbatch_size,
    )
    return DeviceCalibration(curve, backward / (forward + backward), spread=0.0, standard_error=0.0)


def in_buckets(gradients: Sequence[tuple[float, int]], cap_bytes: int) -> tuple[tuple[float, int], ...]:
    """Return the buckets that torch's DDP makes of gradients: a bucket ends once it is full.

    As `compute_bucket_assignment_by_size` with one limit: a given cap holds for the first bucket, too.

    Args:
        gradients: in the order in which they are ready: fraction of backward, bytes.

    Returns:
        Of each bucket the fraction of backward done when it leaves, and its bytes.
    """
    buckets: list[tuple[float, int]] = []
    done, size = 0.0, 0
    for fraction, num_bytes in gradients:
        done, size = done + fraction, size + num_bytes
        if size >= cap_bytes:
            buckets.append((min(done, 1.0), size))
            size = 0
    if size:
        buckets.append((1.0, size))
    return tuple(buckets)


def _moved(value: Any, model: nn.Module) -> Any:
    """Return a sample's inputs on the model's device, floating-point ones in the weights' type."""
    weight = next(model.parameters())

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else tensor.dtype)

    return tree_map_only(torch.Tensor, move, value)
