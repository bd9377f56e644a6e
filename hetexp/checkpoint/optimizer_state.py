"""Packs an optimizer's state as named tensors and plain JSON, and restores it to the bit.

`Optimizer.load_state_dict` casts moments to the parameter's dtype and numbers the parameters. Here every
tensor keeps its dtype and has the name of its parameter.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetexp.core.errors import CheckpointError

MACHINE_KEYS = ("foreach", "fused", "capturable", "differentiable")
"""Options of how a step is computed; they keep the values of the optimizer that is restored."""

_AS_THEN = "`optimizer.groups` and `optimizer.no_decay` must divide the parameters as in its run."


def pack_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, keyed `<parameter name>/<state key>`, and everything else as plain JSON types.

    Args:
        optimizer: any optimizer that keeps its state by parameter.
        names: name of each parameter of the model.

    Raises:
        CheckpointError: a parameter is not the model's, or a value is neither a tensor nor a JSON type.
    """
    tensors: dict[str, Tensor] = {}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        values = {
            key: _encode(value, f"param_groups/{index}/{key}", tensors)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        groups.append({"params": [_name(p, names) for p in group["params"]], "values": values})
    state = {}
    for parameter, entries in optimizer.state.items():
        name = _name(parameter, names)
        state[name] = {key: _encode(value, f"{name}/{key}", tensors) for key, value in entries.items()}
    return tensors, {"class": _class_name(optimizer), "param_groups": groups, "state": state}


def check_optimizer(
    packed: Mapping[str, Any], optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Check that a packed state belongs to this optimizer, before anything is changed.

    Args:
        packed: the second value of `pack_optimizer`.
        optimizer: the optimizer to be restored.
        parameters: the model's parameters by name; a tied one comes under each of its names.

    Raises:
        CheckpointError: another class of optimizer, or other parameter groups.
    """
    if packed["class"] != _class_name(optimizer):
        raise CheckpointError(
            f"`resume` must name a checkpoint of the same optimizer, but it was saved with "
            f"{packed['class']} and `optimizer` builds {_class_name(optimizer)}."
        )
    saved = packed["param_groups"]
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"`resume` must name a checkpoint with the optimizer's {len(optimizer.param_groups)} parameter "
            f"groups, but it holds {len(saved)}. {_AS_THEN}"
        )
    for index, (entry, group) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        differing = [name for name in entry["params"] if parameters.get(name) is None]
        present = {id(parameters[name]) for name in entry["params"] if name in parameters}
        if differing or present != {id(parameter) for parameter in group["params"]}:
            raise CheckpointError(
                f"`resume` must name a checkpoint whose parameter group {index} holds the optimizer's "
                f"{len(group['params'])} parameters, but it holds {len(entry['params'])} other ones"
                + (f"; unknown here: {', '.join(differing[:3])}." if differing else f". {_AS_THEN}")
            )


def restore_optimizer(
    tensors: Mapping[str, Tensor],
    packed: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Put a packed state into an optimizer that `check_optimizer` has accepted.

    Each tensor goes to the device of its parameter and keeps its dtype. Step counters stay on the CPU
    unless the optimizer is fused or capturable, as torch itself has it.
    """
    optimizer.state.clear()
    for entry, group in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        for key, value in entry["values"].items():
            if key not in MACHINE_KEYS:
                current = group.get(key)
                device = current.device if isinstance(current, Tensor) else torch.device("cpu")
                group[key] = _decode(value, tensors, device)
        on_device = bool(group.get("fused") or group.get("capturable"))
        for name in [name for name in entry["params"] if name in packed["state"]]:
            parameter = parameters[name]
            devices = {} if on_device else {"step": torch.device("cpu")}
            optimizer.state[parameter] = {
                key: _decode(value, tensors, devices.get(key, parameter.device))
                for key, value in packed["state"][name].items()
            }


def part_of_optimizer(packed: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """Return the packed state of some parameters, with all groups, some of which may be empty.

    Args:
        packed: the second value of `pack_optimizer`.
        names: names of the parameters in the state.
    """
    groups = [
        {**group, "params": [name for name in group["params"] if name in names]}
        for group in packed["param_groups"]
    ]
    state = {name: entries for name, entries in packed["state"].items() if name in names}
    return {**packed, "param_groups": groups, "state": state}


def join_optimizers(parts: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """Return the packed state of one optimizer over the parameters of several.

    Args:
        parts: second values of `pack_optimizer`, of different parameters of one model.
        order: names of all parameters, as the model has them.

    Raises:
        CheckpointError: the optimizers have different classes or numbers of groups.
    """
    classes = sorted({part["class"] for part in parts})
    counts = sorted({len(part["param_groups"]) for part in parts})
    if len(classes) > 1 or len(counts) > 1:
        raise CheckpointError(
            "The stages' optimizers must be of one class and have the same number of parameter groups to be "
            f"saved as one, but are {' and '.join(classes)} with {' and '.join(map(str, counts))} groups."
        )
    place = {name: index for index, name in enumerate(order)}
    groups = []
    for several in zip(*(part["param_groups"] for part in parts), strict=True):
        names = sorted((name for group in several for name in group["params"]), key=place.__getitem__)
        groups.append({**several[0], "params": names})
    state = {name: entries for part in parts for name, entries in part["state"].items()}
    ordered = {name: state[name] for name in sorted(state, key=place.__getitem__)}
    return {**parts[0], "param_groups": groups, "state": ordered}


def tensor_names(packed: object) -> set[str]:
    """Return the keys of all tensors that a packed state refers to."""
    if isinstance(packed, Mapping):
        if isinstance(packed.get("$tensor"), str):
            return {packed["$tensor"]}
        return set().union(*map(tensor_names, packed.values()))
    if isinstance(packed, list):
        return set().union(*map(tensor_names, packed))
    return set()


def _encode(value: object, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON types; tensors go into `tensors` under `path`, and a reference replaces them."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        if value.dtype == torch.complex128:  # safetensors has no such type
            tensors[path] = torch.view_as_real(value)
            return {"$tensor": path, "complex": True}
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, list) or type(value) is tuple:
        items = [_encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"$dict": {key: _encode(item, f"{path}/{key}", tensors) for key, item in value.items()}}
    item = getattr(value, "item", None)
    if callable(item) and type(number := item()) in (bool, int, float):  # a NumPy scalar
        return number
    raise CheckpointError(
        f"The optimizer's '{path}' must be a tensor or a plain value to be saved, but is "
        f"{type(value).__name__}."
    )


def _decode(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        # A copy: the loaded tensor may be a view of the file.
        copied = tensors[value["$tensor"]].to(device, copy=True)
        return torch.view_as_complex(copied) if value.get("complex") else copied
    if "$tuple" in value:
        return tuple(_decode(item, tensors, device) for item in value["$tuple"])
    return {key: _decode(item, tensors, device) for key, item in value["$dict"].items()}


def _name(parameter: object, names: Mapping[nn.Parameter, str]) -> str:
    if not isinstance(parameter, nn.Parameter) or parameter not in names:
        raise CheckpointError(
            "The optimizer must hold parameters of the model only, but holds "
            + (f"one of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else repr(parameter))
            + " that is not among `model.named_parameters()`."
        )
    return names[parameter]


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
