"""Evaluation in which each sample counts once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hetexp.core.call import call_model
from hetexp.core.split import apportion
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
    loss_total, counts, measured = _sums(parts, _batches(parts, parts.rank))
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
    most = max(parts.pass_sizes(parts.plan.local_batch_sizes[parts.rank]), default=1)
    parts.model.eval()
    sums = parts.source.sums(
        parts.model, first, end, most, parts.device, parts.dtype, parts.communicator.alive
    )
    parts.model.train()
    parts.communicator.meet()
    return parts.source.metrics(parts.communicator.all_reduce(sums))


def evaluate_alone(parts: TrainState) -> dict[str, float]:
    """Run this rank's model over all evaluation data; no other rank takes part."""
    return _result(parts, *_sums(parts, _batches(parts, None))) if parts.eval_data is not None else {}


def evaluate_apart(parts: TrainState) -> list[dict[str, float]]:
    """Run every rank's own model over all evaluation data, and tell all what each one found.

    Returns:
        One result a rank, as `evaluate` gives it; the same on every rank.
    """
    if parts.eval_data is None:
        return []
    mine = evaluate_alone(parts)
    parts.communicator.meet()
    own = parts.hooks.measures if parts.hooks is not None else ()
    gathered = torch.zeros((parts.communicator.world_size, 3 + len(own)), dtype=torch.float64)
    row = [mine["loss"], mine["samples"], mine.get("accuracy", -1.0), *(mine[name] for name in own)]
    gathered[parts.rank] = torch.tensor(row, dtype=torch.float64)
    everyone = parts.communicator.all_reduce(gathered).tolist()
    return [
        {"loss": loss, "samples": samples}
        | ({"accuracy": accuracy} if accuracy >= 0 else {})
        | dict(zip(own, values, strict=True))
        for loss, samples, accuracy, *values in everyone
    ]


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
            output = _output(parts, number, inputs, num_rows(targets))
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


def _output(parts: TrainState, number: int, inputs: Any, num_samples: int) -> Any:
    """Return what the model makes of a batch; `None` where another rank has the model's last layers."""
    if parts.staging is not None:
        return parts.staging.evaluate(inputs, number, num_samples)
    with parts.autocast():
        return call_model(parts.model, parts.to_device(inputs))


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


def _batches(parts: TrainState, rank: int | None) -> Iterator[Any]:
    """Yield a rank's batches of the evaluation data, or all of them, as large as a training microbatch."""
    trainer = parts.config.trainer
    total = len(parts.eval_data)  # type: ignore[arg-type]
    sizes = parts.pass_sizes(parts.plan.local_batch_sizes[parts.rank])
    batch = max(sizes, default=1)
    if trainer.fast_dev_run:
        total = min(total, trainer.fast_dev_run * trainer.global_batch_size)
    if parts.staging is not None:
        batch = parts.staging.rows
        first, end = apportion(total, parts.plan.replica_batch_sizes).bounds(parts.staging.replica)
    else:
        first, end = parts.balancer.now(total).bounds(rank) if rank is not None else (0, total)
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
