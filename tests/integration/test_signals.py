"""Case 49: whatever ends the launcher, nothing of its run is left: no process, no port, no shared memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import slow_data
from launched import TINY, TRAIN, Launched, wait_for

from hetexp.checkpoint.manifest import search_checkpoint, step_of

LIMIT_SECONDS = 10.0
ENDLESS = (
    *(option for option in TINY if not option.startswith("data")),
    "data=custom",
    "data._target_=slow_data.Slow",
    "trainer.max_steps=1000000",
    "trainer.checkpoint_every=2",
)
FORKED = "launch.start_method=forkserver"
IGNORING = ("sh", "-c", 'trap "" INT HUP; exec "$@"', "sh")
"""What `nohup` and a `&` in a script do to a run."""


def checkpoints_of(run: Launched) -> list[Path]:
    return list(run.run_dir.glob("checkpoints/step_*"))


class Runs(dict[str, Launched]):
    """Runs side by side, by name."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def start(self, name: str, *overrides: str, **options: object) -> None:
        path = {"PYTHONPATH": os.pathsep.join([str(Path(slow_data.__file__).parent), str(TRAIN.parent)])}
        folder = self._folder / name
        self[name] = Launched(folder, *ENDLESS, *overrides, environment=path, **options)  # type: ignore[arg-type]

    def wait_until_training(self) -> None:
        for run in self.values():
            run.wait_until_training()
            # A save goes on in the background while the run trains.
            wait_for(partial(checkpoints_of, run), f"a checkpoint of {run.run_dir}")

    def are_gone(self) -> None:
        """Check what must be true some seconds after every launcher got its signal."""

        def left() -> dict[str, list[psutil.Process]]:
            return {name: processes for name, run in self.items() if (processes := run.processes())}

        wait_for(lambda: not left(), f"the end of {left()}", LIMIT_SECONDS)
        for name, run in self.items():
            assert run.port_refuses(), name
            assert search_checkpoint(run.run_dir)[0].is_dir(), name

    def ended_by(self, name: str, number: signal.Signals, saved: bool = True) -> None:
        """Check what the launcher said at its end.

        Args:
            saved: whether the ranks saved a last checkpoint.
        """
        run = self[name]
        assert run.wait() == 128 + number, run.screen
        assert run.summary["status"] == "interrupted"
        assert run.summary["error"] == f"stopped by {number.name}"
        newest = search_checkpoint(run.run_dir)[0]
        assert run.summary["checkpoint"] == str(newest)
        if saved:
            assert run.summary["steps"] == step_of(newest) == run.steps()
        assert f"Stopped by {number.name}" in run.screen
        assert "Traceback" not in run.screen


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path)
    yield started
    for run in started.values():
        run.kill()


def test_in_a_terminal(runs: Runs) -> None:
    runs.start("int", terminal=True)
    runs.start("term", FORKED, terminal=True)
    tracker = "wandb" if find_spec("wandb") is not None else "none"  # its service is a process that must go
    runs.start("kill", f"logger={tracker}", terminal=True)
    runs.wait_until_training()
    os.write(runs["int"].keyboard, b"\x03")  # Ctrl-C
    runs["term"].process.terminate()
    runs["kill"].process.kill()
    runs.are_gone()
    runs.ended_by("int", signal.SIGINT)
    runs.ended_by("term", signal.SIGTERM)
    assert runs["kill"].wait() == -signal.SIGKILL
    assert not (runs["kill"].run_dir / "summary.json").exists()


def test_with_sigint_ignored(runs: Runs) -> None:
    runs.start("term", FORKED, prefix=IGNORING)
    runs.start("kill", prefix=IGNORING)
    runs.wait_until_training()
    goes_on = runs["term"]
    goes_on.process.send_signal(signal.SIGINT)
    goes_on.process.send_signal(signal.SIGHUP)
    goes_on.wait_until_training(goes_on.steps() + 5)  # what was to be ignored stays ignored
    goes_on.process.terminate()
    runs["kill"].process.kill()
    runs.are_gone()
    runs.ended_by("term", signal.SIGTERM)


def test_with_data_loader_processes(runs: Runs) -> None:
    runs.start("hangup", FORKED, "trainer.num_workers=2")
    # Processes that will never look whether their rank still lives.
    runs.start("kill", "trainer.num_workers=2", "+data.hang_after=60")
    runs.wait_until_training()
    for run in runs.values():
        assert len(run.processes()) >= 1 + 2 + 4
    runs["hangup"].process.send_signal(signal.SIGHUP)
    runs["kill"].process.kill()
    runs.are_gone()
    runs.ended_by("hangup", signal.SIGHUP)


def test_a_rank_that_does_not_listen(runs: Runs) -> None:
    runs.start("kill")
    runs.start("kill-forked", FORKED)
    runs.start("int-twice", FORKED, "fault.survive=false")  # else it would be taken out as frozen
    runs.wait_until_training()
    for run in runs.values():
        run.ranks()[1].suspend()
    runs["kill"].process.kill()
    runs["kill-forked"].process.kill()
    impatient = runs["int-twice"]
    impatient.process.send_signal(signal.SIGINT)
    wait_for(lambda: "a second signal ends it at once" in impatient.screen, "the wait for a checkpoint")
    impatient.process.send_signal(signal.SIGINT)
    runs.are_gone()
    runs.ended_by("int-twice", signal.SIGINT, saved=False)
