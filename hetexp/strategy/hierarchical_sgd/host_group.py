"""The ranks that take each local step together: those of one host, under `hierarchical_sgd`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hetexp.comm.communicator import Communicator, ReduceOp, SoloCommunicator
from hetexp.comm.exchange import Exchange
from hetexp.comm.pending import Pending
from hetexp.strategy.pipeline.shared_gradients import SharedGradients

if TYPE_CHECKING:
    from hetexp.training.state import TrainState


class HostGroup:
    """Sums gradients over the ranks of a host, through the host's memory, after each backward pass.

    Args:
        ranks: of the host, in rising order.
        store: shared by all ranks of the run.
    """

    def __init__(self, state: TrainState, ranks: Sequence[int], store: dist.Store) -> None:
        self.ranks = tuple(ranks)
        trained = [p for p in state.model.parameters() if p.requires_grad]
        sets = [(self.ranks, trained)] if len(ranks) > 1 else []
        self.gradients = SharedGradients(state, sets, trained, dist.PrefixStore("hosts", store))
        exchange = self.gradients.exchanges[0] if sets else None
        self.communicator: Communicator = _Counts(exchange) if exchange is not None else SoloCommunicator()
        """Sums the counts of samples over the host."""

    def sum(self) -> None:
        """Replace each gradient by the sum over the host's ranks."""
        self.gradients.sum()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank of the host."""
        return bool(self.communicator.all_reduce(torch.tensor([int(flag)], dtype=torch.int64)))


class _Counts(SoloCommunicator):
    """Sums a few numbers over a host's ranks, through the exchange of their gradients."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.rank, self.world_size = exchange.rank, exchange.size

    def all_reduce_async(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        assert op == "sum"
        numbers = tensor.double()  # exact up to 2^53
        self._exchange.sum_(numbers)
        return super().all_reduce_async(numbers.to(tensor.dtype))
