"""The process of one rank: it reads the plan, builds its objects and trains. Only the launcher starts it."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import math
import os
import platform
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hetexp.comm.connections.lost import is_peer_lost
from hetexp.core import start_up
from hetexp.core.config import Config, read_config
from hetexp.core.epoch import SignedStore
from hetexp.core.errors import ConfigError, HetexpError, StartRefusedError, UsageError
from hetexp.core.files import no_room, write_json
from hetexp.core.plan import Plan
from hetexp.core.streams import write_utf8
from hetexp.launch.elastic.heartbeat import beat, show_stack_on_request
from hetexp.launch.elastic.membership import device_trouble
from hetexp.launch.launcher import CALIBRATION, READY
from hetexp.launch.preflight import check_checkpoint_space, checkpoint_bytes
from hetexp.launch.processes.failure import (
    NO_ROOM,
    RankFailure,
    log_path,
    stack_path,
    traceback_path,
    write_failure,
)
from hetexp.launch.processes.parent_death import die_with_parent, end_with_launcher
from hetexp.launch.processes.process import LAUNCHER_PID, RUN_SECRET
from hetexp.launch.processes.spare import wait_for_order

HURRIED_SECONDS = 0.5
"""Longest wait for a save under way if the others wait for this rank's end to go on without it."""

if TYPE_CHECKING:
    from hetexp.library.setup import Launched
    from hetexp.training.recovery.rank_recovery import RankRecovery
    from hetexp.training.state import Progress, TrainState


def main() -> None:
    """Run one rank as a process of its own."""
    parser = argparse.ArgumentParser(description="One rank of a hetexp run; the launcher starts it.")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--member", type=int, help="number of a process that joins a training under way")
    parser.add_argument("--spare", type=Path, help="plan of the run in which the process waits to be a rank")
    arguments = parser.parse_args()
    plan, rank, member = arguments.plan, arguments.rank, arguments.member
    if arguments.spare is not None:
        plan, rank, member = wait_for_order(arguments.spare)
    end_with_launcher(lambda: os.read(sys.stdin.fileno(), 1))
    die_with_parent(int(os.environ[LAUNCHER_PID]))
    run_rank(plan, rank, member)


def run_rank(plan_path: Path, rank: int, member: int | None = None) -> NoReturn:
    """Run the rank and end this process; a failure is written beside the rank's log.

    Args:
        rank: in the plan.
        member: number of a process that joins a training under way; `None` at a run's beginning.
    """
    write_utf8()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides, also at a shared terminal
    plan = Plan.read(plan_path)
    number = rank if member is None else member
    path = log_path(Path(plan.run_dir), number)
    show_stack_on_request(stack_path(path))
    logging.basicConfig(
        level=logging.INFO, format=f"[rank {rank} %(levelname)s] %(message)s", stream=sys.stdout
    )
    sys.path += [path for path in plan.import_paths if path not in sys.path]
    job = _Rank(plan, rank, member) if plan.script is None else _ScriptRank(plan, rank)
    try:
        job.run()
        end(0)
    except _Terminated:
        job.close(1 if job.waits else 143)
        end(143)
    except StartRefusedError as error:  # a failure of another rank, which reports it
        print(error, flush=True)
        job.close(1)
        end(0)
    except (Exception, SystemExit) as error:  # the launcher must learn of any error
        text = traceback.format_exc()
        with contextlib.suppress(OSError):  # a full disk may be what ends this rank
            if isinstance(error, ConfigError):  # the screen, which shows the log, gets the sentence alone
                traceback_path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
            else:
                print(text, flush=True)
        full = no_room(error, Path(plan.run_dir))
        failure = RankFailure(
            rank=number,
            kind=type(error).__name__,
            message=full or (str(error) if isinstance(error, HetexpError) else text),
            step=job.step,
            peer_lost=is_peer_lost(error),
            time=time.time(),
        )
        code = 1
        try:
            write_failure(path, failure)
        except OSError as unwritten:
            code = NO_ROOM if no_room(unwritten, Path(plan.run_dir)) else 1
        if survived(job, failure):
            job.hurry()
        job.close(code)
        end(code)


