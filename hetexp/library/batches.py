"""What a script's loop is given of its data: this rank's part, on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from hetexp.data.loader import chop, cut
from hetexp.data.sampler import GlobalSampler, Position

Collate = Callable[[list[Any]], Any]


def check_dataset(name: str, dataset: Any) -> list[str]:
    """Return what is wrong with a data set, one sentence a problem; a list of samples is one, too."""
    kind = type(dataset)
    if hasattr(kind, "__len__") and hasattr(kind, "__getitem__") and not isinstance(dataset, (str, dict)):
        return [] if len(dataset) else [f"`{name}` must hold at least one sample, but is empty."]
    return [
        f"`{name}` must be a map-style data set (`__len__` and `__getitem__`), of which each device can take "
        f"its part, but is a {kind.__module__}.{kind.__qualname__} instead."
    ]


def on_device(value: Any, device: torch.device) -> Any:
    """Return a batch with all tensors on the device, in tuples, lists and dicts as they came.

    What has a method `to` of its own, as the batches of some libraries have, is asked by it.
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
    """Return where the next step begins, and how many steps its epoch has from there on."""
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
    pieces = list(chop(range(first, end), cut(end - first, 1, max(1, most))))
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_sampler=pieces, num_workers=num_workers, collate_fn=collate
    )
    for batch, piece in zip(loader, pieces, strict=True):
        yield batch, len(piece)
