"""Which run holds which card. A lease is a locked file: it ends with its owner, however that one ends."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError

ACQUIRE_SECONDS = 0.2
"""Longest wait for a lease: another process that only asks who holds it has it for a moment."""
_UNLEASED = ("cpu", "emulated")
"""Backends whose devices any number of runs may use."""
_CHOOSING = "choosing.lock"
_reserved: set[Path] = set()
"""Files of the leases that this process holds for whatever it starts."""


class Leases:
    """The leases of one run.

    Args:
        devices: of the run; those that share a card take one lease.
        owner: words that tell people who holds them: the run's folder.
        cpu: file of one more lease, for devices whose work this machine's CPU does.
        reserve: hold them for all that this process starts: its leases of the same cards need no other.
    """

    def __init__(
        self, devices: Sequence[DeviceSpec], owner: str, cpu: Path | None = None, reserve: bool = False
    ) -> None:
        self._devices = {_file(d): str(d) for d in devices if d.backend not in _UNLEASED}
        if cpu is not None and any(d.backend in _UNLEASED for d in devices):
            self._devices[cpu] = "this machine's CPU"
        self._owner, self._reserve = owner, reserve
        self._locks: list[FileLock] = []

    def __enter__(self) -> Leases:
        """Take all leases or none.

        Raises:
            SetupError: another run holds one of the cards.
        """
        taken: list[str] = []
        for path, device in self._devices.items():
            if path in _reserved:
                continue
            lock = FileLock(path, timeout=ACQUIRE_SECONDS, mode=0o666)
            try:
                lock.acquire()
            except Timeout:
                taken.append(f"{device} is held by {_told(path)}")
                continue
            self._locks.append(lock)
            with contextlib.suppress(OSError):  # it is for people only
                _note(path).write_text(
                    json.dumps({"owner": self._owner, "pid": os.getpid(), "user": _user()}), encoding="utf-8"
                )
        if taken:
            self.__exit__()
            raise SetupError(
                "; ".join(taken)
                + ". Wait for it, choose another card, or share them (hardware.share_devices=true)."
            )
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
        path = _file(device)
        if device.backend in _UNLEASED or any(Path(lock.lock_file) == path for lock in self._locks):
            return
        more = Leases([device], self._owner).__enter__()
        self._locks += more._locks

    def release(self, device: DeviceSpec) -> None:
        """Give the lease of a device back before the others."""
        path = _file(device)
        for lock in [one for one in self._locks if Path(one.lock_file) == path]:
            self._locks.remove(lock)
            _let_go(lock)

    def holders(self) -> list[str]:
        """Return who holds each device that somebody else holds, in words."""
        return [f"{name}, held by {told}" for path, name in self._devices.items() if (told := _holder(path))]


def holder(device: DeviceSpec) -> str | None:
    """Return who holds a card, in words; `None` where no other run does."""
    return None if device.backend in _UNLEASED else _holder(_file(device))


def held_by_others() -> frozenset[str]:
    """Return the names of all leases of cards that other processes hold."""
    leases = [path for path in folder().glob("*.lock") if path.name != _CHOOSING]
    return frozenset(path.stem for path in leases if _holder(path) is not None)


def owners() -> list[tuple[str, int]]:
    """Return the run folder and the process of each run that has left a note beside a lease.

    The locks are not touched. One that was killed leaves its note: whoever asks looks whether it lives.
    """
    found = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(path.read_text(encoding="utf-8"))
            found.append((str(note["owner"]), int(note["pid"])))
    return list(dict.fromkeys(found))


def choosing() -> FileLock:
    """Return the lock under which cards are chosen and taken where several runs do so at the same time."""
    return FileLock(folder() / _CHOOSING, mode=0o666)


def _holder(path: Path) -> str | None:
    if path in _reserved or not path.exists():
        return None
    lock = FileLock(path, mode=0o666)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return _told(path)
    except OSError:  # another user's file that we may not open
        return None
    lock.release()
    return None


def folder() -> Path:
    """Return the folder of leases, which all users of the machine share."""
    path = Path(tempfile.gettempdir()) / "hetexp-leases"
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            path.chmod(0o1777)
    return path


def _file(device: DeviceSpec) -> Path:
    key = device.uuid or device.pci or device.id.partition(".")[0]
    return folder() / f"{re.sub(r'[^A-Za-z0-9]+', '-', key)}.lock"


def _let_go(lock: FileLock) -> None:
    with contextlib.suppress(OSError):
        _note(Path(lock.lock_file)).unlink()
    lock.release()


def _note(path: Path) -> Path:
    return path.with_suffix(".json")


def _told(path: Path) -> str:
    try:
        note = json.loads(_note(path).read_text(encoding="utf-8"))
        return f"the run {note['owner']} (process {note['pid']} of {note['user']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another hetexp run"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return str(os.getuid()) if hasattr(os, "getuid") else "somebody"
