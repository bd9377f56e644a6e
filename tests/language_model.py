"""Small language models and fine-tuning data for tests of adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 259,
    "initializer_range": 0.2,  # with the usual 0.02 so small a model multiplies a rounding error in each step
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def architecture(kind: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model_type": kind, **SIZES, **changes}


def override(architecture: dict[str, Any]) -> str:
    """Return the override that names an architecture."""
    inner = ",".join(f"{key}: {str(value).lower()}" for key, value in architecture.items())
    return f"model.architecture={{{inner}}}"


def saved_base(folder: Path, **changes: Any) -> Path:
    """Write a small base with random weights, as Hugging Face keeps one, and return the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture(**changes))).save_pretrained(
            folder
        )
    return folder


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
