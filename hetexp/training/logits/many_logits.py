"""The sum of the cross entropy of half-precision logits of a large vocabulary, [rows, classes].

`functional.cross_entropy` holds such logits in float32 three times over, or rounds what it adds up. Here each
row's logarithm of the sum of exponentials is kept in float32, and the gradient, softmax less the target, is
rounded to the rows' own type once, as a cast of the logits would. On CUDA and ROCm Triton's compiler, which
their builds of torch bring along, makes one pass over the logits each way; elsewhere torch's operations take
some rows at a time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

CHUNK = 2**25
"""Logits that are held in float32 at a time: 128 MiB."""

log = logging.getLogger(__name__)


class ManyLogits(torch.autograd.Function):
    """Takes rows [rows, classes], targets [rows] int64, and the target that does not count."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, targets: torch.Tensor, ignored: int) -> torch.Tensor:
        ctx.ignored, kernels = ignored, _kernels(rows)
        if kernels is not None:
            rows = rows.contiguous()
            losses, sums = kernels.losses(rows, targets, ignored)
            ctx.save_for_backward(rows, targets, sums)
            total: torch.Tensor = losses.sum()
            return total
        log_likelihoods = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        counted, places = _places(targets, ignored)
        with _no_autocast(rows.device):
            for part in _parts(rows):
                log_probabilities = torch.log_softmax(rows[part], dim=-1, dtype=torch.float32)
                log_likelihoods[part] = log_probabilities.gather(1, places[part]).squeeze(1)
            ctx.save_for_backward(rows, targets)
            return -log_likelihoods.where(counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, targets, *sums = ctx.saved_tensors
        weight = gradients[0].float()
        kernels = _kernels(rows) if sums else None
        if kernels is not None:
            return kernels.gradient(rows, targets, sums[0], weight, ctx.ignored), None, None
        counted, places = _places(targets, ctx.ignored)
        weights = weight.where(counted, 0.0).unsqueeze(1)
        gradient = torch.empty_like(rows)
        for part in _parts(rows):
            errors = torch.softmax(rows[part], dim=-1, dtype=torch.float32)
            errors.scatter_add_(1, places[part], errors.new_full((1, 1), -1.0).expand_as(places[part]))
            torch.mul(errors, weights[part], out=gradient[part])
        return gradient, None, None


def _places(targets: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which rows count, [rows], and the target of each, [rows, 1]."""
    counted = targets != ignored
    return counted, targets.where(counted, 0).unsqueeze(1)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast; the device `meta`, on which memory is estimated, has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _parts(rows: torch.Tensor) -> Iterator[slice]:
    """Yield slices of rows with about `CHUNK` numbers each."""
    step = max(1, CHUNK // rows.shape[1])
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


def _kernels(rows: torch.Tensor) -> ModuleType | None:
    """Return Triton's kernels, `None` if Triton cannot compile for this device."""
    return _compiled(rows.device) if rows.is_cuda else None


@functools.cache
def _compiled(device: torch.device) -> ModuleType | None:
    """Return the kernels if one row shows that Triton, its driver and the C compiler it needs all work."""
    try:
        from hetexp.training.logits import triton_logits

        rows = torch.zeros(1, 2, dtype=torch.bfloat16, device=device)
        targets = torch.zeros(1, dtype=torch.int64, device=device)
        losses, sums = triton_logits.losses(rows, targets, -100)
        triton_logits.gradient(rows, targets, sums, losses.sum(), -100)
    except Exception as error:  # a compiler's, of any class
        log.info("the loss of many logits uses torch's operations, as Triton does not run: %s", error)
        return None
    return triton_logits
