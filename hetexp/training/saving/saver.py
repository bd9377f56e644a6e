"""One rank's checkpoints: memory for a snapshot, and the thread that writes it while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from hetexp.checkpoint.background import BackgroundWriter
from hetexp.checkpoint.folder import Snapshot, SnapshotMemory, write_snapshot
from hetexp.checkpoint.manifest import add_evaluation
from hetexp.checkpoint.rotation import Rotation, rotate
from hetexp.checkpoint.snapshot import LockPages
from hetexp.core.errors import CheckpointError

log = logging.getLogger(__name__)

OnError = Literal["warn", "stop"]


class Saver:
    """Writes one snapshot at a time; the next one waits until it is on the disk.

    A write needs no other rank, and goes on if one is lost.

    Args:
        lock_pages: page-locks memory for the backend whose tensors are saved.
    """

    def __init__(self, lock_pages: LockPages | None = None) -> None:
        self._memory = SnapshotMemory(lock_pages)
        self._writer = BackgroundWriter()

    def write(
        self,
        parent: Path,
        take: Callable[[SnapshotMemory], Snapshot],
        rotation: Rotation,
        on_error: OnError,
        wait: bool,
    ) -> None:
        """Take a snapshot, write it, and delete checkpoints by the rotation.

        Args:
            parent: folder of the run's checkpoints.
            take: takes the snapshot into the given memory.
            on_error: whether a failed write in the background ends the run, or only causes a warning.
            wait: whether to wait for this write, and raise its error.

        Raises:
            CheckpointError: a value cannot be stored; this write failed, or the one before, and `on_error`
                says stop.
        """
        self.wait(on_error)
        snapshot = take(self._memory)
        if wait:
            _write(parent, snapshot, rotation)
            return

        def write() -> None:
            try:
                _write(parent, snapshot, rotation)
            except CheckpointError as error:
                goes_on = " The training goes on, and saves again at the next checkpoint's step."
                log.warning("%s%s", error, goes_on if on_error == "warn" else "")
                raise

        self._writer.start(write)

    def add_evaluation(self, folder: Path, evaluation: Mapping[str, float], rotation: Rotation) -> None:
        """Add an evaluation to the newest checkpoint, which may now be the best, and rotate again.

        An error in writing the manifest only causes a warning: the checkpoint stays complete.
        """
        self.wait("warn")
        try:
            add_evaluation(folder, evaluation)
        except OSError as error:
            log.warning("The evaluation is not in the manifest of '%s': %s", folder, error)
        _rotate(folder.parent, rotation)

    def wait(self, on_error: OnError = "stop") -> None:
        """Wait for the write that is under way.

        Raises:
            CheckpointError: the write failed, and `on_error` says stop.
        """
        try:
            self._writer.wait()
        except CheckpointError:
            if on_error == "stop":
                raise

    def leave(self, seconds: float) -> bool:
        """Wait at most `seconds` for a write under way; return whether it has ended."""
        try:
            return self._writer.wait(seconds)
        except CheckpointError:  # reported already
            return True


def _write(parent: Path, snapshot: Snapshot, rotation: Rotation) -> None:
    write_snapshot(parent, snapshot)
    _rotate(parent, rotation)


def _rotate(parent: Path, rotation: Rotation) -> None:
    for folder in rotate(parent, rotation):
        log.info("%s is deleted: trainer.keep_last and keep_best keep others", folder.name)
