"""The workspaces of cuDNN's float32 convolutions on a device with enough memory.

For each pass, cuDNN's heuristics list algorithms, the fastest first, and torch takes the first that fits into
memory (`Conv_v8.cpp`, `try_configs`). So this memory is used if it is free, but not needed: of 485 passes
that took more than 32 MiB, 444 ran with 16 MiB to spare as well.

The size of a workspace is arithmetic: right for all 102 FFTs, and for 198 of 233 by Winograd. Only cuDNN
knows its choice of algorithm, which may change with its version and the card. The conditions here are the
simplest that agree with most of 365 convolutions on an H100 by cuDNN 9.19
(`benchmarks/bench_convolutions.py`). So the estimated peak of a convnet in float32 may be wrong: of nine
others it was right to 2 % for six, and 0.70, 0.80 and 1.48 of what was measured for three. Other kernels and
strides, and dimensions other than two, are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COMPLEX_BYTES = 8
TILE = 32
"""Height and width of the tiles that cuDNN's tiled FFT transforms."""
TILES_AT_ONCE = 2


@dataclass(frozen=True)
class Convolution:
    """A convolution of 3x3 with stride 1 in float32, neither grouped nor dilated, padded to keep the size."""

    batch: int
    inputs: int
    outputs: int
    height: int
    width: int

    @property
    def channels(self) -> int:
        """The smaller number of channels: how often each transformed value is used."""
        return min(self.inputs, self.outputs)

    def forward_bytes(self) -> int:
        """Return the workspace of the output: an FFT of whole images.

        Inputs and weights are transformed and then reordered, and so is the result; the two buffers
        alternate. Chosen from 128 channels and 32 images on, up to 64 pixels: right for 89 % of the
        convolutions, and for 24 of the 42 that use an FFT.
        """
        if self.channels < 128 or self.batch < 32 or not 7 <= max(self.height, self.width) <= 64:
            return 0
        height, width = (2 ** math.ceil(math.log2(size + 2)) for size in (self.height, self.width))
        weights = self.inputs * self.outputs
        planes = max(self.batch * self.inputs + weights, self.batch * self.outputs)
        return 2 * planes * _spectrum(height, width) + 4 * 9 * weights

    def input_gradient_bytes(self) -> int:
        """Return the workspace of the input's gradient: an FFT of tiles, two at once.

        Chosen from 32 channels, 8 images and 28 pixels on: right for 86 % of the convolutions.
        """
        if self.channels < 32 or self.batch < 8 or max(self.height, self.width) < 28:
            return 0
        results = TILE - 2
        tiles = min(TILES_AT_ONCE, math.ceil(self.height / results) * math.ceil(self.width / results))
        planes = tiles * self.batch * (self.inputs + self.outputs) + self.inputs * self.outputs
        return planes * _spectrum(TILE, TILE)

    def weight_gradient_bytes(self) -> int:
        """Return the workspace of the weight's gradient: Winograd's F(4x4, 3x3), 36 values a tile.

        Chosen from 32 channels on: right for 87 % of the convolutions.
        """
        if self.channels < 32:
            return 0
        tiles = self.batch * math.ceil(self.height / 4) * math.ceil(self.width / 4)
        return 4 * 36 * (tiles * (self.inputs + self.outputs) + self.inputs * self.outputs)


def _spectrum(height: int, width: int) -> int:
    """Return the bytes of a real image's transform, of which half is the other half's conjugate."""
    return COMPLEX_BYTES * height * (width // 2 + 1)
