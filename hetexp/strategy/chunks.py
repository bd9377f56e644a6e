"""Runs replicas of a module on several cards of one process, each with a chunk of the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hetexp.core.call import call_model
from hetexp.core.split import apportion
from hetexp.hardware.emulation.pacing import tensors
from hetexp.model.recompute import rebind


def scatter(value: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """Cut every tensor in nested inputs into consecutive chunks, in their order.

    Args:
        value: a tensor, or tuples, lists and dicts of them; other values go to every chunk.
        sizes: of the chunks along `dim`; they add up to its size.
    """
    if isinstance(value, torch.Tensor):
        return list(value.split(list(sizes), dim)) if value.dim() > dim else [value] * len(sizes)
    if isinstance(value, dict):
        chunks = {key: scatter(item, sizes, dim) for key, item in value.items()}
        return [{key: chunk[place] for key, chunk in chunks.items()} for place in range(len(sizes))]
    if isinstance(value, (tuple, list)):
        columns = [scatter(item, sizes, dim) for item in value]
        rows = [[column[place] for column in columns] for place in range(len(sizes))]
        return [_like(value, row) for row in rows]
    return [value] * len(sizes)


def move(value: Any, device: torch.device) -> Any:
    """Return nested inputs on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return _like(value, [move(item, device) for item in value])
    return value


def _like(value: Any, items: list[Any]) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


class Replicated(nn.Module):
    """Calls copies of a model with chunks of the inputs, by `torch.nn.parallel`'s own functions.

    Args:
        model: on the first card; holds the weights, and gets the sum of all chunks' gradients.
        devices: one a chunk; the same card may come twice.
        shares: of the samples, one a device; the copy of a device without samples is not called.
        output_device: gathers the outputs.
        dim: dimension that counts the samples.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[torch.device],
        shares: Sequence[float],
        output_device: torch.device,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self._devices, self._shares = list(devices), tuple(shares)
        self._output_device, self._dim = output_device, dim

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, on the output device."""
        from torch.nn.parallel import gather, parallel_apply, replicate

        total = next(t.shape[self._dim] for t in tensors((args, kwargs)) if t.dim() > self._dim)
        sizes = apportion(total, self._shares).counts
        used = [place for place, size in enumerate(sizes) if size]
        devices = [self._devices[place] for place in used]
        chunks = scatter(kwargs or args[0], [sizes[place] for place in used], self._dim)
        inputs = [move(chunk, device) for chunk, device in zip(chunks, devices, strict=True)]
        # Also to cards without samples, whose copies are not called: torch copies from the first card.
        replicas = replicate(self.model, self._devices)
        for replica in replicas:
            rebind(replica)
        autocast = _autocast(self._devices[0].type)
        calls = [_Call(replicas[place], autocast) for place in used]
        outputs = parallel_apply(calls, [(chunk,) for chunk in inputs], devices=devices)  # type: ignore[arg-type]
        return gather(outputs, self._output_device, self._dim)


class _Call:
    """Calls a replica in its own thread, which does not inherit the type of autocast."""

    def __init__(self, replica: nn.Module, autocast: dict[str, Any]) -> None:
        self._replica, self._autocast = replica, autocast

    def __call__(self, inputs: Any) -> Any:
        with torch.autocast(**self._autocast):
            return call_model(self._replica, inputs)


def _autocast(device_type: str) -> dict[str, Any]:
    return {
        "device_type": device_type,
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
    }
