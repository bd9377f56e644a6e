"""Leases of cards: one run at a time, and none after its owner is gone."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stranger import NOBODY, needs_root, stranger

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.detection import lease
from hetexp.hardware.detection.lease import Leases, choosing, folder, held_by_others, holder, owners

CARD = DeviceSpec("cuda:0", "cuda", 0, "RTX 3090", "nvidia", uuid="GPU-8932f937")
OTHER = DeviceSpec("cuda:1", "cuda", 1, "RTX 4090", "nvidia", uuid="GPU-aaaa")
CPU = DeviceSpec("cpu:0", "cpu", 0, "CPU", "cpu")


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
    assert not list(folder().iterdir())


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


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of temporary files in which all users may make files, as `/tmp`."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that another user would like to see overwritten."""
    path = tmp_path / "victim"
    path.write_text(json.dumps({"owner": "victim", "pid": 1}))
    return path


def left(path: Path) -> list[str]:
    return [file.name for file in path.iterdir()]


def planted(make: Callable[[Path], object], key: str = "GPU-8932f937", uid: int = NOBODY) -> Path:
    """Let something lie where a lease of a user would be."""
    place = Path(tempfile.gettempdir()) / f"hetexp-leases-{uid}"
    place.mkdir(exist_ok=True)
    make(place / f"{key}.0123456789abcdef.lease")
    return place


def test_only_the_user_may_write_whatever_the_umask_is() -> None:
    for mask in (0o077, 0o000):
        before = os.umask(mask)
        try:
            with Leases([CARD], "outputs/one"):
                modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in folder().iterdir()}
                assert stat.S_IMODE(folder().stat().st_mode) == 0o755
        finally:
            os.umask(before)
        assert modes == {".lease": 0o644}
        folder().chmod(0o777)


@needs_root
def test_two_users_do_not_take_the_same_card(shared: Path) -> None:
    def run() -> Leases:
        return Leases([CARD], "/home/other/outputs/run").__enter__()

    with stranger(run) as pid:
        user = pwd.getpwuid(NOBODY).pw_name
        text = f"the run /home/other/outputs/run (process {pid} of {user})"
        assert holder(CARD) == text
        assert held_by_others() == {"GPU-8932f937"}
        with pytest.raises(SetupError, match=re.escape(f"is held by {text}. Wait for it")):
            Leases([OTHER, CARD], "outputs/two").__enter__()
        assert holder(OTHER) is None
        with Leases([OTHER], "outputs/two"), stranger(lambda: Leases([CPU], "outputs/three").__enter__()):
            pass
    assert holder(CARD) is None

    def refused() -> None:
        with pytest.raises(SetupError, match="is held by the run outputs/mine"):
            run()
        assert held_by_others() == {"GPU-8932f937"}

    with Leases([CARD], "outputs/mine"), stranger(refused):
        assert "outputs/mine" in str(holder(CARD))


