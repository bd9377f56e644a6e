"""Writing in the background: off one moment's state, one at a time, waited for, and told where it fails."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetexp.checkpoint.folder import (
    Snapshot,
    SnapshotMemory,
    TrainingState,
    find_checkpoint,
    load_checkpoint,
    packed_whole,
)
from hetexp.checkpoint.manifest import evaluation_of, verify
from hetexp.checkpoint.rotation import Rotation
from hetexp.checkpoint.tensor_file import write_tensors
from hetexp.core.errors import CheckpointError
from hetexp.training.saving.saver import Saver

ALL = Rotation(None, 0, "loss")


class Job:
    """A model whose only weight is the step, and its saver."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.saver = folder, Saver()
        self.model = nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        self.step = 0

    def go_on(self) -> None:
        self.step += 1
        nn.init.constant_(self.model.weight, self.step)

    def take(self, memory: SnapshotMemory) -> Snapshot:
        state = TrainingState(self.step, {"value": self.step}, {}, {})
        return memory.take(*packed_whole(self.model, self.optimizer), state)

    def save(self, wait: bool = False, on_error: Any = "warn") -> None:
        self.saver.write(self.folder, self.take, ALL, on_error, wait)

    def found(self) -> tuple[int, float]:
        """Step and weight of the newest checkpoint."""
        model = nn.Linear(1, 1, bias=False)
        state = load_checkpoint(find_checkpoint(self.folder), model, None)
        assert state.position == {"value": int(model.weight.item())}
        return state.step, float(model.weight.item())


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "checkpoints")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Keep writes from beginning until it is set."""
    may, write = threading.Event(), write_tensors

    def waiting(*arguments: Any) -> Any:
        assert may.wait(60)
        return write(*arguments)

    monkeypatch.setattr("hetexp.checkpoint.folder.write_tensors", waiting)
    return may


def test_a_snapshot_holds_one_moment_whatever_follows(job: Job, held: threading.Event) -> None:
    job.go_on()
    job.save()
    job.go_on()  # while the write has not begun
    assert not job.folder.exists() or not list(job.folder.glob("step_*"))
    assert not job.saver.leave(0.01)
    held.set()
    job.saver.wait()
    assert job.found() == (1, 1.0)


def test_the_next_save_waits_for_the_one_before(job: Job, held: threading.Event) -> None:
    job.go_on()
    job.save()
    job.go_on()
    second = threading.Thread(target=job.save)
    second.start()
    second.join(0.05)
    assert second.is_alive()
    held.set()
    second.join(60)
    job.saver.wait()
    assert job.found() == (2, 2.0)
    assert [one.name for one in sorted(job.folder.iterdir())] == ["step_00000001", "step_00000002"]


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let the disk be full, or not."""
    target = "hetexp.checkpoint.folder.write_tensors"
    return lambda yes: monkeypatch.setattr(target, full if yes else write_tensors)


def test_a_full_disk_is_warned_of_and_the_next_save_tries_again(
    job: Job, filling: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    job.go_on()
    job.save(wait=True)
    filling(True)
    job.go_on()
    with caplog.at_level(logging.WARNING):
        job.save()
        job.saver.wait("warn")
    assert "step_00000002' could not be written: [Errno 28] No space left on device" in caplog.text
    assert "The earlier checkpoints are unchanged. The training goes on" in caplog.text
    assert job.found() == (1, 1.0)
    assert [one.name for one in job.folder.iterdir()] == ["step_00000001"]
    filling(False)
    job.go_on()
    job.save()
    job.saver.wait()
    assert job.found() == (3, 3.0)


def test_a_full_disk_ends_the_run_where_it_is_to(job: Job, filling: Callable[[bool], None]) -> None:
    filling(True)
    job.go_on()
    job.save(on_error="stop")
    with pytest.raises(CheckpointError, match=r"step_00000001.*No space left"):
        job.save(on_error="stop")
    job.save()
    with pytest.raises(CheckpointError, match=r"step_00000001.*No space left"):
        job.saver.wait()
    with pytest.raises(CheckpointError, match="No space left"):
        job.save(wait=True, on_error="warn")  # the last one must be written
    job.save()
    assert job.saver.leave(60)


def test_what_cannot_be_stored_is_told_at_once(job: Job) -> None:
    job.model.register_buffer("odd", torch.eye(2).to_sparse())
    with pytest.raises(CheckpointError, match="'odd' must be a dense tensor"):
        job.save()
    assert job.saver.leave(1.0)


def test_an_evaluation_that_comes_later_is_in_the_manifest_and_decides_what_stays(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rotation = Rotation(1, 1, "loss")
    for loss in (0.5, 0.25, 0.75):
        job.go_on()
        job.saver.write(job.folder, job.take, rotation, "warn", wait=False)
        job.saver.add_evaluation(job.folder / f"step_{job.step:08d}", {"loss": loss}, rotation)
    assert [one.name for one in sorted(job.folder.iterdir())] == ["step_00000002", "step_00000003"]
    verify(find_checkpoint(job.folder))
    assert evaluation_of(find_checkpoint(job.folder)) == {"loss": 0.75}
    monkeypatch.setattr("hetexp.checkpoint.manifest.write_json", full)
    job.saver.add_evaluation(job.folder / "step_00000003", {"loss": 0.1}, rotation)
    assert "The evaluation is not in the manifest" in caplog.text
    verify(find_checkpoint(job.folder))
    assert evaluation_of(find_checkpoint(job.folder)) == {"loss": 0.75}
