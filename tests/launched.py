"""Runs as a person starts them: `python train.py …` as processes of their own, found again by a mark."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

import hetexp

TRAIN = Path(hetexp.__file__).resolve().parent.parent / "train.py"
MARK = "HETEXP_TEST_RUN"
DEADLINE_SECONDS = 100.0
"""For what must happen some time, however busy the machine is."""
TINY = (
    "model=mlp",
    "model.hidden_sizes=[8]",
    "data=synthetic",
    "data.num_samples=64",
    "data.num_test_samples=8",
    "logger=none",
    "diagram=false",
    "monitor=none",
    "sweep.report=false",
    "hardware.devices=[cpu,cpu]",
    "hardware.threads_per_rank=1",
    "trainer.global_batch_size=16",
    "trainer.max_epochs=null",
    "trainer.log_every=1",
)
T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, seconds: float = DEADLINE_SECONDS) -> T:
    """Return the first true value of `condition`, asked again and again until the deadline."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        pause.wait(0.02)
    return value


def _as_in_a_shell() -> None:
    """Undo what the tests themselves may have been started with: `&` and nohup ignore these signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Launched:
    """`python train.py` under way.

    Args:
        folder: where it is started; its output is in `screen.txt` there.
        overrides: after `train.py`.
        environment: variables to set.
        prefix: put before the command, as `nohup` is.
        terminal: give it a terminal of its own.
    """

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        environment: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        terminal: bool = False,
        run_dir: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir or folder / "run"
        self.mark = f"{os.getpid()}-{os.urandom(6).hex()}"
        self._screen = folder / "screen.txt"
        # Equal shares unless the test says otherwise: nothing is measured first, and nobody left out.
        shares = [] if any(text.startswith("balancing=") for text in overrides) else ["balancing=equal"]
        self._command = [*prefix, sys.executable, str(TRAIN), *overrides, *shares]
        if run_dir is None and not {"-m", "--multirun"} & set(overrides):
            self._command.append(f"hydra.run.dir={self.run_dir}")
        self._options: dict[str, Any] = {
            "cwd": folder,
            "env": {**os.environ, MARK: self.mark, **(environment or {})},
            "start_new_session": True,
        }
        self._terminal = terminal
        self._start()

    def _start(self) -> None:
        with self._screen.open("wb") as screen:
            if not self._terminal:
                self.process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=screen,
                    stderr=subprocess.STDOUT,
                    preexec_fn=_as_in_a_shell,
                    **self._options,
                )
                return
        master, slave = pty.openpty()
        # A shell makes the terminal its session's own before it becomes the run.
        shell = ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(slave), *self._command]
        self.process = subprocess.Popen(
            shell, stdin=slave, stdout=slave, stderr=slave, preexec_fn=_as_in_a_shell, **self._options
        )
        os.close(slave)
        self.keyboard = master
        threading.Thread(target=self._copy_terminal, args=(master,), daemon=True).start()

    def _copy_terminal(self, master: int) -> None:
        with self._screen.open("ab", buffering=0) as screen:
            try:
                while text := os.read(master, 65536):
                    screen.write(text)
            except OSError:  # Linux reports the end of a terminal so
                pass
        os.close(master)

    @property
    def screen(self) -> str:
        return self._screen.read_text(errors="replace")

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return loaded

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def processes(self) -> list[psutil.Process]:
        """Return every living process of the run, however it was started."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get(MARK) == self.mark
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def ranks(self) -> list[psutil.Process]:
        """Return the process of each rank: the leader of a group, with a log as its output."""
        logs = {self.run_dir / "logs" / f"rank_{rank}.log": rank for rank in range(8)}
        by_rank = {}
        for process in self.processes():
            try:
                target = Path(f"/proc/{process.pid}/fd/1").readlink()
                if target in logs and os.getpgid(process.pid) == process.pid:
                    by_rank[logs[target]] = process
            except OSError:
                continue
        return [by_rank[rank] for rank in sorted(by_rank)]

    def steps(self) -> int:
        """Return how many steps `metrics.jsonl` tells of."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().count("train/loss") if path.exists() else 0

    def wait_until_training(self, steps: int = 3) -> None:
        def trains() -> bool:
            assert self.process.poll() is None, f"ended too early:\n{self.screen}"
            return self.steps() >= steps

        wait_for(trains, f"{steps} steps of {self.run_dir}\n{self.screen}")

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Return the exit code of the launcher."""
        return self.process.wait(seconds)

    def port_refuses(self) -> bool:
        """Tell whether nobody answers any more where the run's store was."""
        plan = json.loads((self.run_dir / "plan.json").read_text())
        with socket.socket() as client:
            return client.connect_ex((plan["store_host"], plan["store_port"])) != 0

    def kill(self) -> None:
        """End what is left, for a test that failed."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.processes():
            process.kill()