def survived(job: _Rank | _ScriptRank, failure: RankFailure) -> bool:
    """Return whether the others go on without this rank, and wait for its end."""
    return job.survives and not failure.peer_lost and device_trouble(failure, 1) is not None


def take_part(plan: Plan, rank: int) -> None:
    """Run one rank in this process, which another engine has started and which goes on afterwards.

    The rank's objects live until the process ends. Only the memory of its device is freed before.

    Raises:
        Exception: the error that ended the rank; its loggers and its save are closed by then.
    """
    job = _Rank(plan, rank)
    _finished_ranks.append(job)
    try:
        job.run()
    except _Terminated:
        job.close(143)
        raise
    except Exception:
        job.close(1)
        raise
    finally:
        job.end_threads()
    if plan.measuring and job.state is not None:
        for parameter in job.state.model.parameters():
            parameter.data, parameter.grad = parameter.data.new_empty(0), None
        job.state.optimizer.state.clear()


_finished_ranks: list[_Rank] = []
"""Kept, since destroying a process group is not safe while this process lives (see `end`)."""


def terminated_on_request() -> None:
    """Let SIGTERM end the rank of this process in order, as `run_rank` does."""
    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        signal.signal(signal.SIGTERM, _leave)


def keep_from_ending() -> None:
    """Ignore SIGTERM from now on: this process is about to end by itself."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end(exit_code: int) -> NoReturn:
    """End this process while the model and the process group are still alive.

    To destroy them is not safe: DDP's reducer joins gloo's thread while it holds the interpreter lock, for
    which that thread may be waiting (torch 2.13). The interpreter's own exit would join threads of a group
    whose peers are gone.
    """
    if exit_code == 0:
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def num_checkpoints(config: Config, done: int, total_steps: int) -> int:
    """Return how many checkpoints a run writes after `done` of its steps, one after the last included."""
    every = config.trainer.checkpoint_every
    if config.trainer.fast_dev_run:
        return total_steps // every - done // every if every else 0
    return math.ceil(total_steps / every) - done // every if every else 1


def most_checkpoints(config: Config, done: int, total_steps: int) -> int:
    """Return the most checkpoints of the steps after `done` that exist at one time."""
    from hetexp.checkpoint.rotation import KEPT_TIMED

    trainer, count = config.trainer, num_checkpoints(config, done, total_steps)
    # A new one is written before an older one goes.
    if trainer.checkpoint_minutes and not trainer.fast_dev_run:
        count = max(count, min(total_steps - done, KEPT_TIMED + 1))
    return min(count, trainer.keep_last + trainer.keep_best + 1) if trainer.keep_last else count


class _Terminated(SystemExit):
    """Raised by SIGTERM: the launcher asked this rank to end. A user's code may raise `SystemExit`, too."""


def _leave(*_: object) -> None:
    raise _Terminated(143)


def _take_secret() -> str:
    """Return the run's secret, which the processes that this rank starts do not get."""
    return os.environ.pop(RUN_SECRET, "")


