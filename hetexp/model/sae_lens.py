"""Exports a sparse autoencoder as SAELens reads it (`SAE.load_from_disk`): weights and `cfg.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hetexp
from hetexp.core.files import read_json
from hetexp.model.exported import Exported

WEIGHTS, CONFIG = "sae_weights.safetensors", "cfg.json"
SOURCE = "source.json"
"""File that `hetexp harvest` writes beside activations."""
FORMAT = "6.0.0"
"""Version of SAELens that defines this `cfg.json`; later versions convert it."""
ARCHITECTURES = {"relu": "standard", "topk": "topk", "jumprelu": "jumprelu"}


def to_sae_lens(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Exported:
    """Return the files of an autoencoder of the source model's unscaled vectors.

    The factor of the training data is folded into the weights, as SAELens does after its own training.
    Encoder input and decoder output are then unscaled, and features stay the same.

    Args:
        tensors: tensors of the checkpoint, by the model's names.
        state: `state.json` of the checkpoint.
    """
    config = state["extra"]["config"]
    scale = tensors["scale"].to(tensors["W_enc"].dtype)
    kept = {
        "W_enc": tensors["W_enc"] * scale,
        "b_enc": tensors["b_enc"],
        "W_dec": tensors["W_dec"] / scale,
        "b_dec": tensors["b_dec"] / scale,
    }
    if "threshold" in tensors:
        kept["threshold"] = tensors["threshold"]
    activation = config["model"].get("activation", "relu")
    d_in, d_sae = kept["W_enc"].shape
    about: dict[str, Any] = {
        "architecture": ARCHITECTURES[activation],
        "d_in": d_in,
        "d_sae": d_sae,
        "dtype": str(kept["W_enc"].dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": _metadata(state),
    }
    if activation == "topk":
        about |= {"k": config["model"].get("k", 32), "rescale_acts_by_decoder_norm": False}
    return Exported(WEIGHTS, kept, {CONFIG: about}, _name_type)


def _name_type(described: dict[str, dict[str, Any]], dtype: torch.dtype) -> None:
    described[CONFIG]["dtype"] = str(dtype).removeprefix("torch.")


def _metadata(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the origin of the vectors, as far as it is known, and of the autoencoder."""
    extra = state["extra"]
    folder = extra["config"]["data"].get("folder")
    try:
        source = read_json(Path(folder).expanduser() / SOURCE) if folder else {}
    except (OSError, ValueError):  # moved, or not of `hetexp harvest`
        source = {}
    return {
        "sae_lens_version": FORMAT,
        "model_name": source.get("model"),
        "hook_name": source.get("layer"),
        "hetexp": hetexp.__version__,
        "run_id": extra["run_id"],
        "step": state["step"],
    }
