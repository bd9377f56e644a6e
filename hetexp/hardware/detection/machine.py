"""The sources of detection: the kernel's files, the vendors' libraries and commands, the environment.

Detection reads a machine through one object only. So a test can give it recorded answers of another machine.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetexp.hardware.detection.builds import Question
from hetexp.hardware.detection.detected import Seen

log = logging.getLogger(__name__)

COMMAND_SECONDS = 0.6
"""Longest wait for a vendor's command: a hanging driver must not delay the list of the other cards."""


@dataclass(frozen=True)
class Machine:
    """This machine, or a recorded one."""

    root: Path = Path("/")
    """Folder that replaces `/` in the paths of the kernel's files."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    platform: str = sys.platform
    """`linux`, `darwin`, `win32`."""
    load: Callable[[str], Any] = importlib.import_module
    """Imports a vendor's library; any error means that the library is missing."""
    run: Callable[[Sequence[str]], str | None] = lambda command: Question(command, COMMAND_SECONDS).answer()
    """Runs a vendor's command and returns its output, `None` if the command is absent, fails or hangs."""
    torch_sees: Callable[[str], list[Seen]] | None = None
    """Returns the devices that the torch builds of a kind (`cuda`, `hip`, `xpu`) see; `None`: their
    interpreters are asked (`hetexp.hardware.detection.probe.torch_sees`)."""
    may_open: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    """Returns whether this process may read and write a device file (`/dev/kfd`)."""

    def path(self, name: str) -> Path:
        """Return the path of a file of this machine (`/sys/class/drm`)."""
        return self.root / name.lstrip("/")

    def text(self, name: str | Path) -> str | None:
        """Return a file's text without blanks around it, `None` if it cannot be read."""
        path = name if isinstance(name, Path) else self.path(name)
        try:
            return path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str | Path) -> int | None:
        """Return a file's whole number, decimal or `0x…`, `None` if there is none."""
        text = self.text(name)
        try:
            return int(text, 0) if text else None
        except ValueError:
            return None

    def library(self, name: str) -> Any | None:
        """Return a vendor's library, `None` if it is absent or refuses to load.

        amdsmi raises KeyError and pyzes OSError if there is no driver.
        """
        try:
            return self.load(name)
        except Exception as error:
            level = logging.DEBUG if isinstance(error, ImportError) else logging.INFO
            log.log(level, "%s is not used: %r", name, error)
            return None
