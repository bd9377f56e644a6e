"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetexp.core.errors import RunFailedError
from hetexp.core.files import ending_when_full, fsync_dir, naming, read_json, write_json, write_text


def test_json_is_readable_and_the_only_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": [1, None, "ü"]})
    write_json(path, {"b": 2})
    assert json.loads(path.read_text(encoding="utf-8")) == {"b": 2}
    assert path.read_text(encoding="utf-8").endswith("}\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_value_that_json_cannot_hold_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json(path, {"step": 2, "bad": object()})
    assert json.loads(path.read_text()) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left") as caught:
            write_json(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
    assert caught.value.filename == str(path)


def test_a_full_disk_ends_a_run_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError) as caught, ending_when_full(tmp_path), naming(tmp_path / "file"):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    assert str(caught.value).startswith(
        f"{tmp_path}/file could not be written: Disk quota exceeded. The files in "
    )
    with pytest.raises(PermissionError), ending_when_full(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """The limit of a process on the size of its files counts as a full disk."""
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from hetexp.core.files import ending_when_full, write_json\n"
        "from hetexp.core.errors import RunFailedError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4, 4))\n"
        "try:\n"
        "    with ending_when_full(Path(sys.argv[1])): write_json(Path(sys.argv[1]) / 'a', [1, 2, 3])\n"
        "except RunFailedError: raise SystemExit(9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == 9
    assert not list(tmp_path.iterdir())


def test_a_process_that_dies_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    program = (
        "import os, sys; from pathlib import Path; from hetexp.core.files import write_json\n"
        "os.replace = lambda *_: os._exit(9)\n"
        "write_json(Path(sys.argv[1]), {'step': 2})\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert ended.returncode == 9
    assert json.loads(path.read_text()) == {"step": 1}
    # What the dead process left is in nobody's way.
    write_text(path, "new")
    assert path.read_text() == "new"


def test_text_is_synced_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        order.append("fsync")
        fsync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        order.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_text(tmp_path / "file", "x")
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def test_a_folder_that_cannot_be_opened_is_passed_over(tmp_path: Path) -> None:
    fsync_dir(tmp_path / "missing")


def test_a_planted_link_of_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    """Who may write the folder knows the name, and could have any file of this user overwritten."""
    mine, folder = tmp_path / "mine", tmp_path / "theirs"
    mine.write_text("kept")
    folder.mkdir()
    (folder / f".report.html.{os.getpid()}.tmp").symlink_to(mine)
    write_text(folder / "report.html", "page")
    assert (folder / "report.html").read_text() == "page"
    assert not (folder / "report.html").is_symlink()
    assert mine.read_text() == "kept"


def test_what_is_no_plain_json_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{}")
    for name in ("pipe", "endless", "deep", "bytes"):
        with pytest.raises(ValueError, match="no plain file|too deeply|invalid start byte"):
            read_json(tmp_path / name)
    (tmp_path / "large").write_text("[1" + "0" * 400 + ", 12345678901234567890]")
    assert read_json(tmp_path / "large") == [float("inf"), 12345678901234567890]
