"""The C library of the shared-memory exchange, built with the machine's own compiler at its first use.

A wheel would have to be built for every system and would still not be tuned to the machine; most machines
have a compiler. Without one, or with `HETEXP_NATIVE=0`, the Python implementation does the same, only slower
(figures of both in docs/reference/benchmarks.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from hetexp.core.files import fsync_dir, of_others
from hetexp.hardware.detection.builds import home

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("shared_sum.c")
VARIABLE = "HETEXP_NATIVE"
FLAGS = ("-O3", "-fPIC", "-shared", "-pthread")
COMPILERS = ("cc", "gcc", "clang")
BUILD_SECONDS = 60.0
DONE, GONE, LATE, FAILED = range(4)
MOST_DEPTH = 8


class Channel(ctypes.Structure):
    """`struct channel` of `shared_sum.c`."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("abandoned", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("rank_stride", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("file", ctypes.c_int32),
        ("spins", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("every", ctypes.c_int32),
        ("lost", ctypes.c_int32),
        ("timeout_seconds", ctypes.c_double),
    )


class Device(ctypes.Structure):
    """`struct device` of `shared_sum.c`: what copies between a device and page-locked memory."""

    _fields_ = (
        ("set_device", ctypes.c_void_p),
        ("copy", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
        ("settle", ctypes.c_void_p),
        ("follow", ctypes.c_void_p),
        ("ready", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("back_in", ctypes.c_void_p),
        ("left", ctypes.c_void_p * MOST_DEPTH),
        ("back", ctypes.c_void_p * MOST_DEPTH),
        ("scratch", ctypes.c_void_p),
        ("index", ctypes.c_int32),
    )


class Call(ctypes.Structure):
    """`struct call` of `shared_sum.c`: one channel's part of a tensor."""

    _fields_ = (
        ("channel", ctypes.c_void_p),
        ("device", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("everyone", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("in_parts", ctypes.c_int32),
        ("number", ctypes.c_uint32),
        ("status", ctypes.c_int32),
    )


CALLS = ("SetDevice", "MemcpyAsync", "EventRecord", "EventSynchronize", "StreamWaitEvent")
"""Functions of a device's runtime, in the order of `Device`."""


def runtime_calls(hip: str | None, cuda: str | None) -> list[int] | None:
    """Return the addresses of `CALLS` in the runtime that torch uses; `None` if it is not found.

    Args:
        hip: torch's version of ROCm's runtime.
        cuda: torch's version of CUDA.
    """
    prefix, versions = ("hip", (hip or "").split(".")[:1]) if hip else ("cuda", (cuda or "").split(".")[:1])
    name = "libamdhip64.so" if hip else "libcudart.so"
    for file in (*(f"{name}.{version}" for version in versions), name):
        try:
            loaded = ctypes.CDLL(file)  # by its short name: torch has loaded it already
            calls = [getattr(loaded, prefix + call) for call in CALLS]
        except (OSError, AttributeError):
            continue
        return [ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls]
    return None


class UnsafeCacheError(OSError):
    """Another user could write to the folder of compiled libraries, whose code would run."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library; `None` if it cannot be built or loaded, with the reason in the log."""
    if os.environ.get(VARIABLE) == "0":
        return None
    try:
        loaded = ctypes.CDLL(str(_built()))
        loaded.hetexp_await.restype = ctypes.c_int
        loaded.hetexp_pool.restype = ctypes.c_void_p
        loaded.hetexp_take.restype = loaded.hetexp_end_pool.restype = None
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        level = logging.WARNING if isinstance(error, UnsafeCacheError) else logging.INFO
        log.log(level, "the exchange copies in Python, as its C library cannot be used: %s", reason)
        return None
    return loaded


def _built() -> Path:
    """Return the path of the compiled library; build it unless a whole one for this machine is cached.

    Raises:
        UnsafeCacheError: another user could write to the cache.
        OSError, subprocess.SubprocessError: it cannot be built.
    """
    source = SOURCE.read_bytes()
    target = f"{platform.system()} {platform.machine()} {FLAGS}"
    key = hashlib.sha256(source + target.encode()).hexdigest()[:16]
    folder = home() / "cache"
    path = folder / f"shared_sum-{key}.so"
    digest = path.with_suffix(".sha256")
    folder.mkdir(parents=True, exist_ok=True)
    if problem := of_others(home(), folder):
        raise UnsafeCacheError(problem)
    with contextlib.suppress(FileNotFoundError):
        # Access to what a file lacks, after the machine has stopped, would kill this process.
        if not of_others(path) and _digest(path) == digest.read_text(encoding="utf-8"):
            return path
    compiler = next((file for name in COMPILERS if (file := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no C compiler ({', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        out = Path(temporary) / path.name
        command = [compiler, *FLAGS, "-o", str(out), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
        total = out.with_suffix(digest.suffix)
        total.write_text(_digest(out), encoding="utf-8")
        for made, place in ((out, path), (total, digest)):
            with made.open("rb") as opened:
                os.fsync(opened.fileno())
            os.replace(made, place)  # atomic: other ranks may build at the same time
    fsync_dir(folder)
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
