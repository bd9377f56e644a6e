"""Leases of cards for runs. A lease is a locked file, so that it ends with its owner in any case.

Each user has a folder of leases beside other temporary files. No other user can write there, and all users
read the folders of all. A run publishes its lease first and looks for other leases of the card afterwards: of
two runs that take a card at the same time, one at least sees the other and gives its lease back. So no run
writes a file of another user, follows a link, or waits for a lock that another user could keep.

A user can still claim a card without using it, but only under the own name. Who starts with another `TMPDIR`
neither sees these leases nor is seen.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import random
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.backend import backend_class

try:
    import fcntl
    import pwd
except ImportError:  # on Windows, where each user has a folder of temporary files
    fcntl = pwd = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

ACQUIRE_SECONDS = 0.2
"""Longest wait for a lease: two runs that publish at the same time both give way for a moment."""
OTHERS_SECONDS = 30.0
"""Longest wait until runs of other users have chosen their cards."""
_CHOOSING = Path("choosing")
_FOLDER = "hetexp-leases"
_SUFFIX = ".lease"
_MODE = 0o755
"""Mode of a user's folder: all may read, only the user may write."""
_POLL_SECONDS = 0.05
_LONGEST_NOTE = 65_536
_MOST_FILES = 1000
"""Files of one folder that are looked at."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags that open no link and do not wait for the other end of a pipe."""
_OR_SHARE = "choose another card, or share them (hardware.share_devices=true)"
_reserved: set[Path] = set()
"""What this process holds for the processes that it starts."""


@dataclass(frozen=True)
class _Lease:
    """A published lease, of this process or another."""

    file: Path
    uid: int
    """Number of its user, whom no other user can imitate."""
    note: dict[str, Any]
    """Its `owner`, the run's folder, and its `pid`."""

    @property
    def key(self) -> Path:
        return _key_of(self.file)

    def __str__(self) -> str:
        try:
            owner = "".join(c if c.isprintable() else "?" for c in str(self.note["owner"]))
            return f"the run {owner} (process {int(self.note['pid'])} of {_user(self.uid)})"
        except (KeyError, ValueError, TypeError):
            return f"another hetexp run of {_user(self.uid)}"


_own: dict[Path, tuple[_Lease, int]] = {}
"""Leases of this process by their files, each with its locked descriptor.

These files are opened only once: whichever descriptor of a file a process closes, its lock ends.
"""
if fcntl is not None:
    os.register_at_fork(after_in_child=_own.clear)  # a child has none of these locks


class Leases:
    """The leases of one run.

    Args:
        devices: devices of the run; those that share a card take one lease.
        owner: the holder's name in messages: the run's folder.
        cpu: path of one more lease, for devices whose work this machine's CPU does; its folder is not shared.
        reserve: whether later leases of the same cards in this process need no lock of their own.
    """

    def __init__(
        self, devices: Sequence[DeviceSpec], owner: str, cpu: Path | None = None, reserve: bool = False
    ) -> None:
        self._devices = {_key(d): str(d) for d in devices if not _on_cpu(d)}
        if cpu is not None and any(_on_cpu(d) for d in devices):
            self._devices[cpu] = "this machine's CPU"
        self._owner, self._reserve = owner, reserve
        self._taken: list[_Lease] = []

    def __enter__(self) -> Leases:
        """Take all leases or none.

        Raises:
            SetupError: another run holds one of the cards, or the file of a lease cannot be made.
        """
        held: list[str] = []
        try:
            for key, device in self._devices.items():
                if key in _reserved:
                    continue
                lease, others = _take(key, self._owner)
                if lease is not None:
                    self._taken.append(lease)
                else:
                    held.append(f"{device} is held by {others[0]}")
            if held:
                raise SetupError(f"{'; '.join(held)}. Wait for it, {_OR_SHARE}.")
        except SetupError:
            self.__exit__()
            raise
        if self._reserve:
            _reserved.update(self._devices)
        return self

    def __exit__(self, *_: object) -> None:
        taken, self._taken = self._taken, []
        for lease in taken:
            if self._reserve:
                _reserved.discard(lease.key)
            _end(lease)

    def take(self, device: DeviceSpec) -> None:
        """Take the lease of one more device, which ends with the others.

        Raises:
            SetupError: another run holds it.
        """
        if _on_cpu(device) or any(lease.key == _key(device) for lease in self._taken):
            return
        more = Leases([device], self._owner).__enter__()
        self._taken += more._taken

    def release(self, device: DeviceSpec) -> None:
        """Return the lease of a device before the others."""
        for lease in [lease for lease in self._taken if lease.key == _key(device)]:
            self._taken.remove(lease)
            _end(lease)

    def holders(self) -> list[str]:
        """Return a description of each device that another run holds, with its holder."""
        found = {key: _leases(key) for key in self._devices if key not in _reserved}
        return [f"{self._devices[key]}, held by {leases[0]}" for key, leases in found.items() if leases]


