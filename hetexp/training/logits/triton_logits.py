"""Triton's kernels for `hetexp.training.logits.many_logits`; imported on CUDA and ROCm devices only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits of a row that a program reads at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _losses(  # type: ignore[no-untyped-def]
    rows, targets, losses, sums, columns, ignored, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = rows + row * columns
    largest = float("-inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logits = tl.load(start + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(logits))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # a row may be masked up to here
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(logits - shift))
        largest = larger
    sum_ = largest + tl.log(total)
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < columns)
    own = tl.load(start + target, mask=inside, other=float("nan")).to(tl.float32)  # outside: no number
    tl.store(sums + row, sum_)
    tl.store(losses + row, tl.where(target == ignored, 0.0, sum_ - own))


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    rows, targets, sums, weight, result, columns, ignored, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = row * columns
    sum_ = tl.load(sums + row)
    target = tl.load(targets + row)
    factor = tl.where(target == ignored, 0.0, tl.load(weight))
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logits = tl.load(rows + start + at, mask=at < columns).to(tl.float32)
        errors = tl.exp(logits - sum_) - tl.where(at == target, 1.0, 0.0)
        tl.store(result + start + at, (errors * factor).to(result.dtype.element_ty), mask=at < columns)


def losses(rows: torch.Tensor, targets: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's loss and logarithm of its sum of exponentials, [rows] float32.

    Args:
        rows: contiguous, [rows, classes].
        targets: [rows] int64; the loss of one that is no class is NaN.
        ignored: the target whose loss is 0.
    """
    losses, sums = (torch.empty(len(rows), dtype=torch.float32, device=rows.device) for _ in range(2))
    with torch.cuda.device(rows.device):
        _losses[(len(rows),)](rows, targets, losses, sums, rows.shape[1], ignored, BLOCK=BLOCK, num_warps=8)
    return losses, sums


def gradient(
    rows: torch.Tensor, targets: torch.Tensor, sums: torch.Tensor, weight: torch.Tensor, ignored: int
) -> torch.Tensor:
    """Return the gradient of the sum of losses by the rows, times `weight`, float32 on the device."""
    result = torch.empty_like(rows)
    with torch.cuda.device(rows.device):
        _gradient[(len(rows),)](
            rows, targets, sums, weight, result, rows.shape[1], ignored, BLOCK=BLOCK, num_warps=8
        )
    return result
