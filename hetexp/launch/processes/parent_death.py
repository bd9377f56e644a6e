"""Ends a rank when its launcher ends, even by SIGKILL."""

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
    """Kill this process and all processes that it starts once the launcher is gone.

    Args:
        wait_for_end: returns when the launcher has ended, for example a read of a pipe that only the
            launcher holds open. The kernel closes the pipe however the launcher ends.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            wait_for_end()
        kill_own_group()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def die_with_parent(parent_pid: int) -> None:
    """Let the Linux kernel kill this process and its data loaders when its parent dies.

    The thread of `end_with_launcher` needs the interpreter lock. The kernel also ends a rank that hangs in a
    driver or is stopped. Other systems than Linux have only the thread.

    Args:
        parent_pid: of the process that started this one, to notice that it died before this call.
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
        # For the kernel the parent is the thread that forks. A thread that ends early must not end its child.
        covered = os.getpid() == own_pid and threading.current_thread() is threading.main_thread()

    def after_fork() -> None:
        if covered:
            ask_kernel(own_pid)

    ask_kernel(parent_pid)
    os.register_at_fork(before=before_fork, after_in_child=after_fork)


def kill_own_group() -> None:
    """Kill this rank and its data loader processes, which form a process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
