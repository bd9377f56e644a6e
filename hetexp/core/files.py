"""Files that appear whole: temporary name, fsync, rename."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_dir(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def fsync_dir(path: Path) -> None:
    """Make renames inside the folder durable, where the system allows opening a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (OSError, PermissionError):  # Windows opens no folders; the rename itself stays atomic
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
