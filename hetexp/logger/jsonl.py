"""The metrics file: one JSON object a line, readable while the run goes on."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetexp.core.files import naming
from hetexp.logger.base import Logger, RunInfo, plain_value

METRICS = "metrics.jsonl"
EARLIER_METRICS = "metrics_before.jsonl"
"""In a resumed run's folder: the metrics of the runs before it, up to the checkpoint that it goes on from."""


class MetricsFile(Logger):
    """Appends a line `{"step": …, …}` for each call and flushes it, so that a killed run keeps every line.

    NaN and infinities are written as `NaN` and `Infinity`, which Python's `json` reads, so that a diverged
    loss stays visible. An existing file is continued, without the incomplete line that a kill may have left.
    If a resumed run repeats a step, its last line is valid.

    Args:
        path: the file; its folder must exist.

    Raises:
        OSError: the file cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _cut_half_line(path)
        self._file = path.open("a", encoding="utf-8")

    def start(self, run: RunInfo) -> None:
        """Do nothing: the file was opened when this was built."""

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Append one line, `step` first."""
        line = {"step": step} | {
            name: plain_value(value) for name, value in metrics.items() if name != "step"
        }
        with naming(self.path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the file; the summary is another file."""
        self._file.close()


def _cut_half_line(path: Path) -> None:
    """Remove an incomplete line after the last newline."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end, size = text.rfind(b"\n") + 1, len(text)
    if end < size:
        os.truncate(path, end)
