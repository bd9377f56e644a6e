"""Tests an interpreter with a small computation on every device that its torch drives."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from hetexp.launch.processes.members import package_root
from hetexp.launch.processes.process import python_path

TRIAL_SECONDS = 180.0
"""Longest time for an interpreter to import torch and to compute on each of its devices."""
TOLERANCE = 1e-4
"""Largest relative error (by norm) of a float32 result, compared with float64 on the CPU."""

_TRIAL = """
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)  # the output of a library must not get into the answer
sys.path = [path for path in sys.path if path]
import platform, hetexp, torch

def work(device, dtype):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(64, 64, generator=generator, dtype=torch.float64) for _ in range(2)]
    a, b = (value.to(dtype).to(device).requires_grad_() for value in values)
    loss = torch.tanh(a @ b / 8).square().mean()
    loss.backward()
    return [value.detach().cpu().double() for value in (loss, a.grad, b.grad)]

def compare(device):
    try:
        pairs = zip(work(device, torch.float32), work("cpu", torch.float64))
        return [device, max(float((a - b).norm() / b.norm()) for a, b in pairs), None]
    except Exception as error:
        return [device, None, (str(error).strip() or type(error).__name__).splitlines()[0]]

names = ["cpu"]
for kind in ("cuda", "xpu"):
    module = getattr(torch, kind, None)
    if module is not None and module.is_available():
        names += [f"{kind}:{index}" for index in range(module.device_count())]
if torch.backends.mps.is_available():
    names.append("mps")
answer = [platform.python_version(), hetexp.__version__, torch.__version__, [compare(name) for name in names]]
os.write(out, json.dumps(answer).encode())
"""


@dataclass(frozen=True)
class Trial:
    """The results of an interpreter's computation on every device that it drives."""

    python_version: str | None = None
    hetexp_version: str | None = None
    torch_version: str | None = None
    errors: Mapping[str, float | str] | None = None
    """torch's name of a device → relative error, or why the computation failed."""
    problem: str | None = None
    """Why there are no results."""


def try_interpreter(python: str) -> Trial:
    """Start an interpreter, which computes on every device that its torch drives.

    Cards that a visibility variable hides stay hidden.
    """
    environment = dict(os.environ)
    root = package_root()
    if root is not None:  # hetexp comes from the launcher's clone, as for a rank
        environment["PYTHONPATH"] = python_path(root, environment)
    try:
        answer = subprocess.run(
            [python, "-c", _TRIAL],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Trial(problem=f"it did not answer within {TRIAL_SECONDS:g} s")
    except OSError as error:
        return Trial(problem=f"it cannot be started: {error.strerror or error}")
    try:
        version, package, torch, tried = json.loads(answer.stdout)
    except ValueError:
        lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
        return Trial(problem=lines[-1] if lines else f"it ended with exit code {answer.returncode}")
    errors = {device: why if error is None else float(error) for device, error, why in tried}
    return Trial(version, package, torch, errors)
