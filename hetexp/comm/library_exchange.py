"""Sums by a library of torch.distributed, over a group of ranks that only its own members know of."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from hetexp.comm.communicator import peer_lost
from hetexp.comm.connections.sockets import remembered
from hetexp.comm.exchange import Exchange, staged
from hetexp.comm.rendezvous import limit_of_forming
from hetexp.core.errors import SetupError

_CLASSES = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}


class LibraryExchange(Exchange):
    """A communicator of NCCL, XCCL or gloo that is formed directly on a store.

    `dist.new_group` must be called by all ranks of the job, and those of another vendor's build have no such
    library. Its collectives have an order of their own, so that another thread than the one that trains may
    start them.

    Args:
        store: of this group alone.
        rank: within the group.
        size: of the group.
        timeout_seconds: longest wait in a collective.
        forming_seconds: of gloo, longest wait for a connection, as in `form_group`.

    Raises:
        SetupError: this build of torch has no such library, or the group did not form.
    """

    def __init__(
        self,
        library: str,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_seconds: float,
        forming_seconds: float | None = None,
    ) -> None:
        self.name, self.rank, self.size = library, rank, size
        self.takes_host = library == "gloo"
        made: Any = getattr(_distributed_c10d, _CLASSES[library], None)
        if made is None:
            raise SetupError(f"torch {torch.__version__} has no {library}.")
        limit = timedelta(seconds=timeout_seconds)
        try:
            if library == "gloo":
                with remembered():
                    soon = limit_of_forming(timeout_seconds, forming_seconds)
                    self._group = made(store, rank, size, timeout=soon)
                self._group._set_default_timeout(limit)
            else:  # as torch.distributed itself does it
                options = made.Options()
                options._timeout = limit
                options.group_name, options.global_ranks_in_group = "exchange", list(range(size))
                self._group = made(store, rank, size, options)
        except RuntimeError as error:
            raise SetupError(f"the {library} group of {size} ranks did not form: {error}") from error

    def sum_(self, tensor: torch.Tensor) -> None:
        there = staged(tensor, self.name)
        self._wait(lambda: self._group.allreduce([there], dist.AllreduceOptions()))
        if there is not tensor:
            tensor.copy_(there)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        there = tensor.to("cpu") if self.name == "gloo" else tensor
        everyone = [torch.empty_like(there) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([everyone], [there], _distributed_c10d.AllgatherOptions()))
        return [one.to(tensor.device) for one in everyone]

    def broadcast_(self, tensor: torch.Tensor) -> None:
        there = staged(tensor, self.name)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._wait(lambda: self._group.broadcast([there], options))
        if there is not tensor:
            tensor.copy_(there)

    def close(self) -> None:
        """Give the group up, also in the midst of a collective that hangs: NCCL's kernels are ended."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError, AttributeError):  # a library without it has nothing to end
                group.abort()

    def _wait(self, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise peer_lost(error) from error
