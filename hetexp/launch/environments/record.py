"""Makes environments for other vendors' torch, and records them in `$HETEXP_HOME/environments.json`.

A build of torch drives the cards of one vendor, so that a machine with cards of two vendors needs two
interpreters. The detection reads the record (`hetexp.hardware.detection.builds`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

import hetexp
from hetexp.core.device import GIB
from hetexp.core.errors import SetupError
from hetexp.core.files import folder_problem, write_json
from hetexp.hardware.detection.builds import TorchBuild, home, read_builds
from hetexp.launch.environments.wheels import KINDS, Wheel
from hetexp.launch.processes.members import package_root

TAIL = 12
"""Number of last lines of a failed command that are shown; the log has all lines."""
_DISK_GIB = {"cuda": 6.0, "rocm": 16.0, "cpu": 1.2}
"""Approximate size of an environment on the disk, with torch 2.13 or 2.14 and its dependencies."""


@dataclass(frozen=True)
class Recipe:
    """The commands that make an environment."""

    name: str
    kind: str
    """A key of `hetexp.launch.environments.wheels.KINDS`."""
    folder: Path
    wheel: Wheel
    commands: tuple[tuple[str, ...], ...]

    @property
    def python(self) -> Path:
        """The interpreter of the environment."""
        return interpreter_in(self.folder)


# ---------------------------------------------------------------- the record


def records() -> dict[str, str]:
    """Return name → interpreter of every recorded environment, including deleted ones."""
    try:
        raw = json.loads(_record_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(python) for name, python in raw.items()} if isinstance(raw, dict) else {}


def record(name: str, python: Path) -> None:
    """Record an environment for the detection."""
    path = _record_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, records() | {name: str(python)})


def _record_path() -> Path:
    return home() / "environments.json"


def interpreter_in(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / "Scripts" / "python.exe" if sys.platform == "win32" else folder / "bin" / "python"


def version_of(python: str) -> str | None:
    """Return the Python version in a virtual environment's `pyvenv.cfg`."""
    with suppress(OSError):
        for line in (Path(python).parents[1] / "pyvenv.cfg").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("=")
            if key.strip() in ("version", "version_info"):
                return ".".join(value.strip().split(".")[:3])
    return None


# ---------------------------------------------------------------- making one


def make_recipe(
    kind: str,
    wheel: Wheel,
    *,
    name: str | None = None,
    folder: Path | None = None,
    python: str | None = None,
    uv: str | None = None,
) -> Recipe:
    """Return the commands that make an environment, without running them.

    Args:
        name: in the record; the kind by default.
        folder: of the environment; in `$HETEXP_HOME/envs` by default.
        python: interpreter that makes it; the one of this process by default.
        uv: path of uv, which then replaces venv and pip.
    """
    name = name or kind
    folder = (folder or home() / "envs" / name).absolute()
    base, new = python or sys.executable, str(interpreter_in(folder))
    create: tuple[str, ...]
    install: tuple[str, ...]
    index = [] if wheel.index is None else ["--index" if uv else "--extra-index-url", wheel.index]
    if uv is not None:
        create = (uv, "venv", "--seed", "--python", base, str(folder))
        install = (uv, "pip", "install", "--python", new)
    else:
        create = (base, "-m", "venv", str(folder))
        # One retry: pip asks each index for each package. If PyTorch's index cannot be reached, pip would
        # spend seconds on each dependency of torch. Like uv, it compiles nothing in advance.
        install = (new, "-m", "pip", "install", "--no-input", "--disable-pip-version-check")
        install += ("--no-compile", "--retries", "1")
    return Recipe(
        name,
        kind,
        folder,
        wheel,
        (
            create,
            (*install, *index, wheel.requirement),
            # torch is named again, so that no dependency replaces its build.
            (*install, *package_source(), wheel.requirement),
        ),
    )


def package_source() -> tuple[str, ...]:
    """Return the arguments of an installer for this hetexp: the clone, its source, or its version."""
    root = package_root()
    if root is not None and (Path(root) / "pyproject.toml").is_file():
        return "--editable", root
    with suppress(PackageNotFoundError, ValueError, KeyError, TypeError):
        # https://packaging.python.org/en/latest/specifications/direct-url
        facts = json.loads(distribution("hetexp").read_text("direct_url.json") or "")
        if "vcs_info" in facts:
            return (f"hetexp @ {facts['vcs_info']['vcs']}+{facts['url']}@{facts['vcs_info']['commit_id']}",)
        path = unquote(urlparse(facts["url"]).path)
        if facts["url"].startswith("file:") and Path(path).exists():
            return (path,)
    return (f"hetexp=={hetexp.__version__}",)


