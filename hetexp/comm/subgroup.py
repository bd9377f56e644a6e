"""Exchanges of a subset of a run's ranks, such as those that hold the same layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hetexp.comm.exchange import Exchange
from hetexp.comm.library_exchange import LibraryExchange
from hetexp.comm.shared_memory.exchange import SharedMemoryExchange
from hetexp.core.errors import SetupError
from hetexp.core.plan import Plan

log = logging.getLogger(__name__)


def form_subgroup(
    ranks: Sequence[int],
    rank: int,
    store: dist.Store,
    plan: Plan,
    device: torch.device,
    timeout_seconds: float,
) -> Exchange:
    """Return an exchange of these ranks for tensors on the host; only they call it, in the same order.

    On one host it uses shared memory, unless `comm.backend` is gloo or there is no memory. Otherwise it uses
    gloo.

    Args:
        ranks: in rising order.
        rank: one of them.
        store: shared by all ranks of the run; no other exchange of the same ranks may use it.
        device: its runtime page-locks the memory.

    Raises:
        HandshakeError: one of the ranks did not come.
        SetupError: gloo's group did not form.
    """
    group_store = dist.PrefixStore(f"subgroup/{'-'.join(map(str, ranks))}", store)
    place, size = list(ranks).index(rank), len(ranks)
    several_hosts = len({plan.devices[member].host for member in ranks}) > 1
    if not several_hosts and plan.config.get("comm", {}).get("backend", "auto") != "gloo":
        try:
            return SharedMemoryExchange.form(group_store, place, size, timeout_seconds, device)
        except SetupError as error:  # raised on all of these ranks
            log.warning("gloo sums over ranks %s: %s", ", ".join(map(str, ranks)), error)
    return LibraryExchange("gloo", dist.PrefixStore("gloo", group_store), place, size, timeout_seconds)
