"""A checkpoint's weights as any other program reads them: `model.safetensors` and `config.json`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import hetexp
from hetexp.checkpoint.folder import read_packed
from hetexp.checkpoint.tensor_file import write_tensors
from hetexp.core.errors import CheckpointError
from hetexp.core.files import fsync_dir, write_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def export(checkpoint: Path, output: Path, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Write the weights of a checkpoint into a folder, and return what `config.json` says.

    Tied tensors come under each of their names, so that torch loads them strictly
    (`model.load_state_dict(safetensors.torch.load_file(…))`).

    Args:
        checkpoint: its folder.
        output: made where it is missing; the two files are replaced.
        dtype: of floating-point tensors; `None`: as they are.

    Raises:
        CheckpointError: it is incomplete or damaged, or the folder cannot be written.
    """
    tensors, left_out, state, _ = read_packed(checkpoint)
    tensors |= {name: tensors[kept] for name, kept in left_out.items()}
    if dtype is not None:
        tensors = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
    config = state["extra"]["config"]
    about = {
        "model": config["model"],
        "data": config["data"],
        "tied": left_out,
        "step": state["step"],
        "run_id": state["extra"]["run_id"],
        "hetexp": hetexp.__version__,
    }
    temporary = output / f".{WEIGHTS}.{os.getpid()}.tmp"
    try:
        output.mkdir(parents=True, exist_ok=True)
        try:
            write_tensors(temporary, tensors, {"format": "pt"})
            os.replace(temporary, output / WEIGHTS)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_dir(output)
        write_json(output / CONFIG, about)
    except OSError as error:
        raise CheckpointError(f"'{output}' could not be written: {error}.") from error
    return about
