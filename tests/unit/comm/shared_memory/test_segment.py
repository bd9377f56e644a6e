"""Memory that ranks share: it is there, it wakes who waits, the dead are found, and nothing is left."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchanging import each

from hetexp.comm.rendezvous import all_gather_json
from hetexp.comm.shared_memory import segment as module
from hetexp.comm.shared_memory.segment import PREFIX, Segment, Waiter, create, reclaim
from hetexp.core.errors import PeerLostError, SetupError

SIZE, WORDS, BYTES = 2, 7, 2**16
LONG = 60.0
"""Seconds that nobody waits: an error within them is no timeout."""


def opened(rank: int, store: dist.Store, named: bool = False, size: int = SIZE) -> Segment:
    told: dict[str, Any] = {}
    file = -1
    if rank == 0:
        file, path = create(Segment.total_bytes(WORDS, BYTES), named)
        told = {"path": path}
    path = all_gather_json(store, "path", rank, size, told, LONG)[0]["path"]
    file = file if rank == 0 else os.open(path, os.O_RDWR)
    segment = Segment(file, rank, size, WORDS, BYTES)
    all_gather_json(store, "open", rank, size, {}, LONG)
    if rank == 0 and not path.startswith("/proc/"):
        Path(path).unlink()
    return segment


def _pass_on(rank: int, size: int, store: dist.Store, named: bool) -> list[int]:
    segment = opened(rank, store, named)
    waiter = Waiter(segment, WORDS - 1, LONG)
    found = []
    for turn in range(1, 200):
        if turn % 2 == rank:
            waiter.wait(1 - rank, turn - 1, 1 - rank)
            found.append(int(segment.data[0]))
            segment.data.fill_(turn % 251)
            segment.publish(rank, turn)
    segment.close()
    return found


@pytest.mark.parametrize("named", [False, True])
def test_what_was_written_is_there_when_its_word_is(tmp_path: Path, named: bool) -> None:
    first, second = each(SIZE, tmp_path, _pass_on, named)
    assert second == [(turn - 1) % 251 for turn in range(1, 200, 2)]
    assert first == [(turn - 1) % 251 for turn in range(2, 200, 2)]


def _die(rank: int, size: int, store: dist.Store, stopped: bool) -> str:
    segment = opened(rank, store)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        Waiter(segment, WORDS - 1, LONG).wait(1, 1, 1)
    except PeerLostError as error:
        return f"{error}; {segment.lives(0)} {segment.lives(1)}"
    return "it came"


def test_a_dead_rank_is_told_of_at_once(tmp_path: Path) -> None:
    first, second = each(SIZE, tmp_path, _die, False)
    assert (first, second) == ("rank 1 of the exchange is gone; True False", None)


def _fork_and_die(rank: int, size: int, store: dist.Store) -> str:
    segment = opened(rank, store)
    if rank == 1:
        child = os.fork()  # as a data loader does: it has the rank's files open
        if child == 0:
            signal.pause()
        store.set("child", str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        Waiter(segment, WORDS - 1, LONG).wait(1, 1, 1)
    except PeerLostError as error:
        os.kill(int(store.get("child")), signal.SIGKILL)
        return str(error)
    return "it came"


def test_a_dead_rank_is_not_taken_for_its_children(tmp_path: Path) -> None:
    assert each(SIZE, tmp_path, _fork_and_die) == ["rank 1 of the exchange is gone", None]


def _give_up(rank: int, size: int, store: dist.Store) -> str:
    waiter = Waiter(opened(rank, store), WORDS - 1, LONG)
    if rank == 1:
        waiter.give_up()
        return "gave up"
    try:
        waiter.wait(1, 1, 1)
    except PeerLostError as error:
        return str(error)
    return "it came"


def test_a_rank_that_gives_up_keeps_nobody_waiting(tmp_path: Path) -> None:
    assert each(SIZE, tmp_path, _give_up) == ["rank 1 of the exchange is gone", "gave up"]


def _never_come(rank: int, size: int, store: dist.Store) -> str:
    segment = opened(rank, store)
    if rank == 1:
        store.wait(["told"])
        return "lived"
    try:
        Waiter(segment, WORDS - 1, 0.2).wait(1, 1, 1)
    except PeerLostError as error:
        store.set("told", "")
        return str(error)
    return "it came"


def test_a_rank_that_does_not_come_is_waited_for_so_long(tmp_path: Path) -> None:
    assert each(SIZE, tmp_path, _never_come) == ["rank 1 of the exchange did not come within 0.2 s", "lived"]


@pytest.fixture
def alone() -> Any:
    file, _ = create(Segment.total_bytes(WORDS, BYTES))
    segment = Segment(file, 0, 1, WORDS, BYTES)
    yield segment
    segment.close()


def test_counters_go_round(alone: Segment) -> None:
    waiter = Waiter(alone, WORDS - 1, 1.0)
    alone.publish(0, 2**32 - 1)
    waiter.wait(0, 2**32 - 2, 0)
    alone.publish(0, 2**32 + 3)
    assert alone.word(0) == 3
    waiter.wait(0, 2**32 - 1, 0)


def test_words_and_data_lie_apart(alone: Segment) -> None:
    for index in range(WORDS):
        alone.publish(index, 2**32 - 1 - index)
    assert not alone.data.any()
    assert len(alone.data) == BYTES
    alone.data.fill_(255)
    assert [alone.word(index) for index in range(WORDS)] == [2**32 - 1 - index for index in range(WORDS)]


def test_it_can_be_closed_twice_and_with_tensors_left(alone: Segment) -> None:
    kept = alone.data[:8]
    alone.close()
    alone.close()
    assert kept.sum() == 0


def test_where_there_is_no_futex_it_looks_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_futex_call", lambda: None)
    file, _ = create(Segment.total_bytes(WORDS, BYTES))
    segment = Segment(file, 0, 1, WORDS, BYTES)
    segment.publish(0, 5)
    segment.sleep(0, 5)
    assert segment.word(0) == 5
    segment.close()


def test_too_little_memory_is_told_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "shared_memory_folder", lambda: tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SetupError) as refused:
        create(3 * 2**20, named=True)
    told = str(refused.value)
    assert told.startswith(f"{tmp_path} must have 3 MiB free for the exchange between ranks, but has ")
    assert "No space left on device" in told
    assert "comm=gloo" in told
    assert not list(tmp_path.iterdir())


def _leave_behind(rank: int, size: int, store: dist.Store, folder: str) -> None:
    tempfile.tempdir = folder
    module.shared_memory_folder = lambda: Path(folder)
    create(BYTES, named=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_rank_left_is_reclaimed(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    each(1, tmp_path / "one", _leave_behind, str(folder))
    (left,) = folder.glob(f"{PREFIX}*")
    other = folder / "somebody_elses"
    other.touch()
    assert reclaim(folder) == [left.name]
    assert list(folder.iterdir()) == [other]


def test_a_link_in_the_place_of_a_segment_is_not_opened(tmp_path: Path) -> None:
    """To open a file and close it again ends this process's locks on it."""
    victim = tmp_path / "victim"
    victim.touch()
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / f"{PREFIX}1-link").symlink_to(victim)
    with victim.open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert reclaim(folder) == []
        assert each(1, tmp_path / "one", _is_locked, str(victim)) == [True]


def _is_locked(rank: int, size: int, store: dist.Store, path: str) -> bool:
    with Path(path).open() as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_what_a_living_rank_has_stays(tmp_path: Path) -> None:
    def kept() -> list[Path]:
        return list(tmp_path.glob(f"{PREFIX}*"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "shared_memory_folder", lambda: tmp_path)
        file, path = create(BYTES, named=True)
    # From another process: a process always has its own locks.
    assert each(1, tmp_path / "one", _reclaim, str(tmp_path)) == [[]]
    assert kept() == [Path(path)]
    assert str(os.getpid()) in Path(path).name
    os.close(file)
    assert each(1, tmp_path / "two", _reclaim, str(tmp_path)) == [[Path(path).name]]


def _reclaim(rank: int, size: int, store: dist.Store, folder: str) -> list[str]:
    return reclaim(Path(folder))


def test_memory_is_shared_by_no_copy(alone: Segment) -> None:
    view = alone.data[:4].view(torch.float32)
    view.fill_(1.0)
    assert alone.data[:4].tolist() == [0, 0, 128, 63]
