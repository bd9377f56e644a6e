"""The walk in C is built once, and where that cannot be it is done without."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stranger import NOBODY, needs_root

from hetexp.comm import native

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


def test_it_is_built_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library() is not None
    built = sorted((home / "cache").iterdir())
    assert [path.suffix for path in built] == [".sha256", ".so"]
    native.library.cache_clear()
    monkeypatch.setenv("PATH", "")  # no compiler any more
    assert native.library() is not None
    assert sorted((home / "cache").iterdir()) == built


def test_another_source_is_built_anew(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.library()
    changed = tmp_path / "shared_sum.c"
    changed.write_text(native.SOURCE.read_text() + "\n/* more */\n")
    monkeypatch.setattr(native, "SOURCE", changed)
    native.library.cache_clear()
    assert native.library() is not None
    assert len(list((home / "cache").glob("*.so"))) == 2


def test_many_may_build_at_the_same_time(home: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: native._built(), range(4)))
    assert len(paths) == 1
    assert list((home / "cache").glob("*.so")) == list(paths)
    assert native.library() is not None


@pytest.mark.parametrize("why", ["no compiler", "refused", "broken", "switched off"])
def test_without_it_the_walk_is_pythons(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    if why in ("refused", "broken"):
        compiler = folder / "cc"
        text = "echo sorry >&2; exit 1" if why == "refused" else 'for out; do :; done; echo no > "$6"'
        compiler.write_text(f"#!/bin/sh\n{text}\n")
        compiler.chmod(0o755)
    if why == "switched off":
        monkeypatch.setenv(native.VARIABLE, "0")
    else:
        monkeypatch.setenv("PATH", str(folder))
    with caplog.at_level("INFO"):
        assert native.library() is None
    told = {
        "no compiler": "there is no C compiler",
        "refused": "sorry",
        "broken": "shared_sum",
        "switched off": "",
    }
    assert told[why] in caplog.text
    assert bool(caplog.text) == (why != "switched off")


def evil(path: Path) -> Path:
    """Put a library where hetexp's is, with the right sum beside it; return the file that it would make."""
    ran = path.parents[1] / "ran"
    source = path.with_suffix(".c")
    source.write_text(
        f'#include <fcntl.h>\n__attribute__((constructor)) void run(void) {{ creat("{ran}", 0644); }}\n'
    )
    path.unlink()
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    path.with_suffix(".sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    source.unlink()
    return ran


@pytest.mark.parametrize("place", ["home", "cache"])
def test_nothing_is_loaded_from_a_folder_that_others_may_write(
    home: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    ran = evil(native._built())
    (home if place == "home" else home / "cache").chmod(0o777)
    assert native.library() is None
    assert not ran.exists()
    (text,) = caplog.messages
    assert "must be writable by you alone, but belongs to user" in text
    assert "mode 777" in text


@needs_root
@pytest.mark.parametrize("what", ["file", "folder"])
def test_nothing_of_another_user_is_loaded(home: Path, what: str) -> None:
    path = native._built()
    ran = evil(path)
    os.chown(path if what == "file" else path.parent, NOBODY, NOBODY)
    assert (native.library() is None) == (what == "folder")  # a file is built again
    assert not ran.exists()


def test_a_library_of_the_right_sum_without_its_functions_is_not_used(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ran = evil(native._built())
    with caplog.at_level("INFO"):
        assert native.library() is None
    assert ran.exists()  # this user's own file in this user's own folder
    assert "hetexp_await" in caplog.text


@pytest.mark.parametrize("left", [0, 100, 4096, -1])
def test_a_part_of_a_library_is_built_again(home: Path, left: int) -> None:
    path = native._built()
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    assert native._built().read_bytes() == whole
    assert native.library() is not None


def test_python_knows_the_structures_as_c_does(tmp_path: Path) -> None:
    """A field that is added on one side only would move all that follow it."""
    source = tmp_path / "sizes.c"
    names = {"channel": native.Channel, "device": native.Device, "call": native.Call}
    printed = "".join(f'printf("%zu\\n", sizeof(struct {name}));' for name in names)
    source.write_text(f'#include "{native.SOURCE}"\n#include <stdio.h>\nint main(void) {{ {printed} }}\n')
    subprocess.run(["cc", "-pthread", "-o", tmp_path / "sizes", source], check=True)
    found = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in found.split()] == [ctypes.sizeof(one) for one in names.values()]


def test_a_runtime_that_is_not_there() -> None:
    assert native.runtime_calls("99.0", None) is None
