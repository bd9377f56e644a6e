"""Lines at the end of a file that another process appends to, such as a run's `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from hetexp.core.files import parse_json


def last_rows(path: Path, most_bytes: int) -> list[dict[str, Any]]:
    """Return the JSON objects of a file's last whole lines; none where there is no such file.

    What is cut off, by `most_bytes` or by a writer that was killed, is left out.
    """
    try:
        with _plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            text = file.read(most_bytes)
    except OSError:
        return []
    return list(_rows((text if size <= most_bytes else text.partition(b"\n")[2]).splitlines()))


def all_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file's whole lines, as they are asked for; none without such a file."""
    try:
        file = _plain(path)
    except OSError:
        return
    with file:
        yield from _rows(file)


def _plain(path: Path) -> BinaryIO:
    """Open a file, but no device or pipe, which may have no end."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no plain file")
    return path.open("rb")


def _rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError):
            row = parse_json(line)
            if isinstance(row, dict):
                yield row


class Appended:
    """Whole lines as they are appended to a file, which may come later, and be rewritten."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        self._file: BinaryIO | None = None

    def read(self) -> list[bytes]:
        """Return the lines that were added since the last call."""
        try:
            if self._file is None:
                self._file = _plain(self._path)
            elif self._path.stat().st_size < self._file.tell():
                self.close()
                self._file = _plain(self._path)
            added = self._file.read()
        except OSError:
            return []
        *complete, self._rest = (self._rest + added).split(b"\n")
        return complete

    def close(self) -> None:
        """Close the file; the next call reads it from its beginning."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""
