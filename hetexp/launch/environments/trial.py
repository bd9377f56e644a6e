"""Whether an interpreter computes right: a small program on every device that its torch drives."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from hetexp.launch.processes.members import package_root

TRIAL_SECONDS = 180.0
"""Longest wait for an interpreter to import torch and to try each of its devices."""
TOLERANCE = 1e-4
"""Largest relative error of a float32 result, by norm, against float64 on the CPU."""

_TRIAL = """
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)  # whatever a library prints must not get into the answer
sys.path = [path for path in sys.path if path]
import platform, hetexp, torch

def work(device, dtype):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(64, 64, generator=generator, dtype=torch.float64) for _ in range(2)]
    one, other = (value.to(dtype).to(device).requires_grad_() for value in values)
    loss = torch.tanh(one @ other / 8).square().mean()
    loss.backward()
    return [value.detach().cpu().double() for value in (loss, one.grad, other.grad)]

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
    """What became of a small program on every device that an interpreter drives."""

    python_version: str | None = None
    hetexp_version: str | None = None
    torch_version: str | None = None
    errors: Mapping[str, float | str] | None = None
    """Device as torch calls it → relative error against float64, or why it failed."""
    problem: str | None = None
    """Why there was no answer at all."""


def try_interpreter(python: str) -> Trial:
    """Start an interpreter and let it compute on every device that its torch drives.

    Cards that a visibility variable hides stay hidden.
    """
    environment = dict(os.environ)
    root = package_root()
    if root is not None:  # as for a rank: hetexp comes from the launcher's clone
        rest = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([root, rest] if rest else [root])
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
