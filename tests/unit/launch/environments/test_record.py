"""Environments are made of commands that fail in every way; what is made here has a stand-in for torch."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stranger import NOBODY

import hetexp
from hetexp.core.errors import SetupError
from hetexp.hardware.detection.builds import recorded_interpreters
from hetexp.launch.environments import record as environments
from hetexp.launch.environments.record import (
    Recipe,
    check_recipe,
    create,
    make_recipe,
    package_source,
    record,
    records,
    typed,
    version_of,
)
from hetexp.launch.environments.wheels import Wheel

WHEEL = Wheel("2.13.0+cpu", "https://mirror.example/whl/cpu", "as asked")
PUT_TORCH = """
import pathlib, sys
site = next(pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages")) / "torch"
site.mkdir()
(site / "__init__.py").touch()
(site / "version.py").write_text(sys.argv[2])
"""
CPU = "__version__ = '2.13.0+cpu'\ncuda = hip = xpu = None\n"
CUDA = "__version__ = '2.13.0'\ncuda = '13.0'\nhip = xpu = None\n"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def recipe(folder: Path, *commands: tuple[str, ...], torch: str = CPU, kind: str = "cpu") -> Recipe:
    """A recipe whose last command puts a stand-in for torch where it belongs."""
    venv = (sys.executable, "-m", "venv", "--without-pip", str(folder))
    put = (sys.executable, "-c", PUT_TORCH, str(folder), torch)
    return Recipe(folder.name, kind, folder, WHEEL, (venv, *commands, put))


def silent(line: object) -> None:
    return None


# ---------------------------------------------------------------- the commands


def test_commands_of_pip(tmp_path: Path) -> None:
    made = make_recipe("cpu", WHEEL, folder=tmp_path / "made", python="/usr/bin/python3.12")
    python = str(tmp_path / "made" / "bin" / "python")
    venv, torch, package = made.commands
    assert venv == ("/usr/bin/python3.12", "-m", "venv", str(tmp_path / "made"))
    assert torch[:4] == package[:4] == (python, "-m", "pip", "install")
    assert torch[-3:] == ("--extra-index-url", "https://mirror.example/whl/cpu", "torch==2.13.0+cpu")
    # hetexp's own needs come from where they always do; torch is named, so that it stays as it is.
    assert "--extra-index-url" not in package
    assert package[-3:] == (*package_source(), "torch==2.13.0+cpu")
    assert not any("intel" in word or "constraint" in word for command in made.commands for word in command)


def test_commands_of_uv(own_home: Path) -> None:
    made = make_recipe("cpu", WHEEL, name="mine", uv="/usr/bin/uv")
    folder = own_home / "envs" / "mine"
    venv, torch, package = made.commands
    assert venv == ("/usr/bin/uv", "venv", "--seed", "--python", sys.executable, str(folder))
    install = ("/usr/bin/uv", "pip", "install", "--python", str(folder / "bin" / "python"))
    assert torch == (*install, "--index", "https://mirror.example/whl/cpu", "torch==2.13.0+cpu")
    assert package == (*install, *package_source(), "torch==2.13.0+cpu")


def test_no_index_where_there_is_none() -> None:
    made = make_recipe("cpu", Wheel("2.13.0", None, "macOS"))
    assert not any(word.endswith("index-url") for word in made.commands[1])


def test_typed_as_a_shell_takes_it() -> None:
    assert typed(("pip", "install", "/a b/c")) == "pip install '/a b/c'"


def test_hetexp_comes_from_the_clone() -> None:
    assert package_source() == ("--editable", str(Path(hetexp.__file__).resolve().parents[1]))


@pytest.mark.parametrize(
    ("told", "source"),
    [
        ({"url": "file://{here}/hetexp-0.1.0.whl", "archive_info": {}}, "{here}/hetexp-0.1.0.whl"),
        ({"url": "file://{here}/a%20b", "dir_info": {}}, "{here}/a b"),
        ({"url": "file://{here}/gone.whl", "archive_info": {}}, f"hetexp=={hetexp.__version__}"),
        (
            {"url": "https://host.example/hetexp.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "hetexp @ git+https://host.example/hetexp.git@abc",
        ),
        (None, f"hetexp=={hetexp.__version__}"),
    ],
)
def test_hetexp_that_is_installed_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any, source: str
) -> None:
    (tmp_path / "hetexp-0.1.0.whl").touch()
    (tmp_path / "a b").mkdir()
    text = None if told is None else json.dumps(told).replace("{here}", str(tmp_path))
    installed = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr(environments, "package_root", lambda: None)
    monkeypatch.setattr(environments, "distribution", lambda name: installed)
    assert package_source() == (source.replace("{here}", str(tmp_path)),)


@pytest.mark.parametrize(
    ("listed", "own"),
    [
        ("global.extra-index-url='file:///wheels'\n", True),
        (":env:.find-links='/wheels'\n", True),
        ("global.index-url='https://mirror.example/simple'\n", True),
        ("global.timeout='60'\nglobal.cert='/etc/cert'\n", False),
        ("", False),
    ],
)
def test_sources_that_uv_does_not_read(monkeypatch: pytest.MonkeyPatch, listed: str, own: bool) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(stdout=listed))
    assert environments.pip_has_own_sources() == own


# ---------------------------------------------------------------- making one


def test_it_is_recorded_once_it_is_whole(tmp_path: Path, own_home: Path) -> None:
    folder = tmp_path / "envs" / "mine"
    told: list[tuple[str, ...]] = []
    made = recipe(folder, (sys.executable, "-c", "print('one line')"))
    shown: list[str] = []
    build = create(made, told.append, shown.append)
    assert (build.version, build.kind, build.python) == ("2.13.0+cpu", "cpu", str(folder / "bin" / "python"))
    assert recorded_interpreters() == records() == {"mine": str(folder / "bin" / "python")}
    assert told == list(made.commands)
    assert "one line" in shown
    assert "one line\n" in (own_home / "envs" / "mine.log").read_text()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["mine"]
    assert version_of(records()["mine"]) == ".".join(map(str, sys.version_info[:3]))


def fails(recipe: Recipe, told: str) -> str:
    with pytest.raises(SetupError) as caught:
        create(recipe, silent, silent)
    assert told in str(caught.value)
    assert records() == {}
    return str(caught.value)


def test_a_command_that_fails(tmp_path: Path, own_home: Path) -> None:
    """Its last lines are shown, and nothing is left."""
    program = "import sys; print('\\n'.join(f'line {n}' for n in range(50))); sys.exit('no such torch')"
    made = recipe(tmp_path / "mine", (sys.executable, "-c", program))
    message = fails(made, "This command failed with exit code 1:")
    assert typed(made.commands[1]) in message
    assert "  no such torch\n" in message
    assert "  line 49\n" in message
    assert "line 20" not in message
    log = own_home / "envs" / "mine.log"
    assert f"All of them: {log}" in message
    assert "line 20" in log.read_text()
    assert "Is there a torch 2.13.0+cpu for this system and Python?" in message
    assert "https://mirror.example/whl/cpu cannot be reached" in message
    assert not (tmp_path / "mine").exists()


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    made = Recipe("mine", "cpu", tmp_path / "mine", WHEEL, (("/nowhere/python", "-m", "venv"),))
    assert fails(made, "/nowhere/python cannot be started: No such file or directory.").count("\n") == 0


@pytest.mark.parametrize(
    ("torch", "told"),
    [
        (CUDA, "must have a torch built for cpu, but has 2.13.0, which is built for cuda"),
        ("raise ValueError('broken')", "must have torch, but cannot be used: "),
    ],
)
def test_another_torch_than_asked_for(tmp_path: Path, torch: str, told: str) -> None:
    fails(recipe(tmp_path / "mine", torch=torch), told)
    assert not (tmp_path / "mine").exists()


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """The conftest's check of left processes tells whether the command was ended."""

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    program = "import time; print('begun', flush=True); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        create(recipe(tmp_path / "mine", (sys.executable, "-c", program)), silent, interrupt)
    assert records() == {}
    assert not (tmp_path / "mine").exists()


def test_the_old_one_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "envs" / "mine"
    create(recipe(folder), silent, silent)
    (folder / "old").touch()
    with pytest.raises(SetupError):
        create(recipe(folder, (sys.executable, "-c", "raise SystemExit(3)")), silent, silent)
    assert (folder / "old").exists()
    assert records() == {"mine": str(folder / "bin" / "python")}
    create(recipe(folder), silent, silent)
    assert not (folder / "old").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]