def pip_has_own_sources() -> bool:
    """Return whether pip is configured for other sources than PyPI, which uv would ignore."""
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    keys = ("find-links", "index-url", "no-index")
    return any(line.partition("=")[0].endswith(keys) for line in answer.stdout.splitlines())


def check_recipe(recipe: Recipe, force: bool) -> None:
    """Check the name and the folder of a new environment.

    Raises:
        SetupError: the name is wrong or taken, the folder is not empty, or the disk is too full.
    """
    folder = recipe.folder
    if not re.fullmatch(r"\w[\w.-]*", recipe.name) or recipe.name == "this":
        raise SetupError(
            "--name must be of letters, digits, `_`, `-` and `.`, and not 'this', which is the interpreter "
            f"of the command itself, but is '{recipe.name}' instead."
        )
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and not (folder / "pyvenv.cfg").is_file():
        raise SetupError(
            f"{folder} must be a new folder, but holds something other than a virtual environment. Name "
            "another folder: --path"
        )
    if not force and taken:
        raise SetupError(
            f"{folder} must be a new folder, but holds an environment already. Add --force to replace it, "
            "or name another one: --name"
        )
    recorded = records().get(recipe.name)
    if not force and recorded is not None and Path(recorded).is_file():
        raise SetupError(
            f"An environment named '{recipe.name}' is recorded already: {recorded}. Add --force to replace "
            "it, or name this one otherwise: --name"
        )
    if problem := folder_problem(folder):
        raise SetupError(f"{folder} must be a folder that can be made, but {problem}")
    needed = _DISK_GIB.get(recipe.kind)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free / GIB
    if needed is not None and free < needed:
        raise SetupError(
            f"{existing} must have about {needed:g} GiB free for torch's {recipe.kind} build, but has "
            f"{free:.1f} GiB. Free some space, or choose another disk: --path"
        )


def create(
    recipe: Recipe, show_command: Callable[[tuple[str, ...]], None], show_line: Callable[[str], None]
) -> TorchBuild:
    """Make an environment and record it; an old environment is deleted once the new one is complete.

    Args:
        show_command: gets each command before it runs.
        show_line: gets each line that a command prints.

    Raises:
        SetupError: a command failed, or the environment has another torch. The new environment is deleted
            then, and not recorded.
    """
    folder = recipe.folder
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    log = home() / "envs" / f"{recipe.name}.log"
    for path in (folder.parent, log.parent):
        path.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(old)
    try:
        log.write_text("", encoding="utf-8")
        for number, command in enumerate(recipe.commands):
            show_command(command)
            try:
                _run(command, log, show_line)
            except SetupError as error:
                raise SetupError(f"{error}{_hint(recipe) if number == 1 else ''}") from None
        build = _verified(recipe)
        record(recipe.name, recipe.python)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return build


def typed(command: tuple[str, ...]) -> str:
    """Return a command as the user would type it."""
    if sys.platform == "win32":
        return subprocess.list2cmdline(command)
    import shlex

    return shlex.join(command)


def _run(command: tuple[str, ...], log: Path, show_line: Callable[[str], None]) -> None:
    # The new environment must not see a clone on PYTHONPATH, nor the environment of this process.
    removed = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    last: deque[str] = deque(maxlen=TAIL)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {typed(command)}\n")
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
            )
        except OSError as error:
            raise SetupError(f"{command[0]} cannot be started: {error.strerror or error}.") from error
        with process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    file.write(line)
                    last.append(line.rstrip())
                    show_line(line.rstrip())
            except BaseException:
                process.kill()
                raise
    if process.returncode != 0:
        lines = "\n".join(f"  {line}" for line in last)
        raise SetupError(
            f"This command failed with exit code {process.returncode}:\n  {typed(command)}\n"
            f"Its last lines:\n{lines}\nAll of them: {log}"
        )


def _hint(recipe: Recipe) -> str:
    """Return what to try if torch itself could not be installed."""
    wheel = recipe.wheel
    where = (
        f" If {wheel.index} cannot be reached from here, name a mirror of it: --index." if wheel.index else ""
    )
    return f"\nIs there a torch {wheel.version} for this system and Python? Other versions: --torch.{where}"


def _verified(recipe: Recipe) -> TorchBuild:
    """Return the torch build of the environment.

    Raises:
        SetupError: it has no torch, or a build of another kind.
    """
    (build,) = read_builds([str(recipe.python)])
    expected = KINDS[recipe.kind]
    if build.problem is not None:
        raise SetupError(f"{recipe.python} must have torch, but cannot be used: {build.problem}.")
    if build.kind != expected and (expected, build.kind) != ("cpu", "mps"):
        raise SetupError(
            f"{recipe.python} must have a torch built for {recipe.kind}, but has {build.version}, which is "
            f"built for {build.kind}. See --torch and --index."
        )
    return build
