"""What W&B wrote, read back with W&B's own inspector."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

_wandb = importlib.util.find_spec("wandb")
if _wandb is None or _wandb.origin is None:
    pytest.skip("wandb is not installed", allow_module_level=True)
CORE = Path(_wandb.origin).parent / "bin" / "wandb-core"


def without_wandb_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}


def records(path: Path) -> list[dict[str, Any]]:
    """Read a run's file back with wandb's own inspector: what `wandb leet inspect --json` runs."""
    options = ["--no-observability", "--json", "--run-file", str(path), str(path.parents[1])]
    output = subprocess.run(
        [str(CORE), "leet", "inspect", *options],
        env=without_wandb_variables(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in output.stdout.splitlines()]


def points(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was logged, without W&B's own values."""
    items = [record["history"]["item"] for record in found if record["type"] == "history"]
    return [{name: value for name, value in item.items() if not name.startswith("_")} for item in items]


def only(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the only record of a kind."""
    (one,) = [record[kind] for record in found if record["type"] == kind]
    return dict(one)