def holder(device: DeviceSpec) -> str | None:
    """Return a description of the run that holds a card; `None` if no other run does."""
    if _on_cpu(device) or _key(device) in _reserved:
        return None
    leases = _leases(_key(device))
    return str(leases[0]) if leases else None


def held_by_others() -> frozenset[str]:
    """Return the names of all leases of cards that other runs hold."""
    keys = {lease.key for lease in _leases()} - _reserved - {_CHOOSING}
    return frozenset(key.name for key in keys)


def owners() -> list[tuple[str, int]]:
    """Return the folder and the process of each run that holds a card, if its user owns the folder."""
    found = []
    for lease in _leases():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            owner = str(lease.note["owner"])
            if lease.key == _CHOOSING:
                continue
            if not hasattr(os, "geteuid") or Path(owner).stat().st_uid == lease.uid:
                found.append((owner, int(lease.note["pid"])))
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """Let runs choose and take cards one after another; those of other users for a limited time.

    Raises:
        SetupError: the file that says so cannot be made.
    """
    until, waits = time.monotonic() + OTHERS_SECONDS, True
    while True:
        lease, others = _take(_CHOOSING, "that chooses cards", None if waits else _uid())
        if lease is not None:
            break
        if waits and time.monotonic() > until:
            waits = False
            log.warning("%s is not waited for any longer.", others[0])
    try:
        yield
    finally:
        _end(lease)


def folder() -> Path:
    """Return the folder for the leases of this user; make it if it is missing.

    Raises:
        SetupError: it cannot be made.
    """
    path = Path(tempfile.gettempdir()) / f"{_FOLDER}-{_uid()}"
    try:
        for existing in (path, *sorted(path.parent.glob(f"{path.name}-*"))):
            if _is_own(existing):
                return existing
        try:
            path.mkdir(_MODE)
        except FileExistsError:  # another user's, or a link: a lease in any folder of this user counts
            path = Path(tempfile.mkdtemp(prefix=f"{path.name}-"))
        path.chmod(_MODE)  # whatever the umask is
    except OSError as error:
        raise _unmade(path, error) from error
    return path


def _is_own(path: Path) -> bool:
    """Return whether this is a folder of this user, and no link; let only this user write there."""
    try:
        status = path.lstat()
    except OSError:
        return False
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == _uid()
    if own and fcntl is not None and stat.S_IMODE(status.st_mode) != _MODE:
        path.chmod(_MODE)
    return own


def _take(key: Path, owner: str, uid: int | None = None) -> tuple[_Lease | None, list[_Lease]]:
    """Return a new lease, or `None` and the leases of others.

    Args:
        uid: the user whose leases count; `None`: those of all.

    Raises:
        SetupError: the file cannot be made.
    """
    until = time.monotonic() + ACQUIRE_SECONDS
    while True:
        others = _leases(key, uid)
        if not others:
            lease = _publish(key, owner)
            others = [other for other in _leases(key, uid) if other.file != lease.file]
            if not others:
                return lease, []
            _end(lease)
        if time.monotonic() >= until:
            return None, others
        time.sleep(random.uniform(0.2, 1.0) * _POLL_SECONDS)


