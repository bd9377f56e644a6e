"""Files that appear whole: temporary name, fsync, rename."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetexp.core.errors import RunFailedError

try:
    import fcntl
except ImportError:  # Windows has no locks on folders
    fcntl = None  # type: ignore[assignment]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where a file may not grow: the disk, the user's part of it, or the process's limit."""
LEAST_FREE = 4 * 2**20
"""Bytes that a run's plan, logs and metrics may need before any checkpoint."""


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Write `text` so that a reader sees the old file or the new one, never a part."""
    write_bytes(path, text.encode(), durable)


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """Write bytes so that a reader sees the old file or the new one, never a part.

    Args:
        durable: whether they are on the disk when this returns, which may take long.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:  # what it has taken of a full disk is given back
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            fsync_dir(path.parent)


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    """Write `value` as indented JSON, whole or not at all; see `write_bytes`."""
    write_text(path, json.dumps(value, indent=2) + "\n", durable)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the system name the file that it came of: one of `write` or `fsync` does not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def no_room(error: BaseException, folder: Path) -> str | None:
    """Say in one line that a disk is full, `None` where an error is none of a full disk's.

    Args:
        error: of whatever was being written.
        folder: of the run, for an error that names no file.
    """
    if not isinstance(error, OSError) or error.errno not in FULL:
        return None
    return (
        f"{error.filename or folder} could not be written: {error.strerror or os.strerror(error.errno)}. "
        f"What {folder} has is whole: make room, and go on with resume={folder}."
    )


@contextmanager
def ending_when_full(folder: Path) -> Iterator[None]:
    """End the run in this folder in one line where a disk is full.

    Raises:
        RunFailedError: it is.
    """
    try:
        yield
    except OSError as error:
        message = no_room(error, folder)
        if message is None:
            raise
        raise RunFailedError(message) from None


def fsync_dir(path: Path) -> None:
    """Make renames inside the folder durable, where the system allows opening a folder."""
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
    """Hold a lock on a folder, under whatever name it goes on; it ends with this process at the latest.

    Args:
        shared: with others that only read it.
        wait: for those that hold it.

    Yields:
        Whether it is held; true as well where the system has no such locks.
    """
    if fcntl is None:
        yield True
        return
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, how)
            mine = True
        except BlockingIOError:
            mine = False
        except OSError:  # a file system without locks
            mine = True
        yield mine
    finally:
        os.close(descriptor)


def folder_problem(path: Path) -> str:
    """Say why a folder can neither be written nor made, without making it; empty where it can."""
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not there.is_dir():
        return f"{there} is a file."
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written by this user."
    free = shutil.disk_usage(there).free
    if free < LEAST_FREE:
        return f"only {free / 2**20:.1f} MiB are free in {there}: logs and metrics alone need more."
    return ""


def temporary_folder() -> Path:
    """Make a folder for temporary files of this process; the launcher removes those that ranks leave."""
    return Path(tempfile.mkdtemp(prefix=f"hetexp-{os.getpid()}-"))


def remove_temporary_folders(pid: int) -> None:
    """Remove what `temporary_folder` made in a process that has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"hetexp-{pid}-*"):
        shutil.rmtree(folder, ignore_errors=True)
