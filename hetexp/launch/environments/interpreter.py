"""Checks before any process starts that the interpreters of devices can run a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError

PACKAGES = ("hetexp", "torch", "numpy", "hydra", "omegaconf", "pydantic", "rich", "safetensors")
"""Packages that every rank imports."""
OLDEST_PYTHON = (3, 10)
LIMIT_SECONDS = 60.0
_WITHOUT_FOLDER = "import sys; sys.path = [p for p in sys.path if p]; "
"""Removes the current folder, which Python puts first for `-c`: a user's `random.py` would hide Python's."""
RUN_WORKER = _WITHOUT_FOLDER + "from hetexp.worker import main; main()"
"""Program of a rank, which appends the plan's import paths to `sys.path`."""
_QUESTION = _WITHOUT_FOLDER + (
    "import json; from importlib.util import find_spec; "
    "print(json.dumps([sys.version_info[:2], [name for name in sys.argv[1:] if find_spec(name) is None]]))"
)


def is_own(interpreter: str) -> bool:
    """Return whether an interpreter is the one that runs this process.

    All environments of a Python link to the same file, so that the folder must be the same as well.
    """
    path, own = Path(interpreter), Path(sys.executable)
    return path.resolve() == own.resolve() and path.parent.resolve() == own.parent.resolve()


def check_own_interpreter() -> None:
    """Check that the interpreter of this process has the packages of hetexp, without importing them.

    Raises:
        SetupError: names the interpreter and the missing packages.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise SetupError(
            f"This interpreter, {sys.executable}, lacks {', '.join(missing)}. Install hetexp and its needs "
            f"({sys.executable} -m pip install -e .), or use the interpreter that has it."
        )


def check_interpreter(device: DeviceSpec, environment: Mapping[str, str], working_dir: str) -> None:
    """Check that a device's own interpreter has the packages of a rank, without importing them.

    Raises:
        SetupError: it does not run, is too old, or lacks packages; names device and interpreter.
    """
    if device.python is None or is_own(os.path.join(working_dir, device.python)):
        return
    who = f"The interpreter of {device}, {device.python},"
    try:
        answer = subprocess.run(
            [device.python, "-c", _QUESTION, *PACKAGES],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            env=dict(environment),
            cwd=working_dir,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{who} cannot be started: {_reason(error)}.") from error
    try:
        version, missing = json.loads(answer.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        lines = answer.stderr.strip().splitlines() or [f"it ended with exit code {answer.returncode}"]
        raise SetupError(f"{who} is no Python that can run a rank: {lines[-1]}.") from None
    if tuple(version) < OLDEST_PYTHON:
        actual, oldest = (".".join(map(str, numbers)) for numbers in (version, OLDEST_PYTHON))
        raise SetupError(f"{who} must be Python {oldest} or newer, but is {actual}.")
    if missing:
        names = ", ".join(missing)
        raise SetupError(
            f"{who} lacks {names}. Install hetexp there ({device.python} -m pip install hetexp), with the "
            "torch build for this device."
        )


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it did not answer within {LIMIT_SECONDS:g} s"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