def test_a_clone_on_the_path_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    shown: list[str] = []
    program = "import os; print('PYTHONPATH' in os.environ, 'PATH' in os.environ)"
    create(recipe(tmp_path / "mine", (sys.executable, "-c", program)), silent, shown.append)
    assert "False True" in shown


# ---------------------------------------------------------------- where it may be made


def environment(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("version = 3.12.4\n")


def file(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("")


def work(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "thesis.tex").touch()


@pytest.mark.parametrize(
    ("there", "force", "told"),
    [
        (environment, False, "holds an environment already. Add --force"),
        (environment, True, None),
        (file, False, "holds something other than a virtual environment"),
        (work, True, "holds something other than a virtual environment"),
        (lambda folder: folder.mkdir(parents=True), False, None),
    ],
)
def test_what_is_there_already(
    tmp_path: Path, there: Callable[[Path], None], force: bool, told: str | None
) -> None:
    made = recipe(tmp_path / "envs" / "mine")
    there(made.folder)
    if told is None:
        check_recipe(made, force)
        return
    with pytest.raises(SetupError) as caught:
        check_recipe(made, force)
    assert told in str(caught.value)


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    record("mine", Path(sys.executable))
    made = recipe(tmp_path / "mine")
    with pytest.raises(SetupError, match="named 'mine' is recorded already"):
        check_recipe(made, force=False)
    check_recipe(made, force=True)
    record("mine", tmp_path / "gone" / "python")
    check_recipe(made, force=False)


@pytest.mark.parametrize("name", ["this", "..", "a/b", "", "-x"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(SetupError, match="--name must be of letters"):
        check_recipe(make_recipe("cpu", WHEEL, name=name or "-"), force=False)


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SetupError, match=r"about 16 GiB free for torch's rocm build, but has 1\.0 GiB"):
        check_recipe(recipe(tmp_path / "mine", kind="rocm"), force=False)


# ---------------------------------------------------------------- the record


def test_a_record_is_added_to(own_home: Path) -> None:
    record("one", Path(sys.executable))
    record("two", Path("/gone/python"))
    assert records() == {"one": sys.executable, "two": "/gone/python"}
    assert recorded_interpreters() == {"one": sys.executable}
    (own_home / "environments.json").write_text("{")
    assert records() == {}
    (own_home / "environments.json").write_text("[1]")
    assert records() == {}


def test_versions_are_read_from_the_folder(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    assert version_of(str(python)) is None
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion_info = 3.12.4.final.0\n")
    assert version_of(str(python)) == "3.12.4"


def test_an_interpreter_that_another_user_may_have_named_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HETEXP_HOME", str(tmp_path))
    path = tmp_path / "environments.json"
    path.write_text(json.dumps({"one": sys.executable}))
    assert recorded_interpreters() == {"one": sys.executable}
    for file in (path, tmp_path):
        mode = file.stat().st_mode
        file.chmod(0o777)
        assert recorded_interpreters() == {}
        assert f"{file} must be writable by you alone" in caplog.messages[-1]
        file.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
        assert recorded_interpreters() == {}
