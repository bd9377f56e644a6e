"""Atomic writes of files (temporary name, fsync, rename), full disks, and locks of folders."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetexp.core.errors import ConfigError, RunFailedError, must_be

try:
    import fcntl
    import pwd
except ImportError:  # Windows has no locks on folders
    fcntl = None  # type: ignore[assignment]

_MOST_DIGITS = 100
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, a user's quota, and a process's limit of the file size."""
LEAST_FREE = 4 * 2**20
"""Bytes for a run's plan, logs and metrics before any checkpoint."""


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Write `text` as UTF-8, so that a reader sees the old file or the new one, never a part.

    Bytes of a file's name that are no UTF-8 are escaped.
    """
    write_bytes(path, text.encode(errors="backslashreplace"), durable)


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """Write bytes so that a reader sees the old file or the new one, never a part.

    Args:
        durable: whether to wait until they are on the disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        temporary.unlink(missing_ok=True)
        try:
            with temporary.open("xb") as file:  # follows no link of this name, which may lead anywhere
                file.write(content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:  # frees its part of a full disk
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            fsync_dir(path.parent)


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    """Write `value` as indented JSON, whole or not at all; see `write_bytes`."""
    write_text(path, json.dumps(value, indent=2) + "\n", durable)


def read_json(path: Path) -> Any:
    """Return the JSON of a file that anyone may have written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no plain file, whose reading might never end, or no JSON in UTF-8.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is no plain file")
    return parse_json(path.read_bytes())


def parse_json(text: bytes) -> Any:
    """Return the value of a JSON text that anyone may have written; numbers too large for a float are `inf`.

    Raises:
        ValueError: it is no JSON in UTF-8, or nested more deeply than Python reads.
    """
    try:
        return json.loads(text.decode(), parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors of the system, because those of `write` and `fsync` have none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def no_room(error: BaseException, folder: Path) -> str | None:
    """Return one line about a full disk; `None` for other errors.

    Args:
        error: raised while writing.
        folder: of the run, for an error that names no file.
    """
    if not isinstance(error, OSError) or error.errno not in FULL:
        return None
    return (
        f"{error.filename or folder} could not be written: {error.strerror or os.strerror(error.errno)}. "
        f"The files in {folder} are whole: make room, and go on with resume={folder}."
    )


@contextmanager
def ending_when_full(folder: Path) -> Iterator[None]:
    """End the run in this folder with one line if a disk is full.

    Raises:
        RunFailedError: a disk is full.
    """
    try:
        yield
    except OSError as error:
        message = no_room(error, folder)
        if message is None:
            raise
        raise RunFailedError(message) from None


def fsync_dir(path: Path) -> None:
    """Make renames inside the folder durable, if the system can open folders."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (OSError, PermissionError):  # Windows opens no folders; the rename itself stays atomic
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_folder(path: Path, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Hold a lock on a folder, even if it is renamed. The lock ends with this process at the latest.

    Args:
        shared: whether other readers may hold it as well.
        wait: whether to wait for processes that hold it.

    Yields:
        Whether it is held; also true on systems without such locks.
    """
    if fcntl is None:
        yield True
        return
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, how)
            held = True
        except BlockingIOError:
            held = False
        except OSError:  # a file system without locks
            held = True
        yield held
    finally:
        os.close(descriptor)


def folder_problem(path: Path) -> str:
    """Return why a folder can neither be written nor made, without making it; empty if it can."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        return f"{existing} is a file."
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written by this user."
    free = shutil.disk_usage(existing).free
    if free < LEAST_FREE:
        return f"only {free / 2**20:.1f} MiB are free in {existing}: logs and metrics alone need more."
    return ""


def of_others(*paths: Path) -> str:
    """Return why another user could have written one of some files or folders; empty if none could.

    Those of root count as safe, and so do those that the user's own group may write.
    """
    if not hasattr(os, "geteuid"):
        return ""
    for path in paths:
        status = path.stat()
        group = stat.S_IWGRP if status.st_gid != os.getegid() else 0
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWOTH | group):
            owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
            return f"{path} must be writable by you alone, but belongs to user {owner} with mode {mode:o}"
    return ""


def check_owner(path: Path, trusted: str | None, key: str, fix: str) -> None:
    """Check that a folder, or the folder that it would be made in, is this user's or the system's.

    Args:
        trusted: another user whose folders are accepted.
        key: key or option that names the folder.
        fix: how to accept this user, who is put in place of `{}`.

    Raises:
        ConfigError: it is another user's, who may change its files, or replace them by links, at any time.
    """
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    user = existing.stat().st_uid
    if not hasattr(os, "geteuid") or user in (0, os.geteuid()):
        return
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = str(user)
    if trusted not in (name, str(user)):
        why = f"This one is the user {name}'s. If you trust this user, add {fix.format(name)}."
        raise ConfigError(must_be(key, "a folder of your own", str(existing), why))


def temporary_folder() -> Path:
    """Make a folder for temporary files of this process; the launcher removes those of ended ranks."""
    return Path(tempfile.mkdtemp(prefix=f"hetexp-{os.getpid()}-"))


def remove_temporary_folders(pid: int) -> None:
    """Remove the folders of `temporary_folder` from a process that has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"hetexp-{pid}-*"):
        shutil.rmtree(folder, ignore_errors=True)
