"""`trainer.compile`: the model's passes by torch.compile, the weights and their names as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetexp.core.config import Config
from hetexp.core.errors import SetupError
from hetexp.hardware.emulation.pacing import tensors


def compiled(model: nn.Module, config: Config) -> nn.Module | None:
    """Return what computes the model's passes where they are compiled, `None` where they are not.

    It holds the same parameters. Nothing is compiled before the first pass.
    """
    mode = config.trainer.compile
    if mode is False:
        return None
    made = torch.compile(model, mode=mode if isinstance(mode, str) else None)
    assert isinstance(made, nn.Module)
    return made


def any_batch_size(inputs: Any) -> None:
    """Let one graph serve all batch sizes but 1, which torch compiles by itself."""
    for tensor in tensors(inputs):
        if tensor.dim():
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


@contextmanager
def tells_why_not() -> Iterator[None]:
    """Tell in one sentence that this machine, or this model, cannot be compiled.

    Raises:
        SetupError: torch's compiler gave up.
    """
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        raise SetupError(
            f"`trainer.compile` must be false where torch cannot compile the model: {first_line}. A compiler "
            "for C++ is needed on the CPU, Triton on a card."
        ) from error
