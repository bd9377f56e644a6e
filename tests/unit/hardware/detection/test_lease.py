"""Leases of cards: one run at a time, and none after its owner is gone."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.detection.lease import Leases, choosing, folder, held_by_others, holder, owners

CARD = DeviceSpec("cuda:0", "cuda", 0, "RTX 3090", "nvidia", uuid="GPU-8932f937")
OTHER = DeviceSpec("cuda:1", "cuda", 1, "RTX 4090", "nvidia", uuid="GPU-aaaa")
CPU = DeviceSpec("cpu:0", "cpu", 0, "CPU", "cpu")
Plant = Callable[[Path, Path], None]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_lease_is_held_and_given_back() -> None:
    assert holder(CARD) is None
    with Leases([CARD], "outputs/one"):
        assert holder(CARD) is not None
        assert f"the run outputs/one (process {os.getpid()} of " in str(holder(CARD))
        assert holder(OTHER) is None
    assert holder(CARD) is None
    assert not list(folder().glob("*.json"))


def test_the_second_run_is_refused_and_keeps_nothing() -> None:
    with Leases([CARD], "outputs/one"):
        with pytest.raises(SetupError, match="cuda:0 .* is held by the run outputs/one"):
            Leases([OTHER, CARD], "outputs/two").__enter__()
        assert holder(OTHER) is None
    with Leases([OTHER, CARD], "outputs/two"):
        assert "outputs/two" in str(holder(OTHER))


def test_ranks_that_share_a_card_take_one_lease() -> None:
    with Leases([CARD, CARD], "outputs/one"):
        assert holder(CARD) is not None


def test_the_cpu_is_everybodys() -> None:
    with Leases([CPU], "outputs/one"), Leases([CPU], "outputs/two"):
        assert holder(CPU) is None


def test_a_lease_ends_with_its_owner_however_that_one_ends(tmp_path: Path) -> None:
    code = (
        "import sys, tempfile\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from hetexp.core.device import DeviceSpec\n"
        "from hetexp.hardware.detection.lease import Leases\n"
        f"card = DeviceSpec('cuda:0', 'cuda', 0, 'RTX 3090', 'nvidia', uuid={CARD.uuid!r})\n"
        "lease = Leases([card], 'killed')\n"
        "lease.__enter__()\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    assert owner.stdout.readline() == "held\n"
    assert f"the run killed (process {owner.pid} of " in str(holder(CARD))
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    owner.stdin.close()
    owner.stdout.close()
    assert holder(CARD) is None
    with Leases([CARD], "outputs/next"):
        assert "outputs/next" in str(holder(CARD))


def test_a_broken_note_is_no_reason_to_fail() -> None:
    with Leases([CARD], "outputs/one"):
        for note in folder().glob("*.json"):
            note.write_text("{")
        assert holder(CARD) == "another hetexp run"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The folder that all users share, as another run has left it."""
    path = tmp_path / "hetexp-leases"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that a stranger would like to see overwritten."""
    path = tmp_path / "victim"
    path.write_text(json.dumps({"owner": "victim", "pid": 1, "user": "me"}))
    return path


def test_all_users_may_write_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with Leases([CARD], "outputs/one"):
            modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in folder().iterdir()}
    finally:
        os.umask(before)
    assert modes[".lock"] == 0o666
    assert stat.S_IMODE((tmp_path / "hetexp-leases").stat().st_mode) == 0o1777


def test_a_planted_note_is_not_written_through(shared: Path, victim: Path) -> None:
    content = victim.read_text()
    for link in (Path.symlink_to, Path.hardlink_to):
        link(shared / "GPU-8932f937.json", victim)
        with Leases([CARD], "outputs/one"):
            assert victim.read_text() == content
            assert "outputs/one" in str(holder(CARD))
            assert owners() == [("outputs/one", os.getpid())]
        assert victim.read_text() == content


def test_a_planted_note_is_not_followed(shared: Path, victim: Path) -> None:
    with Leases([CARD], "outputs/one"):
        note = shared / "GPU-8932f937.json"
        note.unlink()
        note.symlink_to(victim)
        assert holder(CARD) == "another hetexp run"
        assert owners() == []
        note.unlink()
        os.mkfifo(note)
        assert holder(CARD) == "another hetexp run"
        note.unlink()


@pytest.mark.parametrize("plant", [lambda path, to: path.symlink_to(to), lambda path, to: os.mkfifo(path)])
def test_a_planted_lock_is_refused_in_a_sentence(shared: Path, victim: Path, plant: Plant) -> None:
    content = victim.read_text()
    path = shared / "GPU-8932f937.lock"
    plant(path, victim)
    with pytest.raises(
        SetupError, match=rf"lease of cuda:0 .* `{path}` of user \d+ cannot be opened .*share_devices"
    ):
        Leases([OTHER, CARD], "outputs/one").__enter__()
    assert holder(OTHER) is None
    assert holder(CARD) is None
    (shared / "choosing.lock").symlink_to(victim)
    with (
        pytest.raises(SetupError, match=r"choosing\.lock` of user \d+ cannot be opened \(it is a link\)"),
        choosing(),
    ):
        pass
    assert victim.read_text() == content


def test_files_that_only_another_user_may_open(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def denied(path: str, *arguments: int, **named: int) -> int:
        if str(path).startswith(str(shared)):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *arguments, **named)

    for name in ("GPU-8932f937.lock", "choosing.lock"):
        (shared / name).touch(0o600)
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(SetupError, match=r"cannot be opened \(Permission denied\)"), choosing():
        pass
    with pytest.raises(SetupError, match=r"cannot be opened \(Permission denied\)"):
        Leases([CARD], "outputs/one").__enter__()
    assert holder(CARD) is None
    assert held_by_others() == frozenset()


def test_a_file_that_another_user_left_is_locked_like_any_other(shared: Path) -> None:
    for name in ("GPU-8932f937.lock", "choosing.lock"):
        (shared / name).touch()
        (shared / name).chmod(0o666)
        if os.geteuid() == 0:
            os.chown(shared / name, 65534, 65534)
    with choosing(), Leases([CARD], "outputs/one"):
        assert "outputs/one" in str(holder(CARD))
        assert held_by_others() == {"GPU-8932f937"}


def test_a_folder_that_is_a_link_is_left_for_one_of_ones_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o1777)
    (tmp_path / "hetexp-leases").symlink_to(elsewhere)
    with caplog.at_level(logging.WARNING), Leases([CARD], "outputs/one"):
        assert folder() == tmp_path / f"hetexp-leases-{os.geteuid()}"
        assert stat.S_IMODE(folder().stat().st_mode) == 0o700
        assert "outputs/one" in str(holder(CARD))
        with pytest.raises(SetupError, match="is held by the run outputs/one"):
            Leases([CARD], "outputs/two").__enter__()
    assert not list(elsewhere.iterdir())
    (told,) = caplog.messages
    assert "must be a folder for all users, but it is a link" in told
    assert "does not see those of other users" in told


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1700])
def test_another_users_folder_is_used_only_if_all_may_write_and_none_may_remove(
    shared: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: shared.stat().st_uid + 1)
    assert folder() == shared
    shared.chmod(mode)
    with pytest.raises(SetupError, match=r"must be a folder that only you may write to, but .* TMPDIR"):
        folder()  # the one of its own is another user's here, too
    with pytest.raises(SetupError):
        Leases([CARD], "outputs/one").__enter__()
    assert holder(CARD) is None
    assert (owners(), held_by_others()) == ([], frozenset())


def test_ones_own_folder_gets_the_right_mode(shared: Path) -> None:
    shared.chmod(0o755)
    assert folder() == shared
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777


def test_a_forked_child_holds_no_lease() -> None:
    (reads, writes), (ready, go) = os.pipe(), os.pipe()
    with Leases([CARD], "outputs/one"):
        child = os.fork()
        if child == 0:
            os.close(writes)
            os.write(go, b"1")  # whatever a fork does is done
            os.read(reads, 1)
            os._exit(0)
        os.read(ready, 1)
        held = holder(CARD)
    after = holder(CARD)
    os.close(writes)
    os.waitpid(child, 0)
    for descriptor in (reads, ready, go):
        os.close(descriptor)
    assert held is not None
    assert after is None