def _publish(key: Path, owner: str) -> _Lease:
    """Write a lease under a name that is new, lock it, and only then let others see it."""
    place = folder() if key.parent == Path() else key.parent
    file = place / f"{key.name}.{secrets.token_hex(8)}{_SUFFIX}"
    hidden = file.with_suffix(".new") if fcntl is not None else file
    lease = _Lease(file, _uid(), {"owner": owner, "pid": os.getpid()})
    try:
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600)
        _own[file] = lease, descriptor  # before any thread of this process can see the file
        os.write(descriptor, json.dumps(lease.note).encode())
        if fcntl is not None:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(descriptor, 0o644)
            hidden.rename(file)
    except OSError as error:
        _end(lease)
        hidden.unlink(missing_ok=True)
        raise _unmade(file, error) from error
    return lease


def _end(lease: _Lease) -> None:
    _, descriptor = _own.pop(lease.file, (lease, None))
    if descriptor is not None:  # else it has no file yet, or is that of the process that forked this one
        os.close(descriptor)
        with contextlib.suppress(OSError):
            lease.file.unlink()


def _leases(key: Path | None = None, uid: int | None = None) -> list[_Lease]:
    """Return the leases that living processes hold, this one included, by key and user; `None`: any."""
    if key is not None and key.parent != Path():
        places = {key.parent: _uid()}
    else:
        places = {}
        for place in sorted(Path(tempfile.gettempdir()).glob(f"{_FOLDER}-*")):
            user = place.name.removeprefix(f"{_FOLDER}-").partition("-")[0]
            if user.isdecimal() and uid in (None, int(user)):
                places[place] = int(user)
    found = []
    for place, user_id in places.items():
        with contextlib.suppress(OSError):
            for entry in islice(os.scandir(place), _MOST_FILES):
                file = Path(entry.path)
                if file.suffix == _SUFFIX and key in (None, _key_of(file)):
                    lease = _own[file][0] if file in _own else _read(file, user_id)
                    found += [lease] if lease is not None else []
    return found


def _read(file: Path, uid: int) -> _Lease | None:
    """Return the lease in a file; `None`: no process holds it, or it is not that user's."""
    try:
        descriptor = os.open(file, os.O_RDONLY | _NO_LINK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != uid:
            return None
        try:
            note = json.loads(os.read(descriptor, _LONGEST_NOTE))
        except (OSError, ValueError, RecursionError):
            note = None
        if fcntl is not None and not _is_locked(descriptor):
            if uid == _uid():  # of a run that was killed
                with contextlib.suppress(OSError):
                    file.unlink()
            return None
    finally:
        os.close(descriptor)
    if fcntl is None:  # Windows does not delete a file that a process has open
        with contextlib.suppress(OSError):
            file.unlink()
            return None
    return _Lease(file, uid, note if isinstance(note, dict) else {})


def _is_locked(descriptor: int) -> bool:
    """Return whether another process has the lock for writing, which only the file's user can take."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _key(device: DeviceSpec) -> Path:
    key = device.uuid or device.pci or device.id.partition(".")[0]
    return Path(re.sub(r"[^A-Za-z0-9]+", "-", key))


def _key_of(file: Path) -> Path:
    """Return the key of a lease's file: a path alone in its folder, and a name in the folders of users."""
    name = file.name.removesuffix(_SUFFIX).rpartition(".")[0]
    return Path(name) if file.parent.name.startswith(_FOLDER) else file.with_name(name)


def _on_cpu(device: DeviceSpec) -> bool:
    """Return whether any number of runs may use a device."""
    return backend_class(device.backend).computes_on_cpu


def _unmade(path: Path, error: OSError) -> SetupError:
    return SetupError(
        f"`{path}` must be a file or folder that this user can make, but cannot be made ({error.strerror}). "
        "Set TMPDIR to a folder of your own, or share the cards (hardware.share_devices=true)."
    )


def _uid() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name if pwd is not None else getpass.getuser()
    except (OSError, KeyError, ImportError):
        return f"user {uid}"
