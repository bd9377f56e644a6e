"""torch's fused BatchNorm kernels, written with operations that a CPU has, for tests of what calls them.

They follow `aten/src/ATen/native/cuda/Normalization.cuh`: the same order of additions over ranks, the same
divisions by zero, and the same demands on types.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hetexp.strategy import batch_norm_kernels


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU count as a device with fused kernels, and torch have them there."""
    monkeypatch.setattr(batch_norm_kernels, "FUSED_DEVICES", ("cpu", "cuda", "xpu"))
    for kernel in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        monkeypatch.setattr(torch, f"batch_norm_{kernel.__name__}", kernel)


def wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def dims(values: Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]


def along(values: Tensor, number: Tensor) -> Tensor:
    return number.reshape(1, -1, *[1] * (values.dim() - 2))


def stats(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(wide(values), dims(values), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats_with_counts(
    values: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    kind = values.dtype if running_mean is None else running_mean.dtype
    assert counts.dtype == kind, "the kernel reads the counts in this type"
    mean = variance = number = torch.zeros((), dtype=means.dtype)
    for rank in range(len(counts)):
        count, own = counts[rank], means[rank]
        spread = ((1 / invstds[rank]) ** 2 - eps) * count
        factor = 1 / (number + count)
        variance = variance + spread + (mean - own) ** 2 * number * count * factor
        mean = number * factor * mean + count * factor * own
        number = number + count
    if running_mean is not None and running_var is not None:
        running_mean.copy_((1 - momentum) * running_mean + momentum * mean)
        running_var.copy_((1 - momentum) * running_var + momentum * variance / (number - 1))
    return mean, (variance / number + eps).rsqrt()


def elemt(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    out = (wide(values) - along(values, mean)) * along(values, invstd)
    out = out if weight is None else out * along(values, wide(weight))
    return (out if bias is None else out + along(values, wide(bias))).to(values.dtype)


def backward_reduce(
    gradient: Tensor,
    values: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = wide(gradient).sum(dims(values))
    product = (wide(gradient) * (wide(values) - along(values, mean))).sum(dims(values))
    none = torch.empty(0)
    kind = mean.dtype if weight is None else weight.dtype
    of_weight = (product * invstd).to(kind) if weight_g else none
    of_bias = total.to(kind) if bias_g else none
    return (total, product, of_weight, of_bias) if input_g else (none, none, of_weight, of_bias)


def backward_elemt(
    gradient: Tensor,
    values: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    total: Tensor,
    product: Tensor,
    counts: Tensor,
) -> Tensor:
    assert counts.dtype == torch.int32
    number = counts.sum()
    centred = wide(values) - along(values, mean)
    out = wide(gradient) - along(values, total / number)
    out = out - centred * along(values, product / number * invstd**2)
    scale = invstd if weight is None else invstd * weight
    return (out * along(values, scale)).to(values.dtype)
