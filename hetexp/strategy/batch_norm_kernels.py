"""What a rank computes of a BatchNorm layer by itself: local sums, and all that follows from the ranks' sums.

torch's fused kernels, which its own `SyncBatchNorm` uses, exist on CUDA, ROCm and XPU devices. Other devices
use torch's BatchNorm for given statistics. Both compute statistics in float32, or float64 of float64 values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

FUSED_DEVICES = ("cuda", "xpu")
"""Device types with torch's fused kernels; ROCm's is `cuda`, too."""
NO_VALUES = {torch.float32: 1e-30, torch.float64: 1e-300}
"""Count of a rank without values, by type. With a zero, torch's kernel would divide by zero if the first rank
has no values. These numbers vanish beside a real count and a real mean, so that the result keeps its bits."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of the whole batch on the values' device, [channels]."""

    mean: Tensor
    invstd: Tensor
    """1 / sqrt(variance + eps)."""
    counts: Tensor | None = None
    """Values a channel of each rank, [ranks] of int32, if only the device knows them."""
    variance: Tensor | None = None
    """Biased: over the count; `None` if only fused kernels use the statistics."""
    total: float | None = None
    """Values a channel of all ranks, if the host knows them."""


def is_fused(device: torch.device) -> bool:
    """Return whether torch has fused kernels for a device."""
    return device.type in FUSED_DEVICES


def dense(values: Tensor) -> Tensor:
    """Return contiguous values; channels may come last in memory."""
    if values.is_contiguous(memory_format=torch.channels_last):
        return values
    if values.is_contiguous(memory_format=torch.channels_last_3d):
        return values
    return values.contiguous()


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that statistics of such values are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(values: Tensor) -> Tensor:
    """Return the values in the type of their statistics."""
    return values.to(wide_type(values.dtype))


def count_of(values: Tensor) -> int:
    """Return the number of values a channel."""
    return values.numel() // values.shape[1]


