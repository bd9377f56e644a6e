"""JumpReLU and the step that counts what it lets through, with gradients of the threshold by estimate.

Both jump where a value meets its threshold, and have no gradient with respect to it. The expected one is
estimated with a rectangle of some bandwidth around the threshold (Rajamanoharan et al. 2024,
arXiv:2407.14435, equations 11 and 12). Sums over samples stay sums: any cut of a batch adds up to the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Jump(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(values, threshold)
        ctx.bandwidth = bandwidth
        return values * (values > threshold)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        values, threshold = ctx.saved_tensors
        (gradient,) = gradients
        near = ((values - threshold).abs() < ctx.bandwidth / 2).to(gradient.dtype)
        of_threshold = -(threshold / ctx.bandwidth) * near * gradient
        return gradient * (values > threshold), of_threshold.sum(dim=0).to(threshold.dtype), None


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(values, threshold)
        ctx.bandwidth = bandwidth
        return (values > threshold).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        values, threshold = ctx.saved_tensors
        (gradient,) = gradients
        near = ((values - threshold).abs() < ctx.bandwidth / 2).to(gradient.dtype)
        return None, (-near / ctx.bandwidth * gradient).sum(dim=0).to(threshold.dtype), None


def jump(values: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
    """Return values [batch, features] that are above their threshold [features], and 0 for the others."""
    passed: Tensor = _Jump.apply(values, threshold, bandwidth)  # type: ignore[no-untyped-call]
    return passed


def step(values: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
    """Return 1 for values [batch, features] that are above their threshold [features], and 0 for others."""
    above: Tensor = _Step.apply(values, threshold, bandwidth)  # type: ignore[no-untyped-call]
    return above
