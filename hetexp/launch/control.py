"""Commands to a running training: a file in its run folder for each command, and one for its answer.

No port is opened. Only the owner of the run folder can write there. The files are JSON of limited size, and
files of other users are refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from hetexp.core.errors import SetupError, UsageError, must_be
from hetexp.core.files import write_json

FOLDER = "control"
LARGEST_BYTES = 16 * 1024
"""Largest file of a command."""
POLL_SECONDS = 0.05
_LOCK = ".running"
_ID = re.compile(r"[0-9a-f]{8,64}")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_ANSWER = ".answer.json"


@dataclass(frozen=True)
class Command:
    """A command of the user."""

    id: str
    name: str
    """`add`, `drop`, or the name of a `hetexp.core.epoch.Request`."""
    argument: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to a command."""

    done: bool
    text: str
    """What was done, or why not."""


class ControlServer:
    """Receives and answers commands in the launcher. While it is open, the run counts as running."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._lock = FileLock(self._folder / _LOCK)

    def __enter__(self) -> ControlServer:
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            self._folder.chmod(0o700)
        self._lock.acquire(timeout=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for command in self.commands():
            self.answer(command, Answer(False, "The run has ended."))
        self._lock.release()
        with contextlib.suppress(OSError):
            (self._folder / _LOCK).unlink()
            self._folder.rmdir()  # unless an answer waits there to be read

    def commands(self) -> list[Command]:
        """Return the commands since the last call, the oldest first."""
        commands = []
        for path in sorted(self._folder.glob("*.json"), key=_written_at):
            if path.name.endswith(_ANSWER):
                continue
            name = path.name.removesuffix(".json")
            if _ID.fullmatch(name):
                command = _read(path, name)
                if isinstance(command, Command):
                    commands.append(command)
                else:
                    self.answer(Command(name, ""), Answer(False, command))
            with contextlib.suppress(OSError):
                path.unlink()
        return commands

    def answer(self, command: Command, answer: Answer) -> None:
        """Write the answer to a command; a full disk does not stop the training."""
        with contextlib.suppress(OSError):
            write_json(self._folder / f"{command.id}{_ANSWER}", asdict(answer), durable=False)


def _written_at(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:  # an answer that was fetched meanwhile
        return 0


def _read(path: Path, name: str) -> Command | str:
    """Return the command in a file, or what is wrong with it."""
    try:
        # Follows no link to another user's file, and does not wait for the writer of a pipe.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with os.fdopen(os.open(path, flags), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode) or (hasattr(os, "getuid") and facts.st_uid != os.getuid()):
                return "A command must be a plain file of the run's own user."
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        return f"The command cannot be read: {error.strerror}."
    if len(content) > LARGEST_BYTES:
        return f"A command must have at most {LARGEST_BYTES} bytes."
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError):
        return "A command must be JSON."
    raw = raw if isinstance(raw, dict) else {}
    command, argument = raw.get("command"), raw.get("argument", "")
    if not isinstance(command, str) or not _NAME.fullmatch(command) or not isinstance(argument, str):
        return (
            "A command must have a `command` of small letters, digits, - and _, and maybe a text `argument`."
        )
    return Command(name, command, argument)


def ask(run_dir: Path, command: str, argument: str = "") -> Answer:
    """Send a command to a running training, and wait for the answer while it runs.

    Raises:
        UsageError: the command has no valid name.
        SetupError: the folder is no run, its run is over, or it belongs to another user.
    """
    if not _NAME.fullmatch(command):
        raise UsageError(must_be("NAME", "of small letters, digits, - and _", command))
    if not (run_dir / "plan.json").exists():
        raise SetupError(must_be("RUN", "the folder of a run (it has a plan.json)", str(run_dir)))
    folder, name = run_dir / FOLDER, secrets.token_hex(8)
    _check_runs(run_dir)
    try:
        write_json(folder / f"{name}.json", {"command": command, "argument": argument}, durable=False)
    except OSError as error:
        raise SetupError(
            f"The run {run_dir} cannot be asked: {folder} {error.strerror}. Only its user may."
        ) from error
    path, pause = folder / f"{name}{_ANSWER}", threading.Event()
    while not path.exists():
        if not _runs(run_dir) and not path.exists():
            (folder / f"{name}.json").unlink(missing_ok=True)
            raise SetupError(f"The run {run_dir} has ended before it answered.")
        pause.wait(POLL_SECONDS)
    answer = Answer(**json.loads(path.read_text(encoding="utf-8")))
    path.unlink()
    return answer


def _check_runs(run_dir: Path) -> None:
    if _runs(run_dir):
        return
    ended = (run_dir / "summary.json").exists()
    state = "is over" if ended else "is not running: nothing answers there, and it has no summary"
    raise SetupError(f"The run {run_dir} {state}.")


def _runs(run_dir: Path) -> bool:
    path = run_dir / FOLDER / _LOCK
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # another user's
        return True
    lock.release()
    return False


def find_run(text: str, here: Path) -> Path:
    """Return the folder of a run, from its path or from the name of its folder below `outputs`.

    Raises:
        SetupError: there is no such run, or there are several.
    """
    given = here / text
    if given.is_dir() or len(Path(text).parts) > 1:
        return given
    runs = [path.parent for path in (here / "outputs").glob(f"**/{text}/plan.json")]
    if len(runs) == 1:
        return runs[0]
    fix = f"It is the name of {len(runs)} runs: name its path." if runs else ""
    raise SetupError(must_be("RUN", "the folder of a run, or its name below outputs", text, fix))
