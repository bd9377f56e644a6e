"""Sums by a library of torch.distributed over a group that only its members form."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetexp.comm.communicator import peer_lost
from hetexp.comm.connections.revocation import Revocation, quiet_watchdog
from hetexp.comm.connections.sockets import remembered
from hetexp.comm.exchange import Exchange, staged
from hetexp.comm.rendezvous import forming_timeout
from hetexp.core.errors import SetupError
from hetexp.torch_private import all_gather_options, group_class, group_options, set_library_timeout


class LibraryExchange(Exchange):
    """A communicator of NCCL, XCCL or gloo that is formed directly on a store.

    All ranks of the job would have to call `dist.new_group`, but another vendor's build of torch does not
    have the library. The communicator's collectives have their own order, so that another thread than the
    training's may start them.

    Args:
        store: of this group alone.
        rank: within the group.
        size: of the group.
        timeout_seconds: longest wait in a collective.
        forming_seconds: longest wait for a connection of gloo, as in `form_group`.
        revocation: of the group of all ranks; `None`: its ranks never give it up.
        outlives: whether hetexp, and not the library, handles the loss of a rank.

    Raises:
        SetupError: this build of torch does not have the library, or the group did not form.
    """

    def __init__(
        self,
        library: str,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_seconds: float,
        forming_seconds: float | None = None,
        revocation: Revocation | None = None,
        outlives: bool = False,
    ) -> None:
        self.name, self.rank, self.size = library, rank, size
        self._revocation = revocation or Revocation()
        self.takes_host = library == "gloo"
        library_class = group_class(library)
        if library_class is None:
            raise SetupError(f"torch {torch.__version__} has no {library}.")
        limit = timedelta(seconds=timeout_seconds)
        try:
            if library == "gloo":
                with remembered():
                    forming_limit = forming_timeout(timeout_seconds, forming_seconds)
                    self._group: Any = library_class(store, rank, size, timeout=forming_limit)
                set_library_timeout(self._group, limit)
            else:  # as torch.distributed itself does it
                options = group_options(library_class, limit, size)
                with quiet_watchdog() if outlives else nullcontext():
                    self._group = library_class(store, rank, size, options)
                self._revocation.groups.append(self._group)
        except RuntimeError as error:
            raise SetupError(f"the {library} group of {size} ranks did not form: {error}") from error

    def sum_(self, tensor: torch.Tensor) -> None:
        reduced = staged(tensor, self.name)
        self._wait(lambda: self._group.allreduce([reduced], dist.AllreduceOptions()))
        if reduced is not tensor:
            tensor.copy_(reduced)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        sent = tensor.to("cpu") if self.name == "gloo" else tensor
        gathered = [torch.empty_like(sent) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([gathered], [sent], all_gather_options()))
        return [part.to(tensor.device) for part in gathered]

    def broadcast_(self, tensor: torch.Tensor) -> None:
        received = staged(tensor, self.name)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._wait(lambda: self._group.broadcast([received], options))
        if received is not tensor:
            tensor.copy_(received)

    def close(self) -> None:
        """Abort the group, also during a collective that hangs: NCCL's kernels are ended."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError, AttributeError):  # a library without `abort` has nothing to end
                group.abort()

    def _wait(self, start: Any) -> None:
        try:
            with self._revocation.calling():
                work = start()
            work.wait()
        except RuntimeError as error:
            raise peer_lost(error) from error