def mean_and_variance(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel."""
    if is_fused(values.device):
        return torch.batch_norm_update_stats(dense(values), None, None, 0.0)
    if values.device.type == "cpu":  # many times as fast as torch.var_mean
        return torch.batch_norm_update_stats(wide(values), None, None, 0.0)
    variance, mean = torch.var_mean(wide(values), _dims(values), correction=0)
    return mean, variance


def normalised(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, eps: float
) -> Tensor:
    """Return the normalised values, scaled and shifted."""
    if values.numel() == 0:
        return torch.empty_like(values)
    if is_fused(values.device):
        return torch.batch_norm_elemt(values, weight, bias, statistics.mean, statistics.invstd, eps)
    widened = wide(values)
    weight, bias = (t.to(widened.dtype) if t is not None else None for t in (weight, bias))
    mean, variance = statistics.mean, statistics.variance
    out = functional.batch_norm(widened, mean, variance, weight, bias, training=False, eps=eps)
    return out.to(values.dtype)


class Backward:
    """The backward pass of one layer's call.

    Args:
        gradient: of the output.
        values: the input.
        wanted: whether the gradients of values, weight and bias are wanted.
    """

    def __init__(
        self,
        gradient: Tensor,
        values: Tensor,
        weight: Tensor | None,
        statistics: Statistics,
        eps: float,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        self._gradient, self._values, self._weight = gradient, values, weight
        self._statistics, self._eps, self._wanted = statistics, eps, wanted
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None
        self._scaled: Tensor | None = None
        """The gradient of the values for constant statistics."""

    def sums(self) -> Tensor | None:
        """Return the sums of the gradient, and of its product with the centred values: [2 × channels].

        `None` if the gradient of the values is not wanted.
        """
        values, (of_values, _, _) = self._values, self._wanted
        mean, invstd = self._statistics.mean, self._statistics.invstd
        if values.numel() == 0:
            zeros = mean.new_zeros(2, len(mean))
            self._keep(zeros[1], zeros[0])
            return zeros.flatten() if of_values else None
        if is_fused(values.device):
            self._gradient = _like(self._gradient, values)
            total, product, of_weight, of_bias = torch.batch_norm_backward_reduce(
                self._gradient, values, mean, invstd, self._weight, *self._wanted
            )
            self._keep(of_weight, of_bias)
            return torch.cat([total, product]) if of_values else None
        gradient, widened = wide(self._gradient), wide(values)
        if values.device.type == "cpu":
            weight, variance = self._weight, self._statistics.variance
            weight = weight.to(mean.dtype) if weight is not None else None
            self._scaled, of_weight, total = torch.ops.aten.native_batch_norm_backward(
                gradient,
                widened,
                weight,
                mean,
                variance,
                None,
                None,
                False,
                self._eps,
                [of_values, True, True],
            )
            self._keep(of_weight, total)
            return torch.cat([total, of_weight / invstd]) if of_values else None
        over, shape = _dims(values), _shape(values)
        total = gradient.sum(over)
        product = (gradient * (widened - mean.reshape(shape))).sum(over)
        self._keep(product * invstd, total)
        return torch.cat([total, product]) if of_values else None

    def of_values(self, sums: Tensor) -> Tensor:
        """Return the gradient of the values.

        Args:
            sums: of all ranks.
        """
        values, weight, statistics = self._values, self._weight, self._statistics
        mean, invstd, counts, total = statistics.mean, statistics.invstd, statistics.counts, statistics.total
        if values.numel() == 0:
            return torch.zeros_like(values)
        weight = weight.to(mean.dtype) if weight is not None else None
        if is_fused(values.device):
            if counts is None:
                assert total is not None
                counts = full(total, torch.int32, values.device)
            of_gradient, of_product = sums.chunk(2)
            return torch.batch_norm_backward_elemt(
                self._gradient, values, mean, invstd, weight, of_gradient, of_product, counts
            )
        scale = invstd if weight is None else invstd * weight
        if total is None:
            assert counts is not None
            total = float(counts.sum())
        by_mean, by_centred = (sums.view(2, -1) * (scale * (-1 / total))).unbind()
        # The second normalises once more, then what the statistics' own gradients add.
        added = functional.batch_norm(
            wide(values),
            mean,
            statistics.variance,
            by_centred * invstd,
            by_mean,
            training=False,
            eps=self._eps,
        )
        scaled = self._scaled
        if scaled is None:
            scaled = wide(self._gradient) * scale.reshape(_shape(values))
        return scaled.add_(added).to(values.dtype)

    def _keep(self, of_weight: Tensor, of_bias: Tensor) -> None:
        """Keep the gradients of weight and bias that are wanted, in the weight's type."""
        if self._weight is None:
            return
        if self._wanted[1]:
            self.of_weight = of_weight.to(self._weight.dtype)
        if self._wanted[2]:
            self.of_bias = of_bias.to(self._weight.dtype)


@lru_cache(maxsize=512)
def full(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor [1] of a number, not to be changed; made once, as each is a kernel on a device."""
    return torch.full((1,), value, dtype=dtype, device=device)


def device_row(
    values: Tensor | None, channels: int, eps: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return what a rank tells the others: [mean, invstd, count], 2 × channels + 1 numbers.

    Args:
        values: `None`: the rank has none.
        dtype: of the statistics.
        device: of the collective.
    """
    count = 0 if values is None else count_of(values)
    if values is None or not count:
        empty = torch.ones(2 * channels + 1, dtype=dtype, device=device)
        empty[:channels] = 0
        empty[-1:].copy_(full(NO_VALUES[dtype], dtype, device))
        return empty
    if is_fused(values.device):
        mean, invstd = torch.batch_norm_stats(values, eps)
    else:
        mean, variance = mean_and_variance(values)
        invstd = (variance + eps).rsqrt()
    return torch.cat([mean, invstd, full(count, mean.dtype, mean.device)]).to(device)


def combined(
    gathered: Tensor, running: Sequence[Tensor | None], momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) of all ranks' values, and update the running statistics.

    Args:
        gathered: what `device_row` returned on each rank, [ranks, 2 × channels + 1].
        running: mean and variance, in place; `None`: there are none.
    """
    channels = gathered.shape[1] // 2
    mean, invstd, counts = gathered.split([channels, channels, 1], dim=1)
    # torch's kernel has one type for all that is not the values', which the first argument says.
    inside = [t if t is None else t.to(mean) for t in running]
    running_mean, running_var = inside
    result = torch.batch_norm_gather_stats_with_counts(
        gathered, mean, invstd, running_mean, running_var, momentum, eps, counts.view(-1)
    )
    for before, after in zip(running, inside, strict=True):
        if before is not None and after is not None and before is not after:
            before.copy_(after)
    return result


def host_row(values: Tensor | None, index: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Return what a rank tells the others through the host: [index, count, mean, variance].

    Args:
        values: `None`: the rank has none.
        index: of the layer.
        dtype: of the statistics.
    """
    count = 0 if values is None else count_of(values)
    head = _head(index, count, dtype)
    if values is None or not count:
        return torch.cat([head, head.new_zeros(2 * channels)])
    mean, variance = mean_and_variance(values)
    if values.device.type == "cpu":
        return torch.cat([head, mean, variance])
    return torch.cat([head, torch.cat([mean, variance]).cpu()])  # one copy


@lru_cache(maxsize=512)
def _head(index: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([index, count], dtype=dtype)


def combined_on_host(gathered: Tensor, total: float, eps: float) -> Tensor:
    """Return mean, 1 / sqrt(variance + eps) and biased variance of all ranks' values.

    They are one tensor [3 × channels] of float64. There are no products of matrices: their bits differ by
    library, and ranks may have other builds of torch.

    Args:
        gathered: what `host_row` returned on each rank, [ranks, 2 × channels + 2].
        total: of the counts.
    """
    gathered = gathered.to(torch.float64)
    share, parts = gathered[:, 1:2] / total, gathered[:, 2:]
    channels = parts.shape[1] // 2
    mean, variance = (share * parts).sum(0).split(channels)
    apart = parts[:, :channels] - mean
    variance = variance + apart.square_().mul_(share).sum(0)
    return torch.cat([mean, (variance + eps).rsqrt_(), variance])


def _like(gradient: Tensor, values: Tensor) -> Tensor:
    """Return the gradient in the order of the values in memory, which the kernels need."""
    for order in (torch.channels_last, torch.channels_last_3d):
        if values.is_contiguous(memory_format=order):
            return gradient.contiguous(memory_format=order)
    return gradient.contiguous()


def _dims(values: Tensor) -> list[int]:
    """Return the dimensions that statistics are taken over: all but the channels."""
    return [dim for dim in range(values.dim()) if dim != 1]


def _shape(values: Tensor) -> list[int]:
    """Return the shape in which a number a channel is multiplied with the values."""
    return [1, -1, *[1] * (values.dim() - 2)]
