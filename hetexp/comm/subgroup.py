"""Exchanges of some of a run's ranks, as those that hold the same layers."""

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

    It is the memory that they share where all are on one host, unless `comm.backend` is gloo; where memory
    cannot be had, gloo.

    Args:
        ranks: rising.
        rank: one of them.
        store: that all ranks of the run share; no other exchange of the same ranks may use it.
        device: whose runtime is to know of the memory.

    Raises:
        HandshakeError: one of the ranks did not come.
        SetupError: gloo's group did not form.
    """
    own = dist.PrefixStore(f"subgroup/{'-'.join(map(str, ranks))}", store)
    place, size = list(ranks).index(rank), len(ranks)
    several_hosts = len({plan.devices[one].host for one in ranks}) > 1
    if not several_hosts and plan.config.get("comm", {}).get("backend", "auto") != "gloo":
        try:
            return SharedMemoryExchange.form(own, place, size, timeout_seconds, device)
        except SetupError as error:  # on every one of them
            log.warning("gloo sums over ranks %s: %s", ", ".join(map(str, ranks)), error)
    return LibraryExchange("gloo", dist.PrefixStore("gloo", own), place, size, timeout_seconds)
