"""The batches of a script's loop: this rank's part of the data, on its device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hetexp.core.split import Split
from hetexp.data.base import as_data, stream_of
from hetexp.data.loader import chop, cut
from hetexp.data.sampler import GlobalSampler, Position
from hetexp.data.streams.stream import Stream, StreamSampler, evaluation_batches

Collate = Callable[[list[Any]], Any]


def check_dataset(name: str, dataset: Any) -> list[str]:
    """Return the problems of a data set, one sentence each; a list of samples is a data set, too."""
    kind, data = type(dataset), as_data(dataset)
    if stream_of(data) is not None:
        return []
    if data is not None:
        return [] if len(dataset) else [f"`{name}` must hold at least one sample, but is empty."]
    accepted = "a data set (`__len__` and `__getitem__`) or a stream (`IterableDataset`)"
    named = f"{kind.__module__}.{kind.__qualname__}"
    is_loader = isinstance(dataset, DataLoader)
    fix = " Give its data set (loader.dataset): run.batches() makes the batches." if is_loader else ""
    return [
        f"`{name}` must be {accepted}, of which each device can take its part, but is a {named} instead.{fix}"
    ]


def on_device(value: Any, device: torch.device) -> Any:
    """Return a batch with all tensors on the device, in the same tuples, lists and dicts.

    Other objects with a method `to`, such as the batches of some libraries, are moved by it.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: on_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(item, device) for item in value)
    return value.to(device) if hasattr(value, "to") else value


def epochs_left(sampler: GlobalSampler, position: Position) -> Iterator[tuple[GlobalSampler, Position, int]]:
    """Yield the sampler of an epoch, the position of its next step, and the number of steps that it has left.

    A stream at the end of an epoch may have no step left; then the next epoch follows.
    """
    if not isinstance(sampler, StreamSampler):
        yield sampler, *steps_left(sampler, position)
        return
    starts = [position, Position(position.epoch + 1)] if position.offset else [position]
    for start in starts:
        yield sampler.until(start.epoch + 1), start, sys.maxsize


def steps_left(sampler: GlobalSampler, position: Position) -> tuple[Position, int]:
    """Return the position of the next step, and the number of steps that its epoch has left."""
    for start in (position, Position(position.epoch + 1)):
        full, rest = divmod(max(0, sampler.num_samples - start.offset), sampler.global_batch_size)
        steps = full if sampler.drop_last or not rest else full + 1
        if steps:
            return start, steps
    raise AssertionError("a sampler has a batch an epoch")


def part_batches(
    dataset: Dataset[Any], bounds: tuple[int, int], most: int, num_workers: int, collate: Collate
) -> Iterator[tuple[Any, int]]:
    """Yield the samples `[first, end)` of a data set in order, on the host, with the number of each batch.

    Args:
        most: samples of a batch.
    """
    first, end = bounds
    if first == end:
        return
    batches = list(chop(range(first, end), cut(end - first, 1, max(1, most))))
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_sampler=batches, num_workers=num_workers, collate_fn=collate
    )
    for batch, indices in zip(loader, batches, strict=True):
        yield batch, len(indices)


def stream_part_batches(
    stream: Stream,
    global_batch_size: int,
    seed: int,
    split: Callable[[int], Split],
    rank: int,
    most: int,
    collate: Collate,
) -> Iterator[tuple[Any, int]]:
    """Yield this rank's part of each batch of a stream, as `part_batches` of a data set.

    Args:
        split: maps the size of a batch to every rank's count.
    """
    for indices in evaluation_batches(stream, global_batch_size, seed):
        first, end = split(len(indices)).bounds(rank)
        for places in chop(indices[first:end].tolist(), cut(end - first, 1, max(1, most))):
            yield collate(stream.__getitems__(places)), len(places)
