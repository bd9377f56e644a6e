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


class Leases:
    """The leases of one run.

    Args:
        devices: of the run; those that share a card take one lease.
        owner: words that tell people who holds them: the run's folder.
    """

    def __init__(self, devices: Sequence[DeviceSpec], owner: str) -> None:
        self._devices = {_file(d): d for d in devices if d.backend not in _UNLEASED}
        self._owner = owner
        self._locks: list[FileLock] = []

    def __enter__(self) -> Leases:
        """Take all leases or none.

        Raises:
            SetupError: another run holds one of the cards.
        """
        taken: list[str] = []
        for path, device in self._devices.items():
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
        return self

    def __exit__(self, *_: object) -> None:
        locks, self._locks = self._locks, []
        for lock in locks:
            with contextlib.suppress(OSError):
                _note(Path(lock.lock_file)).unlink()
            lock.release()


def holder(device: DeviceSpec) -> str | None:
    """Return who holds a card, in words; `None` where no run does."""
    if device.backend in _UNLEASED:
        return None
    path = _file(device)
    if not path.exists():
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
