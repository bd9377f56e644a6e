"""Leases of cards for runs. A lease is a locked file, so that it ends with its owner in any case.

All users of a machine share one folder of leases, in which each may make files and links. So hetexp follows
no link in it, and writes into no file that exists already.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import logging
import os
import re
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.backend import backend_class

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

ACQUIRE_SECONDS = 0.2
"""Longest wait for a lease: a process that checks who holds it locks it for a moment."""
_CHOOSING = "choosing.lock"
_FOLDER = "hetexp-leases"
_EVERYBODYS, _OWN = 0o1777, 0o700
"""Modes of the shared folder, as of `/tmp` itself, and of one user's."""
_POLL_SECONDS = 0.05
_LONGEST_NOTE = 65_536
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags that open no link and do not wait for the other end of a pipe."""
_OR_SHARE = "choose another card, or share them (hardware.share_devices=true)"
_reserved: set[Path] = set()
"""Files of the leases that this process holds for the processes that it starts."""
_warned: set[Path] = set()
"""Shared folders whose problem this process has logged."""


class _Lock:
    """A lock of a file that any user may have made, with the methods of `FileLock` that leases need.

    `FileLock` itself refuses another user's file in a folder that all users may write to.
    """

    _held: weakref.WeakSet[_Lock] = weakref.WeakSet()

    def __init__(self, path: Path) -> None:
        self.lock_file = str(path)
        self._descriptor: int | None = None

    def acquire(self, timeout: float = -1) -> None:
        """Lock the file within `timeout` seconds; a negative number means any time.

        Raises:
            Timeout: another process holds the lock.
            OSError: the file cannot be opened, or is a link.
        """
        until = time.monotonic() + timeout
        while not self._try():
            if timeout >= 0 and time.monotonic() >= until:
                raise Timeout(self.lock_file)
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Unlock the file, which stays, as others may wait for it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._held.discard(self)
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()

    def _try(self) -> bool:
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink > 0:  # else it was removed before it was locked
                self._descriptor, descriptor = descriptor, -1
                self._held.add(self)
                return True
        except BlockingIOError:
            pass
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return False

    def _open(self) -> int:
        flags = os.O_RDWR | _NO_LINK
        try:
            # Two steps: Linux may refuse O_CREAT for an existing file of another user.
            descriptor = os.open(self.lock_file, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(descriptor, 0o666)  # whatever the umask is
        except FileExistsError:
            descriptor = os.open(self.lock_file, flags)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise OSError(errno.EINVAL, "it is no regular file", self.lock_file) from None
        return descriptor

    @classmethod
    def _after_fork(cls) -> None:
        """Close the inherited files in a new child process: else it would hold its parent's leases."""
        for lock in list(cls._held):
            lock.release()


if fcntl is not None:
    os.register_at_fork(after_in_child=_Lock._after_fork)


class Leases:
    """The leases of one run.

    Args:
        devices: devices of the run; those that share a card take one lease.
        owner: the holder's name in messages: the run's folder.
        cpu: file of one more lease, for devices whose work this machine's CPU does.
        reserve: whether later leases of the same cards in this process need no lock of their own.
    """

    def __init__(
        self, devices: Sequence[DeviceSpec], owner: str, cpu: Path | None = None, reserve: bool = False
    ) -> None:
        self._devices = {_file(d): str(d) for d in devices if not _on_cpu(d)}
        if cpu is not None and any(_on_cpu(d) for d in devices):
            self._devices[cpu] = "this machine's CPU"
        self._owner, self._reserve = owner, reserve
        self._locks: list[_Lock | FileLock] = []

    def __enter__(self) -> Leases:
        """Take all leases or none.

        Raises:
            SetupError: another run holds one of the cards, or the file of a lease cannot be opened.
        """
        taken: list[str] = []
        broken: list[str] = []
        for path, device in self._devices.items():
            if path in _reserved:
                continue
            lock = _lock(path)
            try:
                lock.acquire(timeout=ACQUIRE_SECONDS)
            except Timeout:
                taken.append(f"{device} is held by {_run_of(path)}")
                continue
            except OSError as error:
                broken.append(_unopened(path, error, f"The lease of {device}", _OR_SHARE))
                continue
            self._locks.append(lock)
            _write_note(path, {"owner": self._owner, "pid": os.getpid(), "user": _user()})
        if taken or broken:
            self.__exit__()
            sentences = [f"{'; '.join(taken)}. Wait for it, {_OR_SHARE}."] if taken else []
            raise SetupError(" ".join([*sentences, *broken]))
        if self._reserve:
            _reserved.update(self._devices)
        return self

    def __exit__(self, *_: object) -> None:
        locks, self._locks = self._locks, []
        for lock in locks:
            if self._reserve:
                _reserved.discard(Path(lock.lock_file))
            _let_go(lock)

    def take(self, device: DeviceSpec) -> None:
        """Take the lease of one more device, which ends with the others.

        Raises:
            SetupError: another run holds it.
        """
        name = _name(device)
        if _on_cpu(device) or any(Path(lock.lock_file).name == name for lock in self._locks):
            return
        more = Leases([device], self._owner).__enter__()
        self._locks += more._locks

    def release(self, device: DeviceSpec) -> None:
        """Return the lease of a device before the others."""
        name = _name(device)
        for lock in [lock for lock in self._locks if Path(lock.lock_file).name == name]:
            self._locks.remove(lock)
            _let_go(lock)

    def holders(self) -> list[str]:
        """Return a description of each device that another process holds, with its holder."""
        return [f"{name}, held by {who}" for path, name in self._devices.items() if (who := _holder(path))]


