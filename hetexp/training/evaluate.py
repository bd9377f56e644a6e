"""Evaluation in which each sample counts once, whatever the number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.utils.data import DataLoader

from hetexp.core.call import call_model
from hetexp.data.base import stream_of
from hetexp.data.loader import chop, cut
from hetexp.data.streams.stream import Stream, evaluation_batches
from hetexp.training.loss import IndicesChecked, NoLossError, batch_counts
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)


def evaluate(state: TrainState) -> dict[str, float]:
    """Run the model over the evaluation data, each rank on its contiguous part, of a stream on its part of
    each batch.

    No sample is padded, repeated or left out: ranks add up sums and counts. Unless elements have weights,
    counts are whole, and the accuracy has the same bits for every number of ranks and every split.

    Returns:
        `loss` (mean over samples or unmasked tokens) unless the model returns none, `accuracy` if the loss
        defines it, and `samples`; the same on every rank. Empty without evaluation data.
    """
    if state.eval_data is None:
        return {}
    sums, counts, measured = _sums(state, _batches(state))
    state.communicator.meet()  # a slow device may take longer than a collective would wait
    counts = state.communicator.all_reduce(counts)
    sums = state.communicator.all_reduce(sums)
    if state.hooks.measures:
        measured = _all_reduce_measured(state, measured)
    result = _result(state, sums, counts, measured)
    result |= _spliced(state) if state.source is not None else {}
    state.communicator.confirm()
    return result


def _spliced(state: TrainState) -> dict[str, float]:
    """Return the source model's metrics of the autoencoder, each rank on its part of the source's data."""
    assert state.source is not None
    first, end = state.balancer.now(state.source.num_samples).bounds(state.rank)
    state.model.eval()
    sums = state.source.sums(
        state.model, first, end, state.evaluation_batch, state.device, state.dtype, state.communicator.alive
    )
    state.model.train()
    state.communicator.meet()
    return state.source.metrics(state.communicator.all_reduce(sums))


def evaluate_locally(state: TrainState) -> dict[str, float]:
    """Run this rank's model over all evaluation data; no other rank takes part."""
    if state.eval_data is None:
        return {}
    return _result(state, *_sums(state, _batches(state, alone=True)))


def _all_reduce_measured(state: TrainState, measured: torch.Tensor | None) -> torch.Tensor | None:
    """Add up the model's own sums over the ranks, some of which may have had no samples."""
    length = torch.tensor([0 if measured is None else len(measured)])
    length = state.communicator.all_reduce(length, "max")
    if measured is None:
        measured = torch.zeros(int(length), dtype=torch.float64)
    return state.communicator.all_reduce(measured) if int(length) else None


def _sums(
    state: TrainState, batches: Iterator[tuple[int, Any]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the sums of the loss, its counts, and the sums that the model itself measures, if any.

    The counts are elements, right ones, samples, whether the loss does not define which are right, whether a
    model returned no loss, and those of the loss's terms.
    """
    count, correct, samples = 0.0, 0.0, 0
    sums, terms = [0.0] * (state.loss.num_terms or 1), [0.0] * state.loss.num_terms
    measured: torch.Tensor | None = None
    counts_correct, has_loss = True, True
    state.model.eval()
    with torch.inference_mode():
        for number, (size, (inputs, targets)) in enumerate(batches):
            output = _output(state, inputs, number, size)
            state.communicator.alive()
            if output is None:
                continue
            on_device, loss = state.targets_for(output, targets), state.loss.for_samples(size)
            with state.autocast():
                try:
                    sums = [a + b for a, b in zip(sums, loss.sums(output, on_device), strict=True)]
                except NoLossError as error:
                    has_loss = False
                    _warn_once(error.problems[0])
            own_sums = state.hooks.measure(inputs, state.to_device(on_device), output)
            if own_sums is not None:
                own_sums = own_sums.double().cpu()
                measured = own_sums if measured is None else measured + own_sums
            of_batch, of_terms = batch_counts(loss, [targets], [size])
            count += of_batch
            terms = [a + b for a, b in zip(terms, of_terms, strict=True)]
            right = loss.correct(output, on_device)
            counts_correct &= right is not None
            correct += right or 0
            samples += size
    state.model.train()
    counts = [count, correct, samples, not counts_correct, not has_loss, *terms]
    return torch.tensor(sums, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64), measured


def _output(state: TrainState, inputs: Any, number: int, size: int) -> Any:
    """Return the model's output; a label or a token out of range is named, which ends a CPU's pass."""
    try:
        return state.engine.forward(inputs, number, size)
    except IndexError:
        if state.engine.computes_loss:  # the rank has the whole model
            with IndicesChecked():
                call_model(state.model, state.to_device(inputs))
        raise


@cache
def _warn_once(problem: str) -> None:
    log.warning("The evaluation reports no loss: %s", problem)


def _result(
    state: TrainState, sums: torch.Tensor, counts: torch.Tensor, measured: torch.Tensor | None
) -> dict[str, float]:
    count, correct, samples, undefined, without_loss, *terms = counts.tolist()
    result = {} if without_loss else {"loss": state.loss.mean(sums.tolist(), count, terms)}
    result["samples"] = samples
    if not undefined and count:
        result["accuracy"] = correct / count
    if measured is not None:
        result |= state.hooks.metrics(measured)
    return result


def _part(state: TrainState, total: int, alone: bool) -> tuple[int, int, int]:
    """Return this rank's part of `total` samples: its first, its end, and the size of a batch."""
    return (0, total, state.evaluation_batch) if alone else state.engine.evaluation_part(total)


def _of_stream(state: TrainState, stream: Stream, alone: bool) -> Iterator[tuple[int, Any]]:
    """Yield this rank's part of each batch of a stream that every rank walks."""
    trainer = state.config.trainer
    most = trainer.fast_dev_run or None
    for indices in evaluation_batches(stream, trainer.global_batch_size, trainer.seed, most):
        state.communicator.alive()
        first, end, batch = _part(state, len(indices), alone)
        for places in chop(indices[first:end].tolist(), cut(end - first, 1, batch)):
            yield len(places), state.collate(stream.__getitems__(places))


def _total(state: TrainState) -> int:
    """Return the number of samples to evaluate on."""
    trainer = state.config.trainer
    total = len(state.eval_data)  # type: ignore[arg-type]
    return min(total, trainer.fast_dev_run * trainer.global_batch_size) if trainer.fast_dev_run else total


def _batches(state: TrainState, alone: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield this rank's part of the evaluation data in batches, with the size of each.

    Args:
        alone: whether the rank evaluates all of it.
    """
    trainer, stream = state.config.trainer, stream_of(state.eval_data)
    if stream is not None:
        yield from _of_stream(state, stream, alone)
        return
    first, end, batch = _part(state, _total(state), alone)
    if first == end:
        return
    batches = list(chop(range(first, end), cut(end - first, 1, batch)))
    assert state.eval_data is not None
    loader: DataLoader[Any] = DataLoader(
        state.eval_data,
        batch_sampler=batches,
        collate_fn=state.collate,
        num_workers=trainer.num_workers,
        prefetch_factor=trainer.prefetch_factor if trainer.num_workers else None,
    )
    yield from zip(map(len, batches), loader, strict=True)
