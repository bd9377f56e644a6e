"""The metrics as one wide table, for spreadsheets and `pandas.read_csv`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from hetexp.core.files import naming, write_text
from hetexp.logger.base import Logger, RunInfo, plain_value


class CsvLogger(Logger):
    """Writes `<run_dir>/metrics.csv`: a row a log call, `step` first, and a column a metric.

    A new metric gets a column at the end, which is empty in earlier rows; the file is then rewritten, whole
    or not at all. A missing value is empty, and NaN and infinities are `nan` and `inf`. Numbers have all
    their digits.

    Args:
        file: name of the file in the run folder.
    """

    def __init__(self, file: str = "metrics.csv") -> None:
        self.file = file
        self._path = Path()
        self._columns = ["step"]
        self._open: IO[str] | None = None

    def start(self, run: RunInfo) -> None:
        """Write the header."""
        self._path = run.run_dir / self.file
        self._write([])

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Append a row."""
        row = {"step": step} | {name: plain_value(value) for name, value in metrics.items() if name != "step"}
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        assert self._open is not None
        with naming(self._path):
            csv.DictWriter(self._open, self._columns, lineterminator="\n").writerow(row)
            self._open.flush()

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the file."""
        if self._open is not None:
            self._open.close()

    def _widen(self, new: list[str]) -> None:
        """Add columns to the header and to every row so far."""
        self.finish({}, 0)
        self._columns += new
        with self._path.open(encoding="utf-8", newline="") as file:
            _, *rows = csv.reader(file)
        self._write([row + [""] * len(new) for row in rows])

    def _write(self, rows: list[list[str]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self._columns, *rows])
        write_text(self._path, text.getvalue())
        self._open = self._path.open("a", encoding="utf-8", newline="")