class _Rank:
    """The objects of one rank, in the order in which it builds them.

    Args:
        member: number of a process that joins a training under way; `None`: all begin together.
    """

    def __init__(self, plan: Plan, rank: int, member: int | None = None) -> None:
        self.plan, self.rank = plan, rank
        self.newcomer, self.member = member is not None, rank if member is None else member
        self.state: TrainState | None = None  # held until the process ends, see `end`
        self.progress: Progress | None = None
        self._launcher_stamps = "[]"
        self._secret = _take_secret()
        self._recovery: RankRecovery | None = None
        self._save_seconds: float | None = None
        """Longest wait for a save under way at the end; `None`: `fault.stop_seconds`."""

    @property
    def step(self) -> int | None:
        """Steps so far, `None` before training."""
        return self.progress.step if self.progress else None

    @property
    def survives(self) -> bool:
        """Whether the others go on if this rank's device fails."""
        return self.state is not None and self.state.survives

    def hurry(self) -> None:
        """Do not wait for this rank's save: the others go on and save again."""
        self._save_seconds = HURRIED_SECONDS

    @property
    def waits(self) -> bool:
        """Whether this rank has lost another one, and would go on if it could."""
        return self.state is not None and self.state.doing == "waiting"

    def run(self) -> None:
        """Meet the other ranks, agree with them, train (or only measure), report."""
        from hetexp.comm.rendezvous import connect_store
        from hetexp.training.measuring.calibrate import calibrate
        from hetexp.training.measuring.warmup_calibration import calibrate_time_scale
        from hetexp.training.recovery.rank_recovery import RankRecovery
        from hetexp.training.saving.resuming import resume
        from hetexp.training.state import Progress
        from hetexp.training.wiring import build_newcomer, build_state, start_loggers

        start_up.ended("rank 0: imports")
        config = read_config(self.plan.config)
        store = connect_store(self.plan.store_host, self.plan.store_port, config.launch.timeout_seconds)
        store.set(f"hello/{self.member}", platform.node())
        self._recovery = recovery = RankRecovery(store, self.member, self._secret)
        signed = SignedStore(store, self._secret)
        if self.newcomer:
            state = build_newcomer(self.plan, config, self.rank, self.member, store)
            self.state, self.progress = state, Progress()
            self._train(recovery)
            return
        group = store if self.plan.measuring else recovery.store
        self.state = state = build_state(self.plan, config, self.rank, group)
        start_up.ended("rank 0: data and model")
        state.time_scale = calibrate_time_scale(state)
        start_up.ended("rank 0: pace of emulation")
        if self.plan.measuring:
            if self.rank == 0:
                signed.write(READY, "0")
            measured = calibrate(state, store)
            start_up.ended("rank 0: measuring")
            if self.rank == 0:
                signed.write(start_up.KEY, start_up.own())
                write_json(Path(self.plan.run_dir) / CALIBRATION, measured)
            state.communicator.close()
            return
        self.progress = resume(state)
        needed = state.engine.checkpoint_bytes(checkpoint_bytes(state.model, state.optimizer))
        if self.rank == 0:
            count = most_checkpoints(config, self.progress.step, state.total_steps)
            check_checkpoint_space(state.checkpoints, needed, count)
            state.loggers = start_loggers(state)
            signed.write(READY, str(state.total_steps))
            self._launcher_stamps = signed.read(start_up.KEY) or "[]"  # another engine's ranks have none
        start_up.ended("rank 0: loggers")
        self._train(recovery)

    def _train(self, recovery: RankRecovery) -> None:
        """Train to the end, or until the others go on without this rank, and report."""
        from hetexp.training.loop import Outcome, train
        from hetexp.training.measuring.result import report
        from hetexp.training.recovery.rank_recovery import DismissedError

        state, progress, started = self.state, self.progress, time.perf_counter()
        assert state is not None
        assert progress is not None
        state.survives = state.config.fault.survive and self.plan.reforms and state.strategy.reforms
        self._start_heartbeat(state.config)
        recovery.start()
        if self.newcomer:
            recovery.prepare()
        summary: dict[str, Any] = {}

        def conclude(outcome: Outcome) -> None:
            assert state is not None
            summary.update(report(state, recovery.store, outcome, time.perf_counter() - started))
            summary["start_up"] = start_up.stages(self._launcher_stamps)

        try:
            train(state, progress, recovery, not self.newcomer, conclude)
        except DismissedError as error:
            print(f"{error}.", flush=True)
            self.close(0)
            return
        self.close(0, summary)
        if state.rank == 0:
            write_json(Path(self.plan.run_dir) / "summary.json", summary)
        state.communicator.close()

    def _start_heartbeat(self, config: Config) -> None:
        """Report to the launcher from now on that this rank lives, and how far it is."""
        from hetexp.comm.rendezvous import connect_store

        if not config.fault.survive:
            return
        store = connect_store(self.plan.store_host, self.plan.store_port, config.launch.timeout_seconds)

        def status() -> tuple[int | None, str]:
            return self.step, self.state.doing if self.state is not None else ""

        beat(SignedStore(store, self._secret), self.member, config.fault.heartbeat_seconds, status)

    def close(self, exit_code: int, summary: dict[str, Any] | None = None) -> None:
        """End a save that is under way and close the loggers; safe to call at any time and twice."""
        if self.state is None:
            return
        limit = self.state.config.fault.stop_seconds
        self.state.saver.leave(limit if self._save_seconds is None else self._save_seconds)
        loggers, self.state.loggers = self.state.loggers, ()
        for logger in loggers:
            # After a failure this rank must end even if its logger fails: the disk may be full.
            with contextlib.suppress(OSError) if exit_code else contextlib.nullcontext():
                logger.finish(summary or {}, exit_code)

    def end_threads(self) -> None:
        """End the threads of this rank, whose process goes on afterwards."""
        from hetexp.training.group import LEAVE_SECONDS

        if self._recovery is not None:
            self._recovery.stop()
        if self.state is not None:
            self.state.hook.close(LEAVE_SECONDS)


