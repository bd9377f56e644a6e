"""The end of a file that somebody appends to: whole lines, whatever was cut off or written anew."""

from __future__ import annotations

from pathlib import Path

from hetexp.core.lines import Appended, all_rows, last_rows


def test_last_rows_are_whole_objects(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_rows(path, 100) == []
    path.write_text('{"step": 1}\n[2]\n{"step": 3}\n{"step": 4, "lo')
    assert last_rows(path, 1000) == [{"step": 1}, {"step": 3}]
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert last_rows(path, 15) == [{"step": 3}]
    assert last_rows(path, 12) == []  # the line before ends where the last one begins: nobody can tell


def test_appended_lines_come_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = Appended(path)
    assert lines.read() == []
    path.write_bytes(b"one\ntw")
    assert lines.read() == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert lines.read() == [b"two", b"three"]
    assert lines.read() == []
    path.write_bytes(b"new\n")  # as a run that starts again from a checkpoint
    assert lines.read() == [b"new"]
    lines.close()


def test_all_rows_of_a_file_that_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert list(all_rows(path)) == []
    path.write_text('{"step": 1}\n{"step": 2}\nnot one\n{"step": 3}\n{"st')
    assert [row["step"] for row in all_rows(path)] == [1, 2, 3]
