"""A rank never outlives its launcher, not even one that was killed with -9."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_launcher(wait_for_end: Callable[[], object]) -> None:
    """Kill this process and all that it starts once the launcher is gone.

    Args:
        wait_for_end: returns when the launcher has ended, for example a read of a pipe that only the
            launcher holds open. The kernel closes it whatever the launcher died of, also where SIGINT is
            ignored, as under nohup.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            wait_for_end()
        kill_own_group()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def die_with_parent(parent_pid: int) -> None:
    """Let the Linux kernel kill this process when its parent dies, and with it what it forks (data loaders).

    The lifeline's thread needs the interpreter lock; this needs nothing, so that a rank that hangs in a
    driver or is stopped ends as well. Elsewhere than on Linux the lifeline is alone.

    Args:
        parent_pid: of the process that started this one, to tell whether it died before the kernel was asked.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    own_pid = os.getpid()
    covered = False

    def ask_kernel(parent: int) -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            kill_own_group()

    def before_fork() -> None:
        nonlocal covered
        # The kernel means the thread that forks: one that ends early must not take its child along.
        covered = os.getpid() == own_pid and threading.current_thread() is threading.main_thread()

    def after_fork() -> None:
        if covered:
            ask_kernel(own_pid)

    ask_kernel(parent_pid)
    os.register_at_fork(before=before_fork, after_in_child=after_fork)


def kill_own_group() -> None:
    """Kill this rank and its data loader processes; a rank leads a process group of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
