"""The batches of a script's loop: this rank's part of the data, on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hetexp.data.loader import chop, cut
from hetexp.data.sampler import GlobalSampler, Position

Collate = Callable[[list[Any]], Any]


def check_dataset(name: str, dataset: Any) -> list[str]:
    """Return the problems of a data set, one sentence each; a list of samples is a data set, too."""
    kind = type(dataset)
    if hasattr(kind, "__len__") and hasattr(kind, "__getitem__") and not isinstance(dataset, (str, dict)):
        return [] if len(dataset) else [f"`{name}` must hold at least one sample, but is empty."]
    return [
        f"`{name}` must be a map-style data set (`__len__` and `__getitem__`), of which each device can take "
        f"its part, but is a {kind.__module__}.{kind.__qualname__} instead."
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
