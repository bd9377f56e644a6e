"""The features of all ranks' samples in one tensor, for a loss that couples samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from hetexp.comm.communicator import Communicator


class _Gathered(torch.autograd.Function):
    """All ranks' rows, whose gradient is the sum of what all ranks' losses give to them.

    So the gradient is that of the sum of all ranks' losses. A rank that used only the gradient of its own
    loss would miss how its rows change the others'.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        counts: Sequence[int],
        communicator: Communicator,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> torch.Tensor:
        start = sum(counts[: communicator.rank])
        ctx.rows = slice(start, start + len(rows))
        ctx.communicator, ctx.waiting = communicator, waiting
        # Zeros from all ranks but one: so any number of rows travels, and every bit stays.
        everything = rows.new_zeros((sum(counts), *rows.shape[1:]))
        everything[ctx.rows] = rows
        with waiting():
            return communicator.all_reduce(everything)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        with ctx.waiting():
            return ctx.communicator.all_reduce(gradients[0].contiguous())[ctx.rows], None, None, None


def gathered(
    rows: torch.Tensor,
    counts: Sequence[int],
    communicator: Communicator,
    waiting: Callable[[], AbstractContextManager[None]],
) -> torch.Tensor:
    """Return the rows of all ranks, in rank order; all ranks call it and its backward in the same order.

    Args:
        rows: [count of this rank, …]; the other dimensions and the type are the same on all ranks.
        counts: each rank's rows.
        waiting: context in which the time counts as waiting for other ranks.
    """
    result: torch.Tensor = _Gathered.apply(rows, counts, communicator, waiting)  # type: ignore[no-untyped-call]
    return result
