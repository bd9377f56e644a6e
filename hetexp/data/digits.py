"""Handwritten digits that ship with scikit-learn: real images without a download."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from hetexp.core.errors import ConfigError, must_be
from hetexp.data.base import DataSource

if TYPE_CHECKING:
    from hetexp.data.in_memory import InMemory

NUM_IMAGES = 1797
NUM_CLASSES = 10
PIXELS = 8
"""Height and width of a scanned image."""


class Digits(DataSource):
    """The 1,797 images of 8x8 pixels of the UCI digits test set (`sklearn.datasets.load_digits`), enlarged.

    A sample is (image, class): float32 [1, size, size] in [0, 1], and int64 [].

    Args:
        test_fraction: part of the images kept for evaluation, the same of each class.
        seed: seed that decides which images.
        size: height and width of an image in pixels. Larger ones are enlarged by bilinear interpolation, so
            that a convolution uses each weight at as many places as in a usual model of images, and has as
            much to compute for each exchanged byte.

    Raises:
        ConfigError: a part would be too small to hold every class.
    """

    def __init__(
        self,
        test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2,
        seed: Annotated[int, Field(ge=0, lt=2**32)] = 0,
        size: Annotated[int, Field(ge=PIXELS)] = 32,
    ) -> None:
        if problems := self.check(test_fraction=test_fraction):
            raise ConfigError(problems)
        import torch
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        from hetexp.data.in_memory import InMemory

        images, classes = load_digits(return_X_y=True)
        pixels = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, PIXELS, PIXELS)
        if size != PIXELS:
            pixels = torch.nn.functional.interpolate(pixels, size=(size, size), mode="bilinear")
        labels = torch.tensor(classes, dtype=torch.int64)
        train, test = train_test_split(
            range(len(images)), test_size=test_fraction, random_state=seed, stratify=classes
        )
        self._prepare(InMemory(pixels[train], labels[train]), InMemory(pixels[test], labels[test]))

    def _prepare(self, train: InMemory, evaluation: InMemory) -> None:
        """Set the samples and facts from the two parts of the images."""
        self.train, self.evaluation = train, evaluation
        self.facts = {"input_shape": list(train.tensors[0].shape[1:]), "num_classes": NUM_CLASSES}

    @staticmethod
    def check(test_fraction: float = 0.2, **_: Any) -> list[str]:
        """Return what is wrong with the arguments, one sentence a problem."""
        num_test = math.ceil(NUM_IMAGES * test_fraction)
        if min(num_test, NUM_IMAGES - num_test) >= NUM_CLASSES:
            return []
        accepted = f"such that both parts of the {NUM_IMAGES} images hold all {NUM_CLASSES} classes"
        fix = f"It keeps {num_test} for evaluation."
        return [must_be("data.test_fraction", accepted, test_fraction, fix)]


class DigitVectors(Digits):
    """The same images as vectors to be reconstructed: a sample is (pixels, pixels), float32 [64].

    All are multiplied by one number, so that the mean length is 8, the root of the width, as
    `hetexp.data.activations` does.

    Args:
        test_fraction: part of the images kept for evaluation, the same of each class.
        seed: seed that decides which images.

    Raises:
        ConfigError: a part would be too small to hold every class.
    """

    def __init__(
        self,
        test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2,
        seed: Annotated[int, Field(ge=0, lt=2**32)] = 0,
    ) -> None:
        super().__init__(test_fraction, seed, PIXELS)

    def _prepare(self, train: InMemory, evaluation: InMemory) -> None:
        from hetexp.data.in_memory import InMemory

        pixels = [images.tensors[0].flatten(1) for images in (train, evaluation)]
        scale = math.sqrt(pixels[0].shape[1]) / float(pixels[0].double().norm(dim=1).mean())
        vectors, held_out = (part * scale for part in pixels)
        self.train, self.evaluation = InMemory(vectors, vectors), InMemory(held_out, held_out)
        self.facts = {"input_size": vectors.shape[1], "mean": vectors.mean(0).tolist(), "scale": scale}
