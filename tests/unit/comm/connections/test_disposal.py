"""What was left is let go of by another thread, a little later."""

from __future__ import annotations

import threading
import weakref

from launched import wait_for

from hetexp.comm.connections import disposal
from hetexp.comm.connections.disposal import release_later
from hetexp.torch_private import formed_groups


class Held:
    """Ends on a thread that it tells."""

    ended_on: str = ""

    def __del__(self) -> None:
        Held.ended_on = threading.current_thread().name


def test_another_thread_ends_it(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(disposal, "LATER_SECONDS", 0.0)
    held = [Held()]
    alive = weakref.ref(held[0])
    release_later(held)
    wait_for(lambda: alive() is None, "the end of what was held")
    assert Held.ended_on == "disposal"


def test_without_a_group_there_is_nothing_to_hold() -> None:
    assert formed_groups() == []
