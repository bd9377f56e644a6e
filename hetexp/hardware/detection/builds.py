"""Reads from files, without an import, which accelerators the torch of an interpreter is built for.

A torch wheel supports one accelerator, so that a machine with cards of two vendors needs two interpreters.
`hetexp env` records its interpreters in `environments.json`, which this module reads.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hetexp.core.files import of_others

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Longest wait for an interpreter to report its torch's folder, which takes 20 ms on an idle machine."""
HOME_VARIABLE = "HETEXP_HOME"
_WHERE = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"


@dataclass(frozen=True)
class TorchBuild:
    """The torch of one interpreter."""

    python: str | None
    """Path of the interpreter; `None`: this process's own."""
    version: str | None = None
    """`2.13.0+cpu`; `None` if there is no torch."""
    cuda: str | None = None
    """CUDA version that it is built for, `None` if it is not built for CUDA."""
    hip: str | None = None
    xpu: str | None = None
    mps: bool = False
    problem: str | None = None
    """Why nothing is known of it."""

    @property
    def kind(self) -> str:
        """`cuda`, `hip`, `xpu`, `mps` or `cpu`."""
        if self.hip:
            return "hip"
        if self.cuda:
            return "cuda"
        if self.xpu:
            return "xpu"
        return "mps" if self.mps else "cpu"


def home() -> Path:
    """Return the folder of hetexp's own files: `$HETEXP_HOME`, else the system's usual place."""
    named = os.environ.get(HOME_VARIABLE)
    if named:
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "hetexp"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home() / "AppData" / "Local"))) / "hetexp"
    return Path(os.environ.get("XDG_DATA_HOME", str(Path.home() / ".local" / "share"))) / "hetexp"


def recorded_interpreters() -> dict[str, str]:
    """Return the environments of `hetexp env` that still exist, name → interpreter."""
    path = home() / "environments.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if problem := of_others(home(), path):
            log.warning("No environment of hetexp env is used: %s.", problem)
            return {}
    except (OSError, ValueError):
        return {}
    return {name: python for name, python in raw.items() if Path(python).is_file()}


def own_build() -> TorchBuild:
    """Return the build of this process's own torch."""
    spec = find_spec("torch")
    return _read(None, spec.origin if spec is not None else None)


def read_builds(pythons: Iterable[str]) -> list[TorchBuild]:
    """Read the builds of several interpreters at the same time; a failure is the build's `problem`."""
    pythons = list(dict.fromkeys(pythons))
    questions = [(python, Question([python, "-I", "-c", _WHERE], ANSWER_SECONDS)) for python in pythons]
    builds = []
    for python, question in questions:
        origin = question.answer()
        failed = TorchBuild(python, problem=question.problem)
        builds.append(failed if origin is None else _read(python, origin.strip() or None))
    return builds


def known_builds() -> list[TorchBuild]:
    """Return this process's own build, then those of the recorded environments."""
    return [own_build(), *read_builds(recorded_interpreters().values())]


class Question:
    """A program that another process runs and whose standard output is the answer.

    Args:
        limit_seconds: longest time for it, from now on.
        environ: of the process; `None`: this one's.
    """

    def __init__(
        self, command: Sequence[str], limit_seconds: float, environ: Mapping[str, str] | None = None
    ) -> None:
        self._limit, self._deadline = limit_seconds, time.monotonic() + limit_seconds
        self._process: subprocess.Popen[str] | None = None
        self.problem: str | None = None
        """Why there is no answer."""
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            self.problem = f"it cannot be started: {error.strerror or error}"

    def answer(self) -> str | None:
        """Wait for the answer and return it; `None` if there is none (see `problem`)."""
        if self._process is None:
            return None
        try:
            out, err = self._process.communicate(timeout=max(self._deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                if hasattr(os, "killpg"):
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:  # on Windows
                    self._process.kill()
            self._process.communicate()
            self.problem = f"it did not answer within {self._limit:g} s"
            return None
        if self._process.returncode != 0:
            lines = [line.strip() for line in err.splitlines() if line.strip()]
            self.problem = lines[-1] if lines else f"it ended with exit code {self._process.returncode}"
            return None
        return out


def _read(python: str | None, origin: str | None) -> TorchBuild:
    """Read `torch/version.py` of a build, which imports hardly anything."""
    if origin is None:
        return TorchBuild(python, problem="it has no torch")
    path = Path(origin).with_name("version.py")
    facts: dict[str, Any] = {"__name__": "torch.version"}
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), facts)
    except Exception as error:  # a broken installation may raise anything
        return TorchBuild(python, problem=f"{path} cannot be read: {error}")
    mac = sys.platform == "darwin" and os.uname().machine == "arm64"
    return TorchBuild(
        python,
        version=str(facts.get("__version__")),
        cuda=facts.get("cuda"),
        hip=facts.get("hip"),
        xpu=facts.get("xpu"),
        mps=mac,
    )
