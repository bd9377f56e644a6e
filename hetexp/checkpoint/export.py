"""Exports a checkpoint's weights for other programs: `model.safetensors` and `config.json`.

A model class whose weights have a format of their own elsewhere has a static method `exported(tensors,
state)` (`hetexp.model.exported.Exported`). The export then consists of its files and `hetexp.json`.
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
    """Write a checkpoint's weights into a folder, and return the content of `config.json` or `hetexp.json`.

    Tied tensors come under each of their names, so that torch loads them strictly
    (`model.load_state_dict(safetensors.torch.load_file(…))`).

    Args:
        checkpoint: folder of the checkpoint.
        output: folder, made if it is missing; files of these names are replaced.
        dtype: type of floating-point tensors; `None`: their own.
        say: prints a sentence if the model's class is not trusted; the weights then keep their format.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or the folder cannot be written.
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
    exported = _in_own_format(tensors, state, say) or Exported(WEIGHTS, tensors, {})
    exported = exported if dtype is None else exported.to(dtype)
    about["weights"] = exported.file
    temporary = output / f".{exported.file}.{os.getpid()}.tmp"
    try:
        output.mkdir(parents=True, exist_ok=True)
        try:
            write_tensors(temporary, exported.tensors, {"format": "pt"})
            os.replace(temporary, output / exported.file)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_dir(output)
        for name, described in exported.described.items():
            write_json(output / name, described)
        write_json(output / (ABOUT if exported.described else CONFIG), about)
    except OSError as error:
        raise CheckpointError(f"'{output}' could not be written: {error}.") from error
    return about


def _in_own_format(
    tensors: dict[str, torch.Tensor], state: dict[str, Any], say: Callable[[str], None]
) -> Exported | None:
    """Return the export of the model's class, `None` if the class has no format of its own.

    Raises:
        CheckpointError: a library that the class needs is missing.
    """
    try:
        target = state["extra"]["config"]["model"]["_target_"]
        own_format = getattr(locate(target, "model._target_", built=False), "exported", None)
    except ConfigError as error:
        for problem in error.problems:
            say(problem)
        return None
    except (ImportError, AttributeError) as error:  # a user's own class, which need not be here
        say(f"The weights keep their format, as `model._target_` cannot be imported: {error}.")
        return None
    if not callable(own_format):
        return None
    try:
        exported: Exported = own_format(tensors, state)
    except ImportError as error:
        raise CheckpointError(
            f"The weights could not be written as others keep them: {error}. For adapters: pip install "
            "'hetexp[lora]'."
        ) from error
    return exported
