"""Evaluation in which each sample counts once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hetexp.data.loader import chop, cut
from hetexp.training.loss import count_of, num_rows
from hetexp.training.state import TrainState


def evaluate(parts: TrainState) -> dict[str, float]:
    """Run the model over the evaluation data, each rank on its contiguous part.

    No sample is padded, repeated or left out: ranks add up sums and counts. Where these are whole, as they
    are unless elements have weights, the accuracy is bit-equal for every number of ranks and every split.

    Returns:
        `loss` (mean over samples or unmasked tokens), `accuracy` where the loss defines it, and `samples`;
        the same on every rank. Empty where there is no evaluation data.
    """
    if parts.eval_data is None:
        return {}
    loss_total, counts, measured = _sums(parts, _batches(parts, *parts.engine.evaluation_part(_total(parts))))
    parts.communicator.meet()  # a slow device may take longer than a collective would wait
    # A rank without samples never asked the loss, so "no rank said no" is what a maximum can tell.
    counts = parts.communicator.all_reduce(counts)
    loss_sum = parts.communicator.all_reduce(torch.tensor([loss_total], dtype=torch.float64))
    if parts.hooks is not None and parts.hooks.measures:
        measured = _added_up(parts, measured)
    result = _result(parts, float(loss_sum), counts, measured)
    return result | _spliced(parts) if parts.source is not None else result


def _spliced(parts: TrainState) -> dict[str, float]:
    """Return what the source model tells of the autoencoder, each rank asking it for a part of its data."""
    assert parts.source is not None
    first, end = parts.balancer.now(parts.source.num_samples).bounds(parts.rank)
    parts.model.eval()
    sums = parts.source.sums(
        parts.model, first, end, parts.evaluation_batch, parts.device, parts.dtype, parts.communicator.alive
    )
    parts.model.train()
    parts.communicator.meet()
    return parts.source.metrics(parts.communicator.all_reduce(sums))


def evaluate_alone(parts: TrainState) -> dict[str, float]:
    """Run this rank's model over all evaluation data; no other rank takes part."""
    if parts.eval_data is None:
        return {}
    return _result(parts, *_sums(parts, _batches(parts, 0, _total(parts), parts.evaluation_batch)))


def _added_up(parts: TrainState, measured: torch.Tensor | None) -> torch.Tensor | None:
    """Add up what the ranks have measured, of which some may have had no samples; all of them call it."""
    length = torch.tensor([0 if measured is None else len(measured)])
    length = parts.communicator.all_reduce(length, "max")
    if measured is None:
        measured = torch.zeros(int(length), dtype=torch.float64)
    return parts.communicator.all_reduce(measured) if int(length) else None


def _sums(parts: TrainState, batches: Iterator[Any]) -> tuple[float, torch.Tensor, torch.Tensor | None]:
    """Return the sum of the loss; elements, right ones, samples, and 1 if it is not known what is right.

    Then come the sums that the model itself measures, where it does and there are samples.
    """
    loss_total, count, correct, samples = 0.0, 0.0, 0.0, 0
    measured: torch.Tensor | None = None
    counts_correct = True
    parts.model.eval()
    with torch.inference_mode():
        for number, (inputs, targets) in enumerate(batches):
            output = parts.engine.forward(inputs, number, num_rows(targets))
            parts.communicator.alive()
            if output is None:
                continue
            on_device = parts.to_device(targets)
            with parts.autocast():
                loss_total += float(parts.local_loss(output, on_device))
            found = parts.hooks.measure(inputs, on_device, output) if parts.hooks is not None else None
            if found is not None:
                found = found.double().cpu()
                measured = found if measured is None else measured + found
            count += count_of(parts.loss, targets)
            right = parts.loss.correct(output, on_device)
            counts_correct &= right is not None
            correct += right or 0
            samples += num_rows(targets)
    parts.model.train()
    counts = torch.tensor([count, correct, samples, not counts_correct], dtype=torch.float64)
    return loss_total, counts, measured


def _result(
    parts: TrainState, loss_sum: float, counts: torch.Tensor, measured: torch.Tensor | None
) -> dict[str, float]:
    count, correct, samples, undefined = counts.tolist()
    result = {"loss": loss_sum / count if count else float("nan"), "samples": samples}
    if not undefined and count:
        result["accuracy"] = correct / count
    if measured is not None and parts.hooks is not None:
        result |= parts.hooks.metrics(measured)
    return result


def _total(parts: TrainState) -> int:
    """Return the number of samples to evaluate on."""
    trainer = parts.config.trainer
    total = len(parts.eval_data)  # type: ignore[arg-type]
    return min(total, trainer.fast_dev_run * trainer.global_batch_size) if trainer.fast_dev_run else total


def _batches(parts: TrainState, first: int, end: int, batch: int) -> Iterator[Any]:
    """Yield the evaluation data from `first` to `end` in batches of at most so many samples."""
    trainer = parts.config.trainer
    if first == end:
        return
    batches = list(chop(range(first, end), cut(end - first, 1, batch)))
    assert parts.eval_data is not None
    yield from DataLoader(
        parts.eval_data,
        batch_sampler=batches,
        num_workers=trainer.num_workers,
        prefetch_factor=trainer.prefetch_factor if trainer.num_workers else None,
    )
