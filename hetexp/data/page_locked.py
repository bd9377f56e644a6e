"""Page-locked host memory, from which a card copies while the host goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

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
