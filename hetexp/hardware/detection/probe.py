"""Asks the interpreters that can drive cards which devices their torch sees, and caches the answers.

This serves cards whose driver has no library to ask (ROCm under WSL, an Arc without Level Zero's tools). The
import of torch takes seconds and may hang in a driver. So processes of their own do it, within a time limit,
and the answer is kept in `$HETEXP_HOME/cache` until the interpreter's torch, a driver or the cards change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetexp.core.files import write_json
from hetexp.hardware.base import VISIBILITY
from hetexp.hardware.detection.builds import Question, TorchBuild, home, known_builds
from hetexp.hardware.detection.detected import Seen
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import pci_cards

PROBE_SECONDS = 20.0
"""Longest wait for an interpreter to import torch and to look at its devices."""
FAILURE_SECONDS = 60.0
"""How long a failure, or an answer without a device, is kept: nothing shows when its cause is gone."""

_DRIVERS = (
    "/proc/driver/nvidia/version",
    "/sys/module/amdgpu/version",
    "/sys/module/i915/version",
    "/sys/module/xe/version",
    "/proc/sys/kernel/random/boot_id",
)
_NODES = ("/dev/nvidia[0-9]*", "/dev/dri/renderD*", "/dev/kfd", "/dev/dxg")
"""Device files, which a container may lack and a user may be unable to read."""

_SCRIPT = """
import json, os, sys
answer = os.dup(1)
os.dup2(2, 1)  # whatever a library prints must not get into the answer
sys.path = [path for path in sys.path if path]
import torch
kind, names = sys.argv[1], sys.argv[2].split(",")
devices, problem = [], None
if kind == "mps":
    if torch.backends.mps.is_available():
        devices.append({"name": getattr(torch.backends.mps, "get_name", lambda: "Apple GPU")()})
    else:
        problem = "torch.backends.mps.is_available() is false"
else:
    module = torch.xpu if kind == "xpu" else torch.cuda
    for index in range(module.device_count()):
        properties = module.get_device_properties(index)
        facts = {name: getattr(properties, name, None) for name in names}
        plain = (bool, int, float, str, type(None))
        devices.append({name: fact if isinstance(fact, plain) else str(fact) for name, fact in facts.items()})
    if not devices:
        try:
            module.init()
            problem = "it sees no device"
        except Exception as error:
            problem = str(error).strip().partition(chr(10))[0]
os.write(answer, json.dumps([devices, problem]).encode())
"""
_PROPERTIES = "name,total_memory,uuid,major,minor,is_integrated,pci_domain_id,pci_bus_id,pci_device_id"
"""Of `torch.cuda.get_device_properties` and `torch.xpu.get_device_properties`; builds lack some of them."""


@dataclass(frozen=True)
class _Answer:
    """The answer of one interpreter."""

    devices: tuple[Seen, ...] = ()
    problem: str | None = None
    time: float = 0.0


def torch_sees(kind: str, machine: Machine) -> list[Seen]:
    """Return the devices that the torch builds of a kind see on this or a recorded machine.

    It starts interpreters, so that only backends without another source call it.
    """
    return torch_devices(kind, machine=machine) if machine.torch_sees is None else machine.torch_sees(kind)


def torch_devices(
    kind: str,
    *,
    builds: Sequence[TorchBuild] | None = None,
    wait: bool = True,
    limit_seconds: float = PROBE_SECONDS,
    machine: Machine | None = None,
) -> list[Seen]:
    """Return the devices that the torch builds of a kind see, also those that visibility variables hide.

    Of several interpreters with such a build, the longest list is returned.

    Args:
        kind: `cuda`, `hip`, `xpu` or `mps` (`TorchBuild.kind`).
        builds: torch builds that may be asked; this process's own and the recorded ones by default.
        wait: whether to wait for interpreters without a cached answer. Else a process asks them on its own,
            and the cached devices are returned.
        limit_seconds: longest wait for all of them together.
        machine: this machine by default.
    """
    machine = machine or Machine()
    asked = _of_kind(kind, builds)
    key = _fingerprint(machine) if asked else []
    answers = {build: _remembered(build, key) for build in asked}
    missing = [build for build, answer in answers.items() if answer is None]
    if missing and wait:
        answers |= _ask(kind, missing, key, machine, limit_seconds)
    elif missing:
        _ask_detached(kind, missing, machine, limit_seconds)
    lists = [list(answer.devices) for answer in answers.values() if answer is not None]
    return max(lists, key=len, default=[])


def probe_problem(
    kind: str, *, builds: Sequence[TorchBuild] | None = None, machine: Machine | None = None
) -> str | None:
    """Return why an interpreter of a kind last showed no device, `None` if none failed."""
    asked = _of_kind(kind, builds)
    key = _fingerprint(machine or Machine()) if asked else []
    for build in asked:
        answer = _remembered(build, key)
        if answer is not None and answer.problem is not None:
            return f"{_python(build)} (torch {build.version}): {answer.problem}"
    return None


def _of_kind(kind: str, builds: Sequence[TorchBuild] | None) -> list[TorchBuild]:
    builds = known_builds() if builds is None else builds
    return [build for build in builds if build.kind == kind and build.problem is None]


def _python(build: TorchBuild) -> str:
    return build.python or sys.executable


def _fingerprint(machine: Machine) -> list[Any]:
    """Return the facts that an answer depends on beside the interpreter: drivers, cards, permissions."""
    drivers = [machine.text(path) for path in _DRIVERS]
    cards = [[card.address, card.device_id, card.driver] for card in pci_cards(machine)]
    nodes = [
        [str(node), machine.may_open(node)]
        for pattern in _NODES
        for node in sorted(machine.root.glob(pattern.lstrip("/")))
    ]
    order = machine.environ.get("CUDA_DEVICE_ORDER")  # the devices' numbers follow it
    return [platform.release(), drivers, cards, nodes, order]


# ---------------------------------------------------------------- cache


def _path(build: TorchBuild, suffix: str = "json") -> Path:
    name = hashlib.sha256(_python(build).encode()).hexdigest()[:16]
    return home() / "cache" / f"probe-{name}.{suffix}"


def _remembered(build: TorchBuild, key: Sequence[Any]) -> _Answer | None:
    """Return an interpreter's cached answer, `None` if it is missing or outdated."""
    try:
        raw = json.loads(_path(build).read_text(encoding="utf-8"))
        if raw["key"] != [_python(build), build.version, *key]:
            return None
        answer = _Answer(tuple(Seen(**seen) for seen in raw["devices"]), raw["problem"], float(raw["time"]))
    except (OSError, ValueError, TypeError, KeyError):  # absent or broken
        return None
    age = time.time() - answer.time
    return answer if answer.devices or 0 <= age < FAILURE_SECONDS else None


