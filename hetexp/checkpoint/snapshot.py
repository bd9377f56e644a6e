"""Copies tensors to memory of the host at one moment; later copies use the same memory again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hetexp.checkpoint.tensor_file import check_storable

LockPages = Callable[[int, int], Callable[[], None] | None]
"""Page-locks memory of an address and a size, and returns the function that unlocks it, `None` if it failed
(`hetexp.hardware.backend.Backend.lock_pages`)."""
_ALIGNED = 64
"""Each copy begins at a multiple of so many bytes."""


class HostCopies:
    """Keeps one copy of named tensors, and its memory for the next copy.

    Args:
        lock_pages: locks the memory for tensors of a device, which then copies while this process goes on.
    """

    def __init__(self, lock_pages: LockPages | None = None) -> None:
        self._lock_pages = lock_pages
        self._unlock: Callable[[], None] | None = None
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._copies: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Copy tensors of any device, as they are now, over the copies of the call before.

        Work that is queued on a device after this call may change the tensors.

        Returns:
            The copies, contiguous, and a function that waits until all copies have arrived; any thread may
            call it.

        Raises:
            CheckpointError: a tensor cannot be stored.
        """
        check_storable(tensors)
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        if layout != self._layout:
            self._make_room(tensors)
            self._layout = layout
        arrivals = []
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._copies[name].copy_(tensor.detach(), non_blocking=self._unlock is not None)
            if self._unlock is not None:
                devices = {tensor.device for tensor in tensors.values()} - {torch.device("cpu")}
                arrivals = [_queued(device) for device in devices]

        def arrived() -> None:
            for arrival in arrivals:
                arrival.synchronize()

        return dict(self._copies), arrived

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the memory of all copies as one block: to page-lock many blocks takes longer."""
        if self._unlock is not None:
            self._unlock()
        self._unlock, self._copies = None, {}
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // _ALIGNED) * _ALIGNED)
        memory = torch.empty(places[-1], dtype=torch.uint8)
        of_a_device = any(tensor.device.type != "cpu" for tensor in tensors.values())
        if self._lock_pages is not None and of_a_device and places[-1]:
            self._unlock = self._lock_pages(memory.data_ptr(), places[-1])
        for (name, tensor), place, size in zip(tensors.items(), places, sizes, strict=False):
            self._copies[name] = memory[place : place + size].view(tensor.dtype).view(tensor.shape)


def _queued(device: torch.device) -> torch.Event:
    """Return an event after all work that is queued on the device's current stream."""
    event = torch.Event(device)
    event.record()
    return event