def holder(device: DeviceSpec) -> str | None:
    """Return a description of the run that holds a card; `None` if no other run does."""
    if _on_cpu(device):
        return None
    with contextlib.suppress(SetupError):  # reported when a lease is taken
        return _holder(_file(device))
    return None


def held_by_others() -> frozenset[str]:
    """Return the names of all leases of cards that other processes hold."""
    leases = [path for path in _files("*.lock") if path.name != _CHOOSING]
    return frozenset(path.stem for path in leases if _holder(path) is not None)


def owners() -> list[tuple[str, int]]:
    """Return the run folder and the process of each run that has left a note beside a lease.

    The locks are not touched. A killed run leaves its note: the caller checks whether the process lives.
    """
    notes = []
    for path in _files("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = _read_note(path)
            notes.append((str(note["owner"]), int(note["pid"])))
    return list(dict.fromkeys(notes))


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """Hold the lock under which runs choose and take cards, one after another.

    Raises:
        SetupError: the file of the lock cannot be opened.
    """
    path = folder() / _CHOOSING
    lock = _lock(path)
    try:
        lock.acquire()
    except OSError as error:
        fix = "or set TMPDIR to a folder of your own"
        raise SetupError(_unopened(path, error, "The lock under which runs choose cards", fix)) from error
    try:
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str | None:
    if path in _reserved or not path.exists():
        return None
    lock = _lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return _run_of(path)
    except OSError:  # a file that this user may not open, or a link
        return None
    lock.release()
    return None


def folder() -> Path:
    """Return the folder of leases: that of all users, or this user's own if the first is not safe.

    Raises:
        SetupError: neither folder is safe.
    """
    shared = Path(tempfile.gettempdir()) / _FOLDER
    if fcntl is None:  # on Windows each user has a folder of temporary files
        shared.mkdir(parents=True, exist_ok=True)
        return shared
    unsafe = _unsafe(shared, _EVERYBODYS)
    if unsafe is None:
        return shared
    private = shared.with_name(f"{_FOLDER}-{os.geteuid()}")
    if (problem := _unsafe(private, _OWN)) is not None:
        raise SetupError(
            f"`{private}` must be a folder that only you may write to, but {problem}. Remove it, set TMPDIR "
            "to a folder of your own, or share the cards (hardware.share_devices=true)."
        )
    if shared not in _warned:
        _warned.add(shared)
        log.warning(
            "`%s` must be a folder for all users, but %s. Leases of cards are in %s instead, so that hetexp "
            "does not see those of other users.",
            shared,
            unsafe,
            private,
        )
    return private


def _unsafe(path: Path, mode: int) -> str | None:
    """Make a folder of this mode if it is missing, and return why it is not safe to use, `None` if it is.

    Any user may own the shared folder: all may write to it, and none may remove another's files.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(_OWN, parents=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return "it is a link" if stat.S_ISLNK(status.st_mode) else "it is no folder"
        is_own = status.st_uid == os.geteuid()
        if is_own and stat.S_IMODE(status.st_mode) != mode:
            with contextlib.suppress(OSError):
                path.chmod(mode)
            status = path.lstat()
    except OSError as error:
        return f"it cannot be used ({error.strerror})"
    bits = stat.S_IMODE(status.st_mode)
    writable_by_others = bits & (stat.S_IWGRP | stat.S_IWOTH)
    if (mode == _EVERYBODYS and bits & mode == mode) or (is_own and not writable_by_others):
        return None
    return f"it belongs to user {status.st_uid} and has mode {bits:o}"


def _on_cpu(device: DeviceSpec) -> bool:
    """Return whether any number of runs may use a device."""
    return backend_class(device.backend).computes_on_cpu


def _files(pattern: str) -> list[Path]:
    try:
        return list(folder().glob(pattern))
    except (SetupError, OSError):  # reported when a lease is taken
        return []


def _name(device: DeviceSpec) -> str:
    key = device.uuid or device.pci or device.id.partition(".")[0]
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', key)}.lock"


def _file(device: DeviceSpec) -> Path:
    return folder() / _name(device)


def _lock(path: Path) -> _Lock | FileLock:
    shared = fcntl is not None and path.parent.name.startswith(_FOLDER)
    return _Lock(path) if shared else FileLock(path, mode=0o666)  # the CPU's is in the folder of a sweep


def _unopened(path: Path, error: OSError, what: str, fix: str) -> str:
    reason = "it is a link" if error.errno in (errno.ELOOP, errno.EMLINK) else error.strerror or str(error)
    owner = ""
    with contextlib.suppress(OSError):
        owner = f" of user {path.lstat().st_uid}"
    return f"{what} cannot be taken: `{path}`{owner} cannot be opened ({reason}). Have it removed, {fix}."


def _let_go(lock: _Lock | FileLock) -> None:
    with contextlib.suppress(OSError):
        Path(lock.lock_file).with_suffix(".json").unlink()
    lock.release()


def _write_note(path: Path, note: dict[str, Any]) -> None:
    """Write the holder of a lease beside it; an existing file is removed, never written into."""
    file_name = path.with_suffix(".json")
    with contextlib.suppress(OSError):  # only messages need it
        file_name.unlink(missing_ok=True)
        descriptor = os.open(file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(note, file)


def _read_note(path: Path) -> Any:
    """Return a note's content.

    Raises:
        OSError, ValueError: the file is a link or no regular file, may not be read, or is no JSON.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | _NO_LINK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return json.loads(file.read(_LONGEST_NOTE))


def _run_of(path: Path) -> str:
    try:
        note = _read_note(path.with_suffix(".json"))
        return f"the run {note['owner']} (process {note['pid']} of {note['user']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another hetexp run"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return str(os.getuid()) if hasattr(os, "getuid") else "somebody"
