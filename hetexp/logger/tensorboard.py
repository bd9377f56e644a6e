"""TensorBoard's event files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PositiveFloat

from hetexp.logger.base import Logger, RunInfo, plain_value

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
    """Writes `<run_dir>/tensorboard`: scalars over the optimizer step, the configuration and summary as text.

    TensorBoard's names have no colons: `device/cuda:0/share` becomes `device/cuda_0/share`.

    Args:
        folder: name of the folder in the run folder; `tensorboard --logdir outputs` finds it.
        flush_seconds: longest time until a point is written.
    """

    def __init__(self, folder: str = "tensorboard", flush_seconds: PositiveFloat = 10.0) -> None:
        self.folder = folder
        self.flush_seconds = flush_seconds
        self._writer: SummaryWriter | None = None
        self._before: list[Path] = []
        """Event files of earlier processes of this run."""

    def start(self, run: RunInfo) -> None:
        """Open the event file.

        Raises:
            ModuleNotFoundError: TensorBoard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            fix = "TensorBoard is not installed (pip install 'hetexp[tensorboard]', or logger=none)"
            raise ModuleNotFoundError(fix, name=error.name) from error
        folder = run.run_dir / self.folder
        self._before = list(folder.glob("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(folder), flush_secs=self.flush_seconds)
        self._writer.add_text("name", run.name)
        self._writer.add_text("tags", ", ".join(run.tags))
        self._writer.add_text("config", _as_code(run.config))

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        """Add a scalar for each number and a text for each other value; `None` is left out."""
        if self._writer is None:
            return
        for name, value in metrics.items():
            plain = plain_value(value)
            if isinstance(plain, str):
                self._writer.add_text(_tag(name), plain, step)
            elif plain is not None:
                self._writer.add_scalar(_tag(name), plain, step)

    def retell(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write all lines again, and delete earlier processes' files, which may lack their last points."""
        for path in self._before:
            path.unlink()
        super().retell(lines)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Add the summary, or that the run failed, and close the file."""
        if self._writer is None:
            return
        self._writer.add_text("summary", _as_code(summary) if summary else f"ended with {exit_code}")
        self._writer.close()
        self._writer = None


def _tag(name: str) -> str:
    """Return a name without colons, which TensorBoard would replace with a warning."""
    return name.replace(":", "_")


def _as_code(value: Any) -> str:
    """Return plain types as an indented block of JSON, which TensorBoard's text page shows unchanged."""
    return "".join(f"    {line}\n" for line in json.dumps(value, indent=2, default=str).splitlines())