@needs_root
def test_a_users_lease_is_in_nobody_elses_hands(shared: Path) -> None:
    """Neither writes another user into it, nor removes it, nor keeps it when its run has ended."""
    first = Leases([CARD], "outputs/mine").__enter__()
    (lease,) = folder().iterdir()

    def attack() -> list[int]:
        for damage in (lease.unlink, lambda: lease.write_text("{}"), lambda: (lease.parent / "x").touch()):
            with pytest.raises(PermissionError):
                damage()
        with pytest.raises(PermissionError):
            lease.parent.rename(shared / "gone")
        opened = os.open(lease, os.O_RDONLY)
        fcntl.flock(opened, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="temporarily unavailable"):
            fcntl.lockf(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return [opened]

    with stranger(attack):
        assert "outputs/mine" in str(holder(CARD))
        first.__exit__()
        assert holder(CARD) is None
        with Leases([CARD], "outputs/next"):
            pass


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_folder_that_another_user_has_made_is_not_used(shared: Path, victim: Path, mode: int) -> None:
    mine = shared / f"hetexp-leases-{os.geteuid()}"

    def squat() -> None:
        mine.mkdir()
        mine.chmod(mode)
        (mine / "GPU-8932f937.0123456789abcdef.lease").symlink_to(victim)

    content = victim.read_text()
    with stranger(squat), Leases([CARD], "outputs/one"):
        assert folder() != mine
        assert folder().stat().st_uid == os.geteuid()
        assert folder() == folder()
        assert "outputs/one" in str(holder(CARD))
        with pytest.raises(SetupError, match="is held by the run outputs/one"):
            Leases([CARD], "outputs/two").__enter__()
        with stranger(lambda: Leases([OTHER], "elsewhere").__enter__()), choosing():
            assert held_by_others() == {"GPU-8932f937", "GPU-aaaa"}
    assert victim.read_text() == content


def test_a_folder_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"hetexp-leases-{os.geteuid()}").symlink_to(elsewhere)
    with Leases([CARD], "outputs/one"), choosing():
        assert not folder().is_symlink()
        assert "outputs/one" in str(holder(CARD))
    assert left(elsewhere) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.symlink_to(path.parents[1] / "victim"),
        lambda path: path.hardlink_to(path.parents[1] / "victim"),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
        lambda path: path.write_text("{"),
    ],
)
@pytest.mark.parametrize("key", ["GPU-8932f937", "choosing"])
def test_what_is_no_lease_of_its_user_holds_nothing(
    victim: Path, make: Callable[[Path], object], key: str
) -> None:
    """Neither in the folder of another user nor in that of this one."""
    place, content = planted(make, key), victim.read_text()
    for uid in (NOBODY, os.geteuid()):
        place = place.rename(place.with_name(f"hetexp-leases-{uid}"))
        with choosing(), Leases([CARD], "outputs/one"):
            assert "outputs/one" in str(holder(CARD))
        assert holder(CARD) is None
    assert victim.read_text() == content


@needs_root
@pytest.mark.parametrize(
    "note", ["{", "[" * 20_000, "[]", '{"owner": 1}', '{"owner": "\\u001b[2J", "pid": 1}']
)
def test_a_note_of_another_user_is_only_words(shared: Path, note: str) -> None:
    def hold() -> Any:
        place = planted(lambda path: path.write_text(note))
        file = next(place.iterdir()).open("r+")
        fcntl.lockf(file, fcntl.LOCK_EX)
        return file

    with stranger(hold):
        text = str(holder(CARD))
        assert pwd.getpwuid(NOBODY).pw_name in text
        assert text.isprintable()
        assert owners() == []


@needs_root
def test_nobody_holds_a_card_in_the_name_of_another(shared: Path) -> None:
    def hold() -> Any:
        place = planted(lambda path: path.write_text('{"owner": "run", "pid": 1}'), uid=4242)
        file = next(place.iterdir()).open("r+")
        fcntl.lockf(file, fcntl.LOCK_EX)
        return file

    with stranger(hold):
        assert holder(CARD) is None
        (shared / "hetexp-leases-4242").rename(shared / f"hetexp-leases-{NOBODY}")
        assert holder(CARD) is not None


@needs_root
def test_only_the_folder_of_its_own_user_counts_as_a_run(shared: Path, tmp_path: Path) -> None:
    theirs = shared / "run"

    def hold() -> list[Leases]:
        theirs.mkdir()
        return [Leases([CARD], str(tmp_path)).__enter__(), Leases([OTHER], str(theirs)).__enter__()]

    with stranger(hold) as pid:
        assert owners() == [(str(theirs), pid)]


@needs_root
def test_another_user_cannot_stop_the_choice_of_cards(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "OTHERS_SECONDS", 0.3)

    def choose() -> Any:
        context = choosing()
        context.__enter__()
        return context

    with stranger(choose) as pid, choosing(), Leases([CARD], "outputs/one"):
        (text,) = caplog.messages
        assert f"process {pid} of" in text
        assert "is not waited for any longer" in text


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    for act in (Leases([CARD], "outputs/one").__enter__, choosing().__enter__):
        with pytest.raises(SetupError, match=r"missing/hetexp-leases-\d+` must be .* Set TMPDIR to"):
            act()
    assert holder(CARD) is None
    assert (owners(), held_by_others()) == ([], frozenset())


def test_what_killed_runs_have_left_is_removed() -> None:
    with Leases([OTHER], "outputs/one"):
        planted(lambda path: path.write_text("{}"), uid=os.geteuid())
        assert len(left(folder())) == 2
        assert holder(CARD) is None
        assert len(left(folder())) == 1


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
