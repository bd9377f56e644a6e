"""A model's weights in the format of another program, for `hetexp export`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Exported:
    """Result of a model class's static method `exported(tensors, state)`.

    `tensors` are the checkpoint's by the model's names, tied ones under each name; `state` is `state.json`.
    """

    file: str
    """Name of the safetensors file of the tensors."""
    tensors: dict[str, Tensor]
    described: dict[str, dict[str, Any]]
    """Content of JSON files, by name."""
    retype: Callable[[dict[str, dict[str, Any]], torch.dtype], None] = lambda described, dtype: None
    """Writes another type of the tensors into `described`."""

    def to(self, dtype: torch.dtype) -> Exported:
        """Return the same with floating-point tensors of this type."""
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.tensors.items()}
        described = {name: dict(content) for name, content in self.described.items()}
        self.retype(described, dtype)
        return Exported(self.file, tensors, described, self.retype)
