"""A checkpoint's weights as any other program reads them: `model.safetensors` and `config.json`.

A model class whose weights others keep in another way has a static method `exported(tensors, state)` that
gives them so (`hetexp.model.exported.Exported`). Those files stand alone then, beside `hetexp.json`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hetexp
from hetexp.checkpoint.folder import read_packed
from hetexp.checkpoint.tensor_file import write_tensors
from hetexp.core.errors import CheckpointError, ConfigError
from hetexp.core.files import fsync_dir, write_json
from hetexp.core.instantiate import locate
from hetexp.model.exported import Exported

WEIGHTS, CONFIG, ABOUT = "model.safetensors", "config.json", "hetexp.json"


def export(
    checkpoint: Path,
    output: Path,
    dtype: torch.dtype | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write the weights of a checkpoint into a folder, and return what `config.json` or `hetexp.json` says.

    Tied tensors come under each of their names, so that torch loads them strictly
    (`model.load_state_dict(safetensors.torch.load_file(…))`).

    Args:
        checkpoint: its folder.
        output: made where it is missing; files of these names are replaced.
        dtype: of floating-point tensors; `None`: as they are.
        say: gets the sentence that the model's class is not trusted, so that nothing asks it for its format.

    Raises:
        CheckpointError: it is incomplete or damaged, or the folder cannot be written.
    """
    tensors, left_out, state, _ = read_packed(checkpoint)
    tensors |= {name: tensors[kept] for name, kept in left_out.items()}
    config = state["extra"]["config"]
    about = {
        "model": config["model"],
        "data": config["data"],
        "tied": left_out,
        "step": state["step"],
        "run_id": state["extra"]["run_id"],
        "hetexp": hetexp.__version__,
    }
    kept = _as_others_keep_it(tensors, state, say) or Exported(WEIGHTS, tensors, {})
    kept = kept if dtype is None else kept.to(dtype)
    about["weights"] = kept.file
    temporary = output / f".{kept.file}.{os.getpid()}.tmp"
    try:
        output.mkdir(parents=True, exist_ok=True)
        try:
            write_tensors(temporary, kept.tensors, {"format": "pt"})
            os.replace(temporary, output / kept.file)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_dir(output)
        for name, described in kept.described.items():
            write_json(output / name, described)
        write_json(output / (ABOUT if kept.described else CONFIG), about)
    except OSError as error:
        raise CheckpointError(f"'{output}' could not be written: {error}.") from error
    return about


def _as_others_keep_it(
    tensors: dict[str, torch.Tensor], state: dict[str, Any], say: Callable[[str], None]
) -> Exported | None:
    """Return what the model's class makes of its tensors, `None` where it says nothing.

    Raises:
        CheckpointError: it cannot, as a library of its is missing.
    """
    try:
        target = state["extra"]["config"]["model"]["_target_"]
        tell = getattr(locate(target, "model._target_"), "exported", None)
    except ConfigError as error:
        for problem in error.problems:
            say(problem)
        return None
    except Exception:  # a person's own class, which need not be here
        return None
    if not callable(tell):
        return None
    try:
        found: Exported = tell(tensors, state)
    except ImportError as error:
        raise CheckpointError(
            f"The weights could not be written as others keep them: {error}. For adapters: pip install "
            "'hetexp[lora]'."
        ) from error
    return found