class _ScriptRank:
    """One rank's run of the user's own script, which calls `hetexp.setup`."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.launched: Launched | None = None

    @property
    def step(self) -> int | None:
        """Steps so far, `None` before `setup`."""
        run = self.launched.run if self.launched is not None else None
        return run.step if run is not None else None

    @property
    def survives(self) -> bool:
        """Whether the others go on if this rank's device fails: a script's loop does not."""
        return False

    def hurry(self) -> None:
        """Do nothing: a script's rank saves nothing in the background."""

    @property
    def waits(self) -> bool:
        """Whether this rank has lost another one, and would go on if it could: a script's loop does not."""
        return False

    def run(self) -> None:
        """Meet the other ranks, run the script as `python` would, and report.

        Raises:
            UsageError: the script ended before its `setup`, or with an exit code of its own.
        """
        from hetexp.comm.rendezvous import connect_store
        from hetexp.library.setup import Launched, begin_as
        from hetexp.training.seeding import seed_all

        assert self.plan.script is not None
        config = read_config(self.plan.config)
        limit = config.launch.timeout_seconds
        store = connect_store(self.plan.store_host, self.plan.store_port, limit)
        store.set(f"hello/{self.rank}", platform.node())
        signed = SignedStore(store, _take_secret())
        self.launched = Launched(self.plan, self.rank, store, lambda: signed.write(READY, "0"))
        begin_as(self.launched)
        sys.argv = [self.plan.script, *self.plan.script_arguments]
        sys.path.insert(0, str(Path(self.plan.script).parent))
        seed_all(config.trainer.seed)  # every rank draws the same split, until `setup`
        try:
            runpy.run_path(self.plan.script, run_name="__main__")
        except _Terminated:
            raise
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise UsageError(f"{self.plan.script} ended itself: sys.exit({ended.code!r}).") from ended
        if self.launched.run is None:
            raise UsageError(
                f"{self.plan.script} ended without calling hetexp.setup: each of its {self.plan.world_size} "
                "processes did the same for itself."
            )
        self.launched.run.finish()

    def close(self, exit_code: int) -> None:
        """Close the loggers; safe to call at any time."""
        run = self.launched.run if self.launched is not None else None
        if run is not None:
            with contextlib.suppress(OSError):
                run.close(exit_code)


if __name__ == "__main__":
    main()
