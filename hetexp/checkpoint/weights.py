"""Loads a model's first weights from files, by name: of hetexp, of Hugging Face, of torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hetexp.checkpoint.manifest import find_checkpoint
from hetexp.checkpoint.model_state import identity, plain_names
from hetexp.core.errors import CheckpointError, ConfigError, must_be

log = logging.getLogger(__name__)

INDEX = ".index.json"
FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of files in a folder, or with `.index.json` behind them of the list of several files."""
_HELD_UNDER = ("state_dict", "model", "model_state_dict")
"""Keys under which a file of torch may hold the model's tensors beside others."""
_WRAPPERS = ("module.", "_orig_mod.")
"""What torch's DistributedDataParallel and compile put before all names."""
ACCEPTED = (
    "a .safetensors file, a file of torch.save that holds tensors, or a folder with model.safetensors, as a "
    "checkpoint or save_pretrained has it"
)


def load_weights(model: nn.Module, path: Path, strict: bool = True) -> None:
    """Copy tensors from files into a model by name, in the model's own types.

    Args:
        model: all its tensors have data and shapes.
        path: a file, or a folder: a checkpoint, a run (its newest checkpoint), or of `save_pretrained`.
        strict: whether the model and the files must have the same tensors. Otherwise those of one name and
            shape are copied, and the log names the others.

    Raises:
        ConfigError: the files cannot be read, or do not fit; nothing was changed.
    """
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    names = plain_names(model)
    prefix = str(getattr(model, "base_model_prefix", ""))
    found = _unwrapped(_read(path), {names[name]: tensor for name, tensor in state.items()}, prefix)
    by_identity = {identity(state[n], n): found[names[n]] for n in state if names[n] in found}
    chosen = {n: found.get(names[n], by_identity.get(identity(t, n))) for n, t in state.items()}
    shapes = [
        f"{names[n]} {_kind(tensor)} for {_kind(state[n])}"
        for n, tensor in chosen.items()
        if tensor is not None and not _fits(tensor, state[n])
    ]
    missing = [names[n] for n, tensor in chosen.items() if tensor is None]
    # A name that is tied to another one in the file's model may be left out of this one's.
    extra = sorted(found.keys() - {names[n] for n in state})
    fits = {n: t for n, t in chosen.items() if t is not None and _fits(t, state[n])}
    differences = [
        f"{text} {_few(items)}"
        for text, items in (("lacks", missing), ("holds other shapes:", shapes), ("also holds", extra))
        if items
    ]
    if differences and (strict or not fits):
        fix = "model.weights_strict=false loads those that fit." if fits else "None of its tensors fits."
        raise ConfigError(
            f"`model.weights` must hold the model's tensors, but '{path}' {', and '.join(differences)}. {fix}"
        )
    if differences:
        log.warning("model.weights: '%s' %s; %d tensors fit.", path, ", and ".join(differences), len(fits))
    with torch.no_grad():
        for name, tensor in fits.items():
            state[name].copy_(tensor)
    log.info("model.weights: %d tensors of '%s'", len(fits), path)


def _fits(tensor: Tensor, target: Tensor) -> bool:
    return tensor.shape == target.shape and tensor.is_complex() <= target.is_complex()


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)}{' complex' * tensor.is_complex()}"


def _read(path: Path) -> dict[str, Tensor]:
    path = path.expanduser()
    try:
        return _read_folder(path) if path.is_dir() else _read_file(path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(must_be("model.weights", ACCEPTED, str(path), reason)) from error


def _read_folder(folder: Path) -> dict[str, Tensor]:
    for name in FILES:
        if (folder / name).is_file():
            return _read_file(folder / name)
        index = folder / f"{name}{INDEX}"
        if index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            tensors: dict[str, Tensor] = {}
            for file in sorted(set(files)):
                if Path(file).name != file:  # no file outside of the folder
                    raise ValueError(f"its index names {file!r}")
                tensors |= _read_file(folder / file)
            return tensors
    try:
        return _read_file(find_checkpoint(folder) / FILES[0])
    except (CheckpointError, ConfigError) as error:  # they speak of `resume`
        raise ValueError(f"It holds neither {FILES[0]} nor a whole checkpoint.") from error


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        tensors = safetensors.torch.load_file(path, device="cpu")
        with safetensors.safe_open(path, "pt", "cpu") as file:
            tied = dict(file.metadata() or {})
        return tensors | {name: tensors[kept] for name, kept in tied.items() if kept in tensors}
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's errors have no class in common
        raise ValueError(f"It is no file of tensors alone ({type(error).__name__}).") from error
    for key in _HELD_UNDER:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise ValueError(f"It holds a {type(content).__name__} instead of tensors by name.")
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _unwrapped(tensors: dict[str, Tensor], state: Mapping[str, Tensor], inner: str = "") -> dict[str, Tensor]:
    """Return the tensors without what wrappers put before every name, and complex ones as such.

    Args:
        state: the model's tensors by name.
        inner: name of the model inside a model of transformers, whose weights may have been saved alone.
    """
    while tensors and not state.keys() & tensors.keys():
        prefix = next((p for p in _WRAPPERS if all(name.startswith(p) for name in tensors)), None)
        if prefix is None:
            break
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    inside = {f"{inner}.{name}": tensor for name, tensor in tensors.items()}
    if not state.keys() & tensors.keys() and state.keys() & inside.keys():
        tensors = inside
    for name in tensors.keys() & state.keys():
        # A checkpoint of hetexp holds complex128 as its real and imaginary parts.
        if state[name].is_complex() and tensors[name].shape == (*state[name].shape, 2):
            tensors[name] = torch.view_as_complex(tensors[name].contiguous())
    return tensors


def _few(items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(items[:3]) + more