def _remember(build: TorchBuild, key: Sequence[Any], answer: _Answer) -> None:
    raw = asdict(answer) | {"key": [_python(build), build.version, *key]}
    with contextlib.suppress(OSError):  # without the cache, the next call takes seconds, no more
        _path(build).parent.mkdir(parents=True, exist_ok=True)
        write_json(_path(build), raw)


# ---------------------------------------------------------------- asking


def _ask(
    kind: str, builds: Sequence[TorchBuild], key: Sequence[Any], machine: Machine, limit_seconds: float
) -> dict[TorchBuild, _Answer]:
    """Ask interpreters at the same time, and cache their answers."""
    environ = {name: value for name, value in machine.environ.items() if name not in VISIBILITY}
    questions = {}
    for build in builds:
        # Another interpreter's torch must not come from this one's PYTHONPATH.
        isolated = ["-I"] if build.python is not None else []
        command = [_python(build), *isolated, "-c", _SCRIPT, kind, _PROPERTIES]
        questions[build] = Question(command, limit_seconds, environ)
    answers = {}
    for build, question in questions.items():
        answers[build] = _answer(kind, question)
        _remember(build, key, answers[build])
    return answers


def _answer(kind: str, question: Question) -> _Answer:
    text = question.answer()
    try:
        devices, problem = json.loads(text or "")
        seen = tuple(_seen(kind, index, facts) for index, facts in enumerate(devices))
    except (ValueError, TypeError, KeyError):
        return _Answer(problem=question.problem or "its answer cannot be read", time=time.time())
    return _Answer(seen, problem, time.time())


def _ask_detached(kind: str, builds: Sequence[TorchBuild], machine: Machine, limit_seconds: float) -> None:
    """Let another process ask and cache the answers, unless a process is already asking."""
    claimed = [build for build in builds if _claimed(build, limit_seconds)]
    if not claimed:
        return
    program = (
        f"import sys; sys.path.append({str(Path(__file__).resolve().parents[3])!r}); "
        "from hetexp.hardware.detection.probe import _detached; "
        f"_detached({kind!r}, {limit_seconds!r}, sys.argv[1])"
    )
    plain = json.dumps([asdict(build) for build in claimed])
    with contextlib.suppress(OSError):
        process = subprocess.Popen(
            [sys.executable, "-c", program, plain],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(machine.environ),
            start_new_session=True,
        )
        _ASKING.append(process)


_ASKING: list[subprocess.Popen[bytes]] = []
"""Kept, so that Python does not warn of a process that is not waited for."""


def _detached(kind: str, limit_seconds: float, plain: str) -> None:
    """Ask the interpreters in the process of `_ask_detached`."""
    builds = [TorchBuild(**raw) for raw in json.loads(plain)]
    machine = Machine()
    try:
        _ask(kind, builds, _fingerprint(machine), machine, limit_seconds)
    finally:
        for build in builds:
            _path(build, "asked").unlink(missing_ok=True)


def _claimed(build: TorchBuild, limit_seconds: float) -> bool:
    """Return whether this process may ask an interpreter; the claim of a process that died expires."""
    path = _path(build, "asked")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > 2 * limit_seconds:
                path.unlink()
        path.open("x").close()
    except OSError:
        return False
    return True


def _seen(kind: str, index: int, facts: dict[str, Any]) -> Seen:
    architecture = f"sm_{facts['major']}{facts['minor']}" if kind == "cuda" else None
    place = (facts.get("pci_domain_id") or 0, facts.get("pci_bus_id"), facts.get("pci_device_id"))
    return Seen(
        index=index,
        name=str(facts["name"]),
        memory_bytes=facts.get("total_memory"),
        uuid=facts.get("uuid"),
        pci=None if None in place else "{:04x}:{:02x}:{:02x}.0".format(*place),
        architecture=architecture,
        integrated=bool(facts.get("is_integrated")),
    )
