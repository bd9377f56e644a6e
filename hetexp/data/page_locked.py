"""Host memory that the system keeps in its place, from which a card copies while the host goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

log = logging.getLogger(__name__)


class PageLocked:
    """Gives microbatches page-locked memory, or ordinary memory if that is not wanted.

    torch keeps what is given back and gives it again, not before the copies from it have ended: only the
    first steps pay for locking. If the system has no more of it, a warning says so once, and memory is
    ordinary from then on.

    Args:
        wanted: whether the device copies from it (`Backend.copies_page_locked`).
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor to be filled."""
        if self.wanted:
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except RuntimeError as error:
                self._give_up(error)
        return torch.empty(shape, dtype=dtype)

    def hold(self, value: Any) -> Any:
        """Return what a collate function made with its tensors copied here, if memory is page-locked.

        Dicts, lists and tuples stay what they are; what has a method `pin_memory` of its own is asked by it.
        """
        if not self.wanted:
            return value
        try:
            return _pinned(value)
        except RuntimeError as error:
            self._give_up(error)
            return value

    def _give_up(self, error: RuntimeError) -> None:
        self.wanted = False
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("no page-locked memory for samples, whose copies to the device now wait: %s", said)


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
