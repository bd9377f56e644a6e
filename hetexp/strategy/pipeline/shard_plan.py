"""Checks the user's layers of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Sequence

from hetexp.core.errors import must_be

Ranges = Sequence[Sequence[int]]
"""`[first, end)` of each stage, in the order of the stages."""


def check_ranges(ranges: Ranges, key: str = "strategy.shard_plan") -> list[str]:
    """Return the problems of ranges of layers that need no model, one sentence each.

    Args:
        key: Hydra key of the list.
    """
    problems = []
    for position, bounds in enumerate(ranges):
        name = f"{key}[{position}]"
        if len(bounds) != 2 or any(not isinstance(number, int) or number < 0 for number in bounds):
            problems.append(must_be(name, "two numbers of layers, the first one and the end", list(bounds)))
        elif bounds[0] >= bounds[1]:
            problems.append(must_be(name, "a range of at least one layer (first < end)", list(bounds)))
    if problems or not ranges:
        return problems
    if ranges[0][0] != 0:
        shown = [list(bounds) for bounds in ranges]
        problems.append(
            f"`{key}` must start at layer 0, but starts at layer {ranges[0][0]} instead ({shown})."
        )
    for before, after in zip(ranges, ranges[1:], strict=False):
        end, first = before[1], after[0]
        if first > end:
            problems.append(
                f"`{key}` must cover the layers without a gap, but leaves out {_layers(end, first)} "
                f"between {list(before)} and {list(after)}."
            )
        elif first < end:
            problems.append(
                f"`{key}` must give each layer to one stage, but {list(before)} and {list(after)} overlap in "
                f"{_layers(first, end)}."
            )
    return problems


def check_layers(ranges: Ranges, layers: Sequence[str], key: str = "strategy.shard_plan") -> list[str]:
    """Return the problems of ranges without problems of `check_ranges`, for a model of these layers.

    Args:
        layers: names of the model's layers.
    """
    end, count = ranges[-1][1], len(layers)
    if end > count:
        return [
            f"`{key}` must name layers of the model only (0 to {count - 1}, {layers[-1]}), but names "
            f"{_layers(max(count, ranges[-1][0]), end)} in {list(ranges[-1])}."
        ]
    if end < count:
        names = ", ".join(layers[end : end + 3]) + (", …" if count - end > 3 else "")
        return [
            f"`{key}` must cover all {count} layers of the model, but leaves out {_layers(end, count)} "
            f"({names}) after {list(ranges[-1])}."
        ]
    return []


def _layers(first: int, end: int) -> str:
    return f"layer {first}" if end - first == 1 else f"layers {first}–{end - 1}"
