"""Shared memory of the ranks of one host, with counters by which they wait for each other.

A waiting rank sleeps in the kernel until the counter changes (Linux's futex, Drepper, "Futexes are tricky",
2011): it holds no interpreter lock and uses no core. Without a futex it polls every 50 µs.

A process that dies for any reason loses its lock on the segment, and ranks that wait for it check that lock
every 50 ms. The lock is a POSIX lock: processes forked from a rank do not inherit it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

import torch

from hetexp.core.errors import PeerLostError, SetupError

FUTEX_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""Number of the system call by machine, of 64-bit Linux."""
FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERYBODY = 2**31 - 1
LINE_BYTES = 64
"""Distance of two counters: two in one cache line would slow each other."""
LOOK_SECONDS = 0.05
"""How often a waiting rank checks that the others live."""
POLL_SECONDS = 5e-5
PREFIX = "hetexp-"
"""Prefix of segments with a name in the file system; the number of the process that made them follows."""
_STRONG_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")


def _futex_call() -> int | None:
    return FUTEX_CALLS.get(platform.machine()) if platform.system() == "Linux" else None


class _Moment(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def shared_memory_folder() -> Path:
    """Return the folder of segments with a name, in memory if the system has such a folder."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


class Segment:
    """Shared memory of one process group; made by one rank and opened by the others.

    It starts with `num_words` counters, one a cache line, and goes on with `num_bytes` for data.

    Args:
        file: open for reading and writing; the segment closes it.
        rank: whose lock this process holds from now on.
    """

    def __init__(self, file: int, rank: int, size: int, num_words: int, num_bytes: int) -> None:
        self.file, self.rank, self.size = file, rank, size
        self._data_start = _aligned(num_words * LINE_BYTES)
        memory = mmap.mmap(file, self.total_bytes(num_words, num_bytes))
        self._map: mmap.mmap | None = memory
        self.data = torch.frombuffer(memory, dtype=torch.uint8)[self._data_start :]
        """The bytes after the words."""
        self._words = [ctypes.c_uint32.from_buffer(memory, i * LINE_BYTES) for i in range(num_words)]
        self._addresses = [ctypes.c_void_p(ctypes.addressof(word)) for word in self._words]
        self._call = _futex_call()
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._pause = ctypes.byref(_Moment(0, int(LOOK_SECONDS * 1e9)))
        self._fence = threading.Lock()
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @staticmethod
    def total_bytes(num_words: int, num_bytes: int) -> int:
        """Return the bytes that a file must have to hold so many words and bytes of data."""
        return _aligned(num_words * LINE_BYTES) + num_bytes

    @property
    def address(self) -> int:
        """Where this process sees the segment's first byte."""
        return ctypes.addressof(self._words[0])

    @property
    def num_bytes(self) -> int:
        """All of it, words included."""
        return 0 if self._map is None else len(self._map)

    def word(self, index: int) -> int:
        """Return a counter's value."""
        return self._words[index].value

    def publish(self, index: int, value: int) -> None:
        """Set a counter after all earlier writes of this process, and wake the processes that wait."""
        if not _STRONG_ORDER:  # two locks one after another order what lies before and after them
            for _ in range(2):
                with self._fence:
                    pass
        self._words[index].value = value & 0xFFFFFFFF
        if self._call is not None:
            self._syscall(self._call, self._addresses[index], FUTEX_WAKE, EVERYBODY, None, None, 0)

    def sleep(self, index: int, value: int) -> None:
        """Return once a counter has another value than this one, or after a short while."""
        if self._call is None:
            time.sleep(POLL_SECONDS)
        else:
            self._syscall(self._call, self._addresses[index], FUTEX_WAIT, value, self._pause, None, 0)

    def lives(self, rank: int) -> bool:
        """Return whether the process that opened the segment as this rank still exists."""
        if rank == self.rank:
            return True
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
        return False

    def close(self) -> None:
        """Release the memory, which is freed with its last tensor. Safe to call twice."""
        self._words, self._addresses = [], []
        self.data, self._map = torch.empty(0, dtype=torch.uint8), None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class Waiter:
    """Waits for counters of other ranks, and raises if one of them is gone.

    Args:
        abandoned: index of the counter that names a rank that has given up.
    """

    def __init__(self, segment: Segment, abandoned: int, timeout_seconds: float) -> None:
        self._segment, self._abandoned, self._timeout = segment, abandoned, timeout_seconds

    def wait(self, index: int, value: int, rank: int) -> None:
        """Return once a counter of a rank has reached `value`; counters wrap at 2³².

        Raises:
            PeerLostError: a rank died, gave up, or did not come in time.
        """
        segment = self._segment
        now = segment.word(index)
        if (now - value) & 0x80000000 == 0:
            return
        deadline = looked = time.monotonic()
        deadline += self._timeout
        while True:
            segment.sleep(index, now)
            now = segment.word(index)
            if (now - value) & 0x80000000 == 0:
                return
            self.check()
            moment = time.monotonic()
            if moment - looked < LOOK_SECONDS:
                continue
            looked = moment
            self._look_for_the_dead()
            if moment > deadline:
                self.late(rank)

    def late(self, rank: int) -> NoReturn:
        """Give up waiting for a rank.

        Raises:
            PeerLostError: always.
        """
        self.give_up()
        raise PeerLostError(f"rank {rank} of the exchange did not come within {self._timeout:g} s")

    def lost(self, rank: int) -> NoReturn:
        """Publish that a rank is gone.

        Raises:
            PeerLostError: always.
        """
        self._publish_gone(rank)
        raise PeerLostError(f"rank {rank} of the exchange is gone")

    def give_up(self) -> None:
        """Publish that this rank takes no further part."""
        self._publish_gone(self._segment.rank)

    def check(self) -> None:
        """Check that no rank has given up.

        Raises:
            PeerLostError: a rank has.
        """
        gone = self._segment.word(self._abandoned)
        if gone:
            raise PeerLostError(f"rank {gone - 1} of the exchange is gone")

    def _look_for_the_dead(self) -> None:
        for rank in range(self._segment.size):
            if not self._segment.lives(rank):
                self.lost(rank)

    def _publish_gone(self, rank: int) -> None:
        segment = self._segment
        if not segment.word(self._abandoned):
            segment.publish(self._abandoned, rank + 1)
        for index in range(self._abandoned):  # wakes every waiting rank
            segment.publish(index, segment.word(index))


def create(num_bytes: int, named: bool = False) -> tuple[int, str]:
    """Return an open file of zeros and the path by which other processes of this host open it.

    Args:
        named: whether to use a file in `shared_memory_folder` even if the system has memory without a name.

    Raises:
        SetupError: the memory is too small; names its size and folder.
    """
    if not named and hasattr(os, "memfd_create") and Path(f"/proc/{os.getpid()}/fd").is_dir():
        # No name, so nothing can be left behind, and /dev/shm may be small (64 MiB in a container).
        file = os.memfd_create("hetexp", os.MFD_CLOEXEC)
        _reserve(file, num_bytes, "memory")
        return file, f"/proc/{os.getpid()}/fd/{file}"
    folder = shared_memory_folder()
    reclaim(folder)
    file, path = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-", dir=folder)
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)  # it is rank 0's: not to be reclaimed
    try:
        _reserve(file, num_bytes, str(folder))
    except SetupError:
        os.close(file)
        Path(path).unlink()
        raise
    return file, path


def _reserve(file: int, num_bytes: int, where: str) -> None:
    """Reserve the memory now: access to a missing page would kill the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, num_bytes)
        else:
            os.ftruncate(file, num_bytes)
    except OSError as error:
        free = f", but has {shutil.disk_usage(where).free / 2**20:.0f} MiB" if where != "memory" else ""
        raise SetupError(
            f"{where} must have {num_bytes / 2**20:.0f} MiB free for the exchange between ranks{free} "
            f"({error.strerror}). Set comm=gloo, or give it more (in a container: --shm-size=1g)."
        ) from error


def reclaim(folder: Path) -> list[str]:
    """Delete segments whose process died before all ranks opened them; return their names."""
    deleted = []
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)  # anybody may put a link there
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
                path.unlink()
                deleted.append(path.name)
            finally:
                os.close(file)
    return deleted


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
