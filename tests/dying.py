"""A model whose process ends itself, or fails, at a chosen moment of forming a group with others."""

from __future__ import annotations

import os
import signal
from typing import Any

from faulty import my_rank
from hurt import Net

from hetexp.comm.connections.watched_store import WatchedStore
from hetexp.core.errors import SetupError
from hetexp.training.data_parallel import DataParallel
from hetexp.training.recovery import rank_recovery


class Newcomer(Net):
    """`hurt.Net`; the process with one number dies while it joins, another one's first group does not form.

    Args:
        dies: number of the member that dies.
        talks: with the group's store, after which it does.
        fails: number of the member whose first group does not form.
    """

    def __init__(self, dies: int = -1, talks: int = 0, fails: int = -1, **options: Any) -> None:
        super().__init__(**options)
        if my_rank() == dies:
            _die_after(talks)
        if my_rank() == fails:
            _fail_once()


def _fail_once() -> None:
    form = DataParallel.join

    def fail(self: DataParallel, plan: Any, rank: int, store: Any, agree_on_state: Any = None) -> None:
        if agree_on_state is None:  # the run's first group
            form(self, plan, rank, store)
            return
        DataParallel.join = form  # type: ignore[method-assign]
        raise SetupError("the connections of this group were cut on purpose")

    DataParallel.join = fail  # type: ignore[assignment,method-assign]


def _die_after(talks: int) -> None:
    prepare, count = rank_recovery.RankRecovery.prepare, 0

    def prepared(self: rank_recovery.RankRecovery) -> None:
        prepare(self)
        for name in ("set", "get", "check", "add"):
            setattr(WatchedStore, name, counted(getattr(WatchedStore, name)))

    def counted(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal count
            found = method(*arguments)
            count += 1
            if count == talks:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return call

    rank_recovery.RankRecovery.prepare = prepared  # type: ignore[method-assign]
