"""The host's walk in C: built with the machine's own compiler the first time that it is wanted.

A wheel would have to be built for every system and would still not know the machine; a compiler is on most of
them. Where there is none, or `HETEXP_NATIVE=0` says so, the walk in Python does the same, only slower:
its figures are beside those of C in docs/benchmarks.md.
"""

from __future__ import annotations

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

from hetexp.hardware.builds import home

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("shared_sum.c")
VARIABLE = "HETEXP_NATIVE"
COMPILERS = ("cc", "gcc", "clang")
BUILD_SECONDS = 60.0
DONE, GONE, LATE = range(3)


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


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled walk; `None` where it cannot be had, with the reason in the log."""
    if os.environ.get(VARIABLE) == "0":
        return None
    try:
        loaded = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        log.info("the exchange's walk in C is not used, the one in Python is: %s", told)
        return None
    for name in ("hetexp_sum", "hetexp_gather", "hetexp_await"):
        getattr(loaded, name).restype = ctypes.c_int
    loaded.hetexp_add.restype = None
    return loaded


def _built() -> Path:
    """Return the compiled library, building it where this source was not yet built on such a machine."""
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + platform.machine().encode() + platform.system().encode()).hexdigest()[:16]
    folder = home() / "cache"
    path = folder / f"shared_sum-{key}.so"
    if path.is_file():
        return path
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no C compiler ({', '.join(COMPILERS)})")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        out = Path(temporary) / path.name
        command = [compiler, "-O3", "-fPIC", "-shared", "-o", str(out), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
        os.replace(out, path)  # other ranks may build at the same time: each puts a whole file there
    return path
