"""A checkpoint's weights as any other program reads them: `model.safetensors` and `config.json`.

Of a sparse autoencoder they are `sae_weights.safetensors` and `cfg.json` (`hetexp.checkpoint.export_sae`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

import hetexp
from hetexp.checkpoint import export_sae
from hetexp.checkpoint.folder import STATE, read_packed
from hetexp.checkpoint.tensor_file import write_tensors
from hetexp.core.errors import CheckpointError
from hetexp.core.files import fsync_dir, write_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def file_names(checkpoint: Path) -> tuple[str, str]:
    """Return the names of the two files that the export of a checkpoint makes."""
    try:
        config = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["extra"]["config"]
    except (OSError, ValueError, KeyError):  # which the export itself tells better
        return WEIGHTS, CONFIG
    return (export_sae.WEIGHTS, export_sae.CONFIG) if export_sae.is_sae(config) else (WEIGHTS, CONFIG)


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
    weights, described = WEIGHTS, CONFIG
    config = state["extra"]["config"]
    of_sae: dict[str, Any] = {}
    if export_sae.is_sae(config):
        weights, described = export_sae.WEIGHTS, export_sae.CONFIG
        tensors, of_sae = export_sae.to_sae_lens(tensors, state)
    if dtype is not None:
        tensors = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
    about = {
        "model": config["model"],
        "data": config["data"],
        "tied": left_out,
        "step": state["step"],
        "run_id": state["extra"]["run_id"],
        "hetexp": hetexp.__version__,
    }
    if of_sae and dtype is not None:
        of_sae["dtype"] = str(dtype).removeprefix("torch.")
    temporary = output / f".{weights}.{os.getpid()}.tmp"
    try:
        output.mkdir(parents=True, exist_ok=True)
        try:
            write_tensors(temporary, tensors, {"format": "pt"})
            os.replace(temporary, output / weights)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_dir(output)
        write_json(output / described, of_sae or about)
    except OSError as error:
        raise CheckpointError(f"'{output}' could not be written: {error}.") from error
    return about
