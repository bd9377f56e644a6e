"""`trainer.compile`: torch.compile for the model's passes; weights and their names stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetexp.core.config import Config
from hetexp.core.errors import SetupError
from hetexp.hardware.emulation.pacing import tensors
from hetexp.torch_private import allow_any_size, compiler_errors


def compiled(model: nn.Module, config: Config) -> nn.Module | None:
    """Return the compiled module of a model, with the same parameters; `None` without `trainer.compile`.

    Nothing is compiled before the first pass.
    """
    mode = config.trainer.compile
    if mode is False:
        return None
    module = torch.compile(model, mode=mode if isinstance(mode, str) else None)
    assert isinstance(module, nn.Module)
    return module


def any_batch_size(inputs: Any) -> None:
    """Let one graph serve all batch sizes but 1, which torch compiles separately."""
    for tensor in tensors(inputs):
        if tensor.dim():
            allow_any_size(tensor, 0)


@contextmanager
def compile_errors_explained() -> Iterator[None]:
    """Turn torch's compiler errors into one sentence.

    Raises:
        SetupError: torch's compiler gave up.
    """
    try:
        yield
    except compiler_errors() as error:
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        raise SetupError(
            f"`trainer.compile` must be false if torch cannot compile the model: {first_line}. A compiler "
            "for C++ is needed on the CPU, Triton on a card."
        ) from error
