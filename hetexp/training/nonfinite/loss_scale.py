"""The loss scale, which keeps float16 gradients from vanishing, and checks of gradients for finite values.

Ranks that hold the same exchanged gradient decide by it alone, so they decide alike without a message
(NVIDIA/apex#237: only after the all-reduce is it safe). Stages and `hetexp.Synchronous` agree by a message.
torch's own `GradScaler` needs float64, which Arc cards and Apple's GPUs lack (pytorch/pytorch#147731,
#142397).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from hetexp.core.errors import HetexpError, SetupError
from hetexp.hardware.backend import Backend
from hetexp.torch_private import scale_all_, tree_map_only


class NonFiniteError(HetexpError):
    """A gradient is not finite, and no smaller loss scale would help."""


@dataclass
class LossScale:
    """A power of two by which losses are multiplied and gradients divided again; the same on all ranks.

    The scale halves after a step whose gradient is not finite. It doubles after `GROWTH_INTERVAL` finite
    steps in a row, as `torch.amp.GradScaler` does. Both are exact in float32: a rank of another precision
    than float16 gets the same bits as without a scale.
    """

    GROWTH_INTERVAL: ClassVar[int] = 2000
    LARGEST: ClassVar[float] = 2.0**127
    """The largest power of two that float32 holds."""
    SMALLEST: ClassVar[float] = 2.0**-14
    """If a gradient still overflows at this scale, the scale is not the cause."""

    value: float = 2.0**16
    good_steps: int = 0
    """Steps since the last change."""

    def update(self, finite: bool) -> bool:
        """Adapt the scale to a step's gradient.

        Returns:
            Whether the gradient was finite, or a smaller scale may make it so.
        """
        if not finite:
            self.good_steps = 0
            if self.value <= self.SMALLEST:
                return False
            self.value /= 2.0
            return True
        self.good_steps += 1
        if self.good_steps == self.GROWTH_INTERVAL:
            self.good_steps = 0
            self.value = min(self.value * 2.0, self.LARGEST)
        return True

    def unscale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if dense := [gradient for gradient in gradients if not gradient.is_sparse]:
            scale_all_(dense, 1.0 / self.value)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(1.0 / self.value)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LossScale:
        """Read what `to_dict` returned."""
        return cls(**raw)


def with_values(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return dense tensors with the numbers of gradients: of a sparse one its rows, each once, if any."""
    dense = [gradient for gradient in gradients if not gradient.is_sparse]
    if len(dense) == len(gradients):
        return dense
    rows = [gradient.coalesce().values() for gradient in gradients if gradient.is_sparse]
    return dense + [values for values in rows if values.numel()]


def largest_magnitude(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the largest magnitude on the device, NaN if the gradients hold one; `None` without gradients.

    The Euclidean norm would not do: it may overflow on one kind of device and not on another.
    """
    dense = with_values(gradients)
    return torch.nn.utils.get_total_norm(dense, math.inf) if dense else None


def all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether no gradient holds an infinity or a NaN; waits for the device."""
    largest = largest_magnitude(gradients)
    return largest is None or math.isfinite(float(largest))


def unscale_and_check(gradients: Sequence[torch.Tensor], loss_scale: LossScale | None, enabled: bool) -> bool:
    """Divide a rank's gradients by the loss scale, and check them at once; stages agree on the result.

    Args:
        enabled: whether to check gradients without a loss scale.

    Returns:
        Whether the gradients are finite; unchecked ones count as finite.
    """
    if loss_scale is None:
        return not enabled or all_finite(gradients)
    loss_scale.unscale(gradients)
    return all_finite(gradients)


def widened(output: Any) -> Any:
    """Return a model's output with half-precision tensors in float32, as sums over a batch need.

    An object with a loss of its own stays as it is: its logits may be a step's largest tensors.
    """
    return tree_map_only(
        torch.Tensor, _wide, output, is_leaf=lambda value: getattr(value, "loss", None) is not None
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def check_device(backend: Backend, precision: str) -> None:
    """Check that the device itself computes in the planned precision.

    Raises:
        SetupError: it does not.
    """
    # Every device computes in float32, and the check costs a kernel.
    if precision == "float32" or backend.computes_in(precision) is not False:
        return
    raise SetupError(
        f"{backend.spec} was to compute in {precision}, but the device itself says that it cannot do so "
        "natively. Write trainer.precision=float32, which every device can."
    )
