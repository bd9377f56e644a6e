"""A small residual convolutional network.

By default it normalises by groups, not over the batch: a sample's output depends neither on other samples nor
on the split of the batch among devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt
from torch import Tensor, nn

from hetexp.core.errors import ConfigError, must_be
from hetexp.model.base import unknown
from hetexp.model.layered import LayerChain

MOST_GROUPS = 16
"""Groups of channels where the user does not say; the digits are learned in fewer steps than with 8."""


class ConvNet(LayerChain):
    """Stages of 3x3 convolutions, each but the first at half the height and width; then a channel's maximum.

    From images [batch, channels, height, width] to logits [batch, num_classes].

    Args:
        widths: channels of each stage; all stages but the first halve height and width.
        blocks_per_width: residual blocks of each stage, after the convolution that changes the width; the
            last number is that of all further stages, and a number alone that of every stage.
        norm: normalisation: `group` normalises each sample by groups of channels, `batch` each channel over
            the batch.
        groups: groups of channels that are normalised together; must divide every width. `None`: 16, or as
            many as divide both 16 and the width.
        input_shape: shape of one image, [channels, height, width]; `None`: the data's.
        num_classes: number of outputs; `None`: the data's.

    Raises:
        ConfigError: `groups` does not divide the widths, the shape is not that of an image, or the shape or
            the number of classes is not known.
    """

    def __init__(
        self,
        widths: Annotated[Sequence[PositiveInt], Field(min_length=1)] = (64, 32, 32, 64),
        blocks_per_width: PositiveInt | Annotated[Sequence[PositiveInt], Field(min_length=1)] = (2, 1),
        norm: Literal["group", "batch"] = "group",
        groups: PositiveInt | None = None,
        input_shape: Annotated[Sequence[PositiveInt], Field(min_length=1)] | None = None,
        num_classes: PositiveInt | None = None,
    ) -> None:
        super().__init__()
        problems = self.check(widths=widths, groups=groups, input_shape=input_shape, norm=norm)
        problems += unknown(input_shape=input_shape, num_classes=num_classes)
        if problems or input_shape is None or num_classes is None:
            raise ConfigError(problems)
        layers: list[nn.Module] = []
        channels = input_shape[0]
        blocks = [blocks_per_width] if isinstance(blocks_per_width, int) else list(blocks_per_width)
        for stage, width in enumerate(widths):
            layers.append(_convolution(channels, width, norm, groups, stride=2 if stage else 1))
            residuals = blocks[min(stage, len(blocks) - 1)]
            layers += [_Residual(width, norm, groups) for _ in range(residuals)]
            channels = width
        layers += [_Maximum(), nn.Linear(channels, num_classes)]
        self.layers = nn.Sequential(*layers)

    @staticmethod
    def check(
        widths: Sequence[int] = (64, 32, 32, 64),
        groups: int | None = None,
        input_shape: Sequence[int] | None = None,
        norm: str = "group",
        **_: Any,
    ) -> list[str]:
        """Return which arguments do not fit together, one sentence a problem."""
        problems = []
        if norm == "group" and groups and any(width % groups for width in widths):
            accepted = f"a divisor of every number in `model.widths` ({list(widths)})"
            problems.append(must_be("model.groups", accepted, groups))
        if input_shape is not None and len(input_shape) != 3:
            problems.append(must_be("model.input_shape", "[channels, height, width]", list(input_shape)))
        return problems


class _Residual(nn.Module):
    """Adds a convolution of the input to the input."""

    def __init__(self, width: int, norm: str, groups: int | None) -> None:
        super().__init__()
        self.branch = _convolution(width, width, norm, groups)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = images + self.branch(images)
        return out


class _Maximum(nn.Module):
    """Largest value of each channel: [batch, channels, height, width] to [batch, channels].

    On small images it learns faster than the mean. The gradient of `amax` is deterministic on every device,
    unlike that of torch's adaptive pooling.
    """

    def forward(self, images: Tensor) -> Tensor:
        return images.amax(dim=(2, 3))


def _convolution(inputs: int, outputs: int, norm: str, groups: int | None, stride: int = 1) -> nn.Sequential:
    # No bias: the normalisation that follows has one.
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
    groups = groups or math.gcd(MOST_GROUPS, outputs)
    normalisation = nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(groups, outputs)
    return nn.Sequential(convolution, normalisation, nn.ReLU())
