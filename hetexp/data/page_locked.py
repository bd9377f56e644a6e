"""From host to device: page-locked memory, from which a card copies while the host goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from hetexp.torch_private import collate, default_collate_fn_map

log = logging.getLogger(__name__)


class PageLocked:
    """Allocates memory for microbatches: page-locked if enabled, else ordinary.

    torch reuses freed page-locked memory after the copies from it have ended: only the first steps pay for
    locking. If the system has no more of it, a warning appears once, and memory is ordinary from then on.

    Args:
        enabled: whether the device copies from such memory (`Backend.copies_page_locked`).
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor."""
        if self.enabled:
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except RuntimeError as error:
                self._give_up(error)
        return torch.empty(shape, dtype=dtype)

    def stacked(self, samples: list[Any]) -> Any:
        """Return what `default_collate` makes of samples, with their tensors stacked in this memory.

        torch would stack them in new memory and copy the result. The system clears new memory page by page,
        which takes a large batch many times as long as the copy.
        """

        def stack(rows: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
            first = rows[0]
            if not all(_stacks_with(row, first) for row in rows):
                result: torch.Tensor = default_collate_fn_map[torch.Tensor](rows)
                return result
            return torch.stack(rows, out=self.empty((len(rows), *first.shape), first.dtype))

        return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: stack})

    def hold(self, value: Any) -> Any:
        """Return a collated microbatch with its tensors in page-locked memory, if enabled.

        Dicts, lists and tuples keep their types; an object with a method `pin_memory` is replaced by its
        result.
        """
        if not self.enabled:
            return value
        try:
            return _pinned(value)
        except RuntimeError as error:
            self._give_up(error)
            return value

    def _give_up(self, error: RuntimeError) -> None:
        self.enabled = False
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("no page-locked memory for samples, whose copies to the device now wait: %s", reason)


def _stacks_with(row: torch.Tensor, first: torch.Tensor) -> bool:
    plain = type(row) is torch.Tensor and row.layout is torch.strided and row.device.type == "cpu"
    alike = row.shape == first.shape and row.dtype == first.dtype
    return plain and alike and not row.requires_grad and not row.is_quantized


def _pinned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory() if value.device.type == "cpu" else value
    if type(value) is dict:
        return {key: _pinned(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_pinned, value))
    if type(value) in (list, tuple):
        return type(value)(map(_pinned, value))
    return value.pin_memory() if hasattr(value, "pin_memory") else value


def on_device(value: Any, device: torch.device, dtype: torch.dtype, channels_last: bool = False) -> Any:
    """Move nested tensors to a device, floating-point and complex ones in this precision.

    A batch class of some library is moved by its own method `to`. One with a method `apply`, as the graphs of
    torch_geometric have, gets the type by it. All other values stay as they are.

    Args:
        channels_last: whether floating-point tensors [batch, channels, height, width] get this layout.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(device, dtype.to_complex(), non_blocking=True)
        if not tensor.is_floating_point():
            return tensor.to(device, non_blocking=True)
        tensor = tensor.to(device, dtype, non_blocking=True)
        if channels_last and tensor.dim() == 4:  # on the device, which is quicker at it
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    return _on_device(value, device, moved)


def _on_device(value: Any, device: torch.device, moved: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return moved(value)
    if type(value) is dict:
        return {key: _on_device(item, device, moved) for key, item in value.items()}
    if isinstance(value, PackedSequence):  # its sizes stay on the host
        return value.to(device, moved(value.data[:0]).dtype)  # type: ignore[arg-type]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_on_device(item, device, moved) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_on_device(item, device, moved) for item in value)
    if callable(getattr(value, "to", None)):
        if callable(getattr(value, "apply", None)):
            return value.apply(moved)
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on_device(item, device, moved) for key, item in value.items()}
    return value
