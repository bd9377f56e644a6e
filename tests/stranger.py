"""Another user of this machine, as a child process that has given up its own user's rights."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534
"""The user to whom nothing here belongs."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


@contextmanager
def stranger(action: Callable[[], object]) -> Iterator[int]:
    """Let another user do something, and keep what the action returns alive, while the context lasts.

    Without root's rights it is this user.

    Yields:
        The process's id, once the action has been done.
    """
    (ready, done), (hold, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(end)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            kept = action()  # noqa: F841
            os.write(done, b"1")
            os.read(hold, 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(done)
    try:
        assert os.read(ready, 1), "the other user failed"
        yield child
    finally:
        os.close(end)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(hold)
