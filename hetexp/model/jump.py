"""JumpReLU and the step function of the values above a threshold, with estimated gradients of the threshold.

Both jump at the threshold and have no gradient with respect to it. The expected gradient is estimated with a
rectangle of some bandwidth around the threshold (Rajamanoharan et al. 2024, arXiv:2407.14435, equations 11
and 12). Sums over samples stay sums: any split of a batch gives the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Threshold(torch.autograd.Function):
    """JumpReLU if `keeps_values`, else the step function."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, threshold: Tensor, bandwidth: float, keeps_values: bool) -> Tensor:
        ctx.save_for_backward(values, threshold)
        ctx.bandwidth, ctx.keeps_values = bandwidth, keeps_values
        above = values > threshold
        return values * above if keeps_values else above.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        values, threshold = ctx.saved_tensors
        (gradient,) = gradients
        near = ((values - threshold).abs() < ctx.bandwidth / 2).to(gradient.dtype)
        if not ctx.keeps_values:
            return None, (-near / ctx.bandwidth * gradient).sum(dim=0).to(threshold.dtype), None, None
        of_threshold = -(threshold / ctx.bandwidth) * near * gradient
        of_values = gradient * (values > threshold)
        return of_values, of_threshold.sum(dim=0).to(threshold.dtype), None, None


def jump(values: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
    """Return values [batch, features] that are above their threshold [features], and 0 for the others."""
    passed: Tensor = _Threshold.apply(values, threshold, bandwidth, True)  # type: ignore[no-untyped-call]
    return passed


def step(values: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
    """Return 1 for values [batch, features] that are above their threshold [features], and 0 for others."""
    above: Tensor = _Threshold.apply(values, threshold, bandwidth, False)  # type: ignore[no-untyped-call]
    return above
