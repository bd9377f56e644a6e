"""How a rank gives up a group whose collectives wait on the device, where the loss of a rank ends no wait.

A kernel of NCCL or RCCL that waits for a lost rank waits for ever. Only an abort of the communicator ends it.
The kernel then leaves wrong numbers and no error, and may send wrong numbers to ranks that still wait.
Therefore ranks first *revoke* their group: each sets a flag that its device reads after the step's
collectives. They abort once all of them have done so. A step whose device read no flag is right.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hetexp.core.errors import PeerLostError, logged
from hetexp.torch_private import abort_groups, forget_default_group, formed_groups

PARK_SECONDS = 0.5
"""Longest wait until the training thread starts no collective, as an abort just then may crash it."""
ABORT_SECONDS = 10.0
"""Longest time of an abort. Afterwards the device counts as unusable for this process."""
_ENVIRONMENT = {
    # The watchdog must leave errors to this rank, and neither end the process nor abort by itself.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # After an error it sleeps four times as long, and blocks every further collective meanwhile.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # A collective that waits in its call would not see the abort.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""Variables of `ProcessGroupNCCL` (torch 2.8 to 2.14), which its constructor reads."""


class Abortable(Protocol):
    """A process group of torch."""

    def abort(self) -> None:
        """End its collectives on the device."""
        ...


class Revocation:
    """Whether this rank has given up its group; one object a group.

    Attributes:
        native: whether the group's collectives wait on the device, so that it must be revoked and aborted.
        revoked: whether this rank has given it up.
        aborted: whether its collectives are ended.
    """

    def __init__(self) -> None:
        self.native = self.revoked = self.aborted = False
        self.groups: list[Abortable] = []
        """Groups beside those of torch.distributed."""
        self._flag: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._calls = threading.RLock()
        self._parked = threading.Event()
        self._ending = threading.Lock()
        self._over = threading.Event()

    def revoke(self) -> None:
        """Give up the group; the device's next `snapshot` sees it. Safe from any thread and twice."""
        with self._lock:
            self.revoked = True
            if self._flag is not None:
                self._flag.fill_(True)

    def check(self) -> None:
        """Raise if the group is revoked: what its collectives have returned does not count.

        Raises:
            PeerLostError: it is.
        """
        if self.native and self.revoked:
            raise PeerLostError("the members of this training have changed, and its group is given up")

    def snapshot(self, device: torch.device) -> torch.Tensor | None:
        """Return on the device whether the group is revoked once all work that is queued there is done.

        The host does not wait. If the result is false, all collectives before this call are right.

        Returns:
            A scalar; `None` if a failed collective raises, so that no rank needs to look.
        """
        if not self.native:
            return None
        with self._lock:
            if self._flag is None:
                self._flag = torch.full((), self.revoked, pin_memory=device.type != "cpu")
            flag = self._flag
        return flag.to(device, non_blocking=True, copy=True)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Start a collective in the block, in which no abort may happen; it must not wait there.

        Raises:
            PeerLostError: the group is revoked.
        """
        if not self.native:
            yield
            return
        with self._calls:
            self.check()
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let the training thread wait in the block for the device, in which an abort may happen.

        Raises:
            PeerLostError: the group is revoked; no collective may follow, as an abort may be under way.
        """
        if not self.native:
            yield
            return
        self._parked.set()
        try:
            yield
        finally:
            self._parked.clear()
        self.check()

    def wait_for(self, read: Callable[[], float]) -> float:
        """Return a number of the device, waiting as in `waiting`, also if the group is revoked meanwhile.

        The next collective must be one of a `Communicator`, which checks for that.
        """
        if not self.native:
            return read()
        self._parked.set()
        try:
            return read()
        finally:
            self._parked.clear()

    def leave(self) -> None:
        """Revoke the group for good, from the training thread, which starts no further collective."""
        self.revoke()
        self._parked.set()

    def abort(self) -> None:
        """End all collectives of the group on this device; every member has revoked it. Returns when done.

        Only the first call acts. If `aborted` is false afterwards, a communicator did not end.
        """
        with self._ending:
            if self._over.is_set():
                return
            self._parked.wait(PARK_SECONDS)
            called = self._calls.acquire(timeout=PARK_SECONDS)
            try:
                self.aborted = _abort_all([*formed_groups(), *self.groups])
            finally:
                if called:
                    self._calls.release()
                self._over.set()

    @property
    def failed(self) -> bool:
        """Whether the abort is over, and a collective has not ended."""
        return self._over.is_set() and not self.aborted

    def wait_for_abort(self, seconds: float) -> bool:
        """Return whether the group's collectives have ended within this time."""
        return self._over.wait(seconds) and self.aborted


def forget_aborted() -> None:
    """Clear torch's records of groups that are aborted, or could not be, so that others can form."""
    if dist.is_initialized():
        with logged("a group was not aborted"):  # an abort may have failed already
            abort_groups()
    if dist.is_initialized():
        forget_default_group()


def _abort_all(groups: Sequence[Abortable]) -> bool:
    """Abort groups side by side, as one may wait for another's kernels; return whether all have ended."""

    def end(group: Abortable) -> None:
        with suppress(RuntimeError, AttributeError):  # gloo has nothing to end
            group.abort()

    threads = [threading.Thread(target=end, args=(group,), name="abort", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_SECONDS)
    return not any(thread.is_alive() for thread in threads)


@contextmanager
def quiet_watchdog() -> Iterator[None]:
    """Form in the block a group of NCCL or RCCL whose watchdog leaves the loss of a rank to hetexp.

    Other groups of this process keep the user's settings.
    """
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        _restore(before)


def _restore(environment: Mapping[str, Any]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
