"""Environments for other vendors' torch: made, and recorded in `$HETEXP_HOME/environments.json`.

A build of torch drives one vendor, so that a machine with cards of two needs two interpreters. Detection
reads the record and gives each card the interpreter that drives it (`hetexp.hardware.detection.builds`).
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
"""Lines of a failed command that are shown; all of them are in the log."""
_ROOM_GIB = {"cuda": 6.0, "rocm": 16.0, "cpu": 1.2}
"""What an environment takes on the disk, about: torch 2.13 or 2.14 with all that it needs."""


@dataclass(frozen=True)
class Recipe:
    """How an environment is made."""

    name: str
    kind: str
    """A key of `hetexp.launch.environments.wheels.KINDS`."""
    folder: Path
    wheel: Wheel
    commands: tuple[tuple[str, ...], ...]

    @property
    def python(self) -> Path:
        """The interpreter that it will have."""
        return interpreter_in(self.folder)


# ---------------------------------------------------------------- the record


def records() -> dict[str, str]:
    """Return name → interpreter of every recorded environment, those included that are gone."""
    try:
        raw = json.loads(_record_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(python) for name, python in raw.items()} if isinstance(raw, dict) else {}


def record(name: str, python: Path) -> None:
    """Write an environment down, so that detection finds it."""
    path = _record_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, records() | {name: str(python)})


def _record_path() -> Path:
    return home() / "environments.json"


def interpreter_in(folder: Path) -> Path:
    """Return where a virtual environment has its interpreter."""
    return folder / "Scripts" / "python.exe" if sys.platform == "win32" else folder / "bin" / "python"


def version_of(python: str) -> str | None:
    """Return the Python version of a virtual environment as it says itself, without starting it."""
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
    """Return the commands that make an environment; nothing is run.

    Args:
        name: in the record; the kind by default.
        folder: of the environment; in `$HETEXP_HOME/envs` by default.
        python: interpreter that it is made of; this process's own by default.
        uv: path of uv, which then does what venv and pip do.
    """
    name = name or kind
    folder = (folder or home() / "envs" / name).absolute()
    base, own = python or sys.executable, str(interpreter_in(folder))
    create: tuple[str, ...]
    install: tuple[str, ...]
    index = [] if wheel.index is None else ["--index" if uv else "--extra-index-url", wheel.index]
    if uv is not None:
        create = (uv, "venv", "--seed", "--python", base, str(folder))
        install = (uv, "pip", "install", "--python", own)
    else:
        create = (base, "-m", "venv", str(folder))
        # One retry: pip asks each index for each package, and where PyTorch's cannot be reached it would
        # spend seconds on each of torch's dozen needs. Not compiled in advance: uv does not do it, either.
        install = (own, "-m", "pip", "install", "--no-input", "--disable-pip-version-check")
        install += ("--no-compile", "--retries", "1")
    return Recipe(
        name,
        kind,
        folder,
        wheel,
        (
            create,
            (*install, *index, wheel.requirement),
            # torch is named again, so that nothing can put another build in its place.
            (*install, *package_source(), wheel.requirement),
        ),
    )


def package_source() -> tuple[str, ...]:
    """Return what an installer is given for this hetexp: the clone, what it came from, or its version."""
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
    """Tell whether pip is configured to look elsewhere than on PyPI; uv does not read that."""
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
    """Check that an environment can be made where it is to be.

    Raises:
        SetupError: something is there already, or there is no room.
    """
    folder = recipe.folder
    if not re.fullmatch(r"\w[\w.-]*", recipe.name) or recipe.name == "this":
        raise SetupError(
            "--name must be of letters, digits, `_`, `-` and `.`, and not 'this', which is the interpreter "
            f"of the command itself, but is '{recipe.name}' instead."
        )
    there = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if there and not (folder / "pyvenv.cfg").is_file():
        raise SetupError(
            f"{folder} must be a new folder, but holds something that is no virtual environment. Name "
            "another one: --path"
        )
    if not force and there:
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
    room = _ROOM_GIB.get(recipe.kind)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free / GIB
    if room is not None and free < room:
        raise SetupError(
            f"{existing} must have about {room:g} GiB free for torch's {recipe.kind} build, but has "
            f"{free:.1f} GiB. Free some space, or choose another disk: --path"
        )


def create(
    recipe: Recipe, tell: Callable[[tuple[str, ...]], None], show: Callable[[str], None]
) -> TorchBuild:
    """Make an environment and record it; what was there before stays until the new one is whole.

    Args:
        tell: called with each command before it runs.
        show: called with each line that a command prints.

    Raises:
        SetupError: a command failed, or the environment has not the torch that it should have. Nothing is
            recorded then, and nothing of it is left.
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
            tell(command)
            try:
                _run(command, log, show)
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
    """Return a command as a person would type it."""
    if sys.platform == "win32":
        return subprocess.list2cmdline(command)
    import shlex

    return shlex.join(command)


def _run(command: tuple[str, ...], log: Path, show: Callable[[str], None]) -> None:
    # Neither a clone on PYTHONPATH nor the environment that this process is in may get into the new one.
    leftovers = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in leftovers}
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
                    show(line.rstrip())
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
    """Return what to try where torch itself could not be installed."""
    wheel = recipe.wheel
    where = (
        f" If {wheel.index} cannot be reached from here, name a mirror of it: --index." if wheel.index else ""
    )
    return f"\nIs there a torch {wheel.version} for this system and Python? Other versions: --torch.{where}"


def _verified(recipe: Recipe) -> TorchBuild:
    """Return the build that the environment has.

    Raises:
        SetupError: it has none, or one of another kind.
    """
    (build,) = read_builds([str(recipe.python)])
    wanted = KINDS[recipe.kind]
    if build.problem is not None:
        raise SetupError(f"{recipe.python} must have torch, but cannot be used: {build.problem}.")
    if build.kind != wanted and (wanted, build.kind) != ("cpu", "mps"):
        raise SetupError(
            f"{recipe.python} must have a torch built for {recipe.kind}, but has {build.version}, which is "
            f"built for {build.kind}. See --torch and --index."
        )
    return build
