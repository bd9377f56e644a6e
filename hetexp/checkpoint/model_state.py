"""Packs a model's state as named tensors: names without wrappers, tied tensors once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetexp.core.errors import CheckpointError

_PRECISIONS = (torch.float32, torch.float64)
"""Types of weights that `trainer.precision` can ask for."""


def plain_names(model: nn.Module) -> dict[str, str]:
    """Return, for each name of `state_dict()` and of the parameters, the name without wrappers.

    `DistributedDataParallel` and `DataParallel` put `module.` in front, `torch.compile` puts `_orig_mod.`
    at each compiled module. A checkpoint does not depend on them.
    """
    wrappers = {
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if "_orig_mod" in module._modules
        or isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel))
    }
    names = [*model.state_dict(), *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    return {name: _without_wrappers(name, wrappers) for name in names}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by plain name, in the model's order; a tied one comes under each of its names."""
    names = plain_names(model)
    return {names[name]: p for name, p in model.named_parameters(remove_duplicate=False)}


def first_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return each parameter's plain name, of a tied one the first."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in named_parameters(model).items():
        names.setdefault(parameter, name)
    return names


def pack_model(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by plain name, tied ones once, and the left-out names with the name kept for each.

    `safetensors.torch.save_model` keeps the second value as metadata, too, so that `load_model` of that
    library reads the files.

    Raises:
        CheckpointError: the model keeps state that is no tensor.
    """
    tensors: dict[str, Tensor] = {}
    left_out: dict[str, str] = {}
    kept: dict[tuple[Any, ...], str] = {}
    state = _tensors(model)
    for name in sorted(state):
        tensor = state[name]
        same = kept.setdefault(identity(tensor, name), name)
        if same == name:
            tensors[name] = tensor
        else:
            left_out[name] = same
    return tensors, left_out


def match_model(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors for `model.load_state_dict`, by the model's own names, without changing the model.

    Args:
        tensors: as `pack_model` gave them, by plain name.
        model: of the same architecture, wrapped or not.

    Raises:
        CheckpointError: names, shapes or dtypes differ; the first few are named.
    """
    state = _tensors(model)
    by_identity: dict[tuple[Any, ...], Tensor] = {}
    extra = [name for name in tensors if name not in state]
    for name, tensor in tensors.items():
        if name in state and by_identity.setdefault(identity(state[name], name), tensor) is not tensor:
            extra.append(f"{name} apart from the tensor that the model ties it to")
    full = {
        name: saved
        for name, target in state.items()
        if (saved := tensors.get(name, by_identity.get(identity(target, name)))) is not None
    }
    if missing := [name for name in state if name not in full]:
        raise CheckpointError(_mismatch("all tensors of the model", "lacks", missing))
    if extra:
        raise CheckpointError(_mismatch("no tensor that the model does not have", "holds", extra))
    if shapes := [
        f"{name} {tuple(full[name].shape)} for {tuple(state[name].shape)}"
        for name in state
        if full[name].shape != state[name].shape
    ]:
        raise CheckpointError(_mismatch("tensors of the model's shapes", "holds", shapes))
    _check_dtypes(full, state)
    names = plain_names(model)
    return {
        name: torch.view_as_complex(full[names[name]])
        if value.dtype == torch.complex128
        else full[names[name]]
        for name, value in model.state_dict().items()
    }


def _check_dtypes(full: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    differing = [name for name in state if full[name].dtype != state[name].dtype]
    if not differing:
        return
    saved, wanted = full[differing[0]].dtype, state[differing[0]].dtype
    if saved in _PRECISIONS and wanted in _PRECISIONS:
        raise CheckpointError(
            f"`trainer.precision` must be '{_short(saved)}' to resume this checkpoint, but is "
            f"'{_short(wanted)}' instead ({_few(differing)})."
        )
    dtypes = [f"{name} {_short(full[name].dtype)} for {_short(state[name].dtype)}" for name in differing]
    raise CheckpointError(_mismatch("tensors of the model's dtypes", "holds", dtypes))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    names = plain_names(model)
    tensors = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"The model's '{name}' must be a tensor to be saved, but is {type(value).__name__}."
            )
        # safetensors has no complex128: its real and imaginary parts are saved, [..., 2] in float64.
        tensors[names[name]] = torch.view_as_real(value) if value.dtype == torch.complex128 else value
    return tensors


def identity(tensor: Tensor, name: str) -> tuple[Any, ...]:
    """Return a key that is equal for two views of the same memory; tensors without memory are never equal."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
        return (name,)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _without_wrappers(name: str, wrappers: set[str]) -> str:
    parts = name.split(".")
    return ".".join(part for i, part in enumerate(parts) if ".".join(parts[:i]) not in wrappers)


def _mismatch(accepted: str, verb: str, items: list[str]) -> str:
    fix = "Repeat the whole command of its run, with `resume=` added."
    return f"`resume` must name a checkpoint with {accepted}, but it {verb} {_few(items)}. {fix}"


def _few(items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(items[:3]) + more


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
