"""One run, one kill, and everything that must hold afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from chaos_lab import checks
from chaos_lab.checks import EXACT, Reference, Trajectory
from chaos_lab.jobs import CRASHED, NO_CONFIG, Job, descendants, kill, until
from chaos_lab.orders import ENDS, RANKS, SAVED_EVERY, STEPS, Order

CARDS = ("rtx_3090", "t4", "mi250")
LONG_STEPS = 120
"""Of runs in which a rank comes back."""
END_SECONDS = 60.0
"""Within which every run must have ended: one that has not hangs."""
GONE_SECONDS = 5.0
"""Within which no process of a run is left, once its launcher has ended."""
KEPT = "hetexp-leases-"
"""What stays among temporary files: each user's folder of leases, empty."""
DISK_BYTES = 24 * 2**20
OVERRIDES = (
    "launch.start_method=forkserver",
    "launch.timeout_seconds=20",
    "comm.timeout_seconds=20",
    "hardware.threads_per_rank=1",
    "hardware.time_scale=50",
    "hardware.check_memory=false",
    "balancing=equal",
    "logger=none",
    "diagram=false",
    "model=custom",
    "model._target_=chaos_lab.parts.Net",
    "data=custom",
    "data._target_=chaos_lab.parts.Data",
    "optimizer._target_=chaos_lab.parts.Optimizer",
    "trainer.global_batch_size=12",
    "trainer.max_epochs=null",
    "trainer.precision=float64",
    "trainer.log_every=1",
    "trainer.eval_every=20",
    f"trainer.checkpoint_every={SAVED_EVERY}",
)


@dataclass
class Outcome:
    """What came of one kill."""

    seed: int
    kind: str
    order: dict[str, Any]
    result: str = ""
    """`survived`, `ended`, `went on`, `not begun`, `too late`."""
    code: int | None = None
    done: str = ""
    """What was done, to whom, where."""
    pause_seconds: float | None = None
    """Of a run that survived: from the last step before to the first one after."""
    end_seconds: float | None = None
    """Of a run that was to end: from the kill to the end of its last process."""
    lost_steps: int | None = None
    """Of a run that was ended: done, but not in the checkpoint that it went on from."""
    wall_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def overrides(steps: int = STEPS, ranks: int = RANKS, *more: str) -> tuple[str, ...]:
    """Return the overrides of a run of so many ranks."""
    cards = ",".join(f"emulated:{card}" for card in CARDS[:ranks])
    strategy = ("strategy=single",) if ranks == 1 else ()
    return (*OVERRIDES, f"hardware.devices=[{cards}]", f"trainer.max_steps={steps}", *strategy, *more)


class Lab:
    """The folder in which runs are killed, and what they are compared with.

    Args:
        folder: new or empty.
        survive: whether runs are to go on without a rank that is lost.
    """

    def __init__(self, folder: Path, survive: bool) -> None:
        self.folder, self.survive = folder, survive
        self._whole: Reference | None = None
        self._segments = {path.name for path in checks.SHARED_MEMORY.iterdir()}
        os.environ["HETEXP_HOME"] = str(folder / "home")

    def reference(self, steps: int) -> Reference:
        """Return what an undisturbed run of so many steps does; it is done when it is first asked for."""
        if self._whole is None:
            usual = self._undisturbed("usual", overrides())
            # A signal may have any step saved.
            job = self._undisturbed("reference", overrides(LONG_STEPS, RANKS, "trainer.checkpoint_every=1"))
            saved = checks.checkpoints(job.folder).items()
            self._whole = Reference(
                usual.ended - usual.started,
                Trajectory.read(job.folder),
                {step: load_file(path / "model.safetensors") for step, path in saved},
                checks.samples(job.records),
            )
        return self._whole.until(steps)

    def _undisturbed(self, name: str, settings: tuple[str, ...]) -> Job:
        job = Job(self.folder / name / "run", settings)
        try:
            if not job.wait(10 * END_SECONDS) or job.code != 0:
                raise RuntimeError(f"the undisturbed run failed:\n{job.screen}")
        finally:
            job.close()
        return job

    def try_out(self, order: Order) -> Outcome:
        """Do to a run what is ordered, and return what came of it; its folder stays where it went wrong."""
        started = time.monotonic()
        folder = self.folder / f"seed_{order.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        trial = Trial(self, order, folder)
        with trial.disk():
            outcome = trial.outcome()
        outcome.wall_seconds = time.monotonic() - started
        left = checks.orphaned_segments(self._segments)
        outcome.problems += [f"shared memory left behind: {name}" for name in left]
        if not outcome.problems:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome


class Trial:
    """One order, carried out."""

    def __init__(self, lab: Lab, order: Order, folder: Path) -> None:
        self.lab, self.order = lab, order
        self.folder = folder
        self.steps = LONG_STEPS if order.kind == "kill a rank that joins" else STEPS
        self.reference = lab.reference(self.steps)
        self.found = Outcome(order.seed, order.kind, asdict(order))
        self.moment = 0.0
        self.mounted = False
        self.dead: list[int] = []
        self.hit = False
        """Whether a rank was frozen."""
        self.began = False
        """Whether a step was done before the kill."""

    @contextlib.contextmanager
    def disk(self) -> Iterator[None]:
        """Give the run a small disk of its own, where it is to be filled."""
        self.folder.mkdir(parents=True)
        place = self.folder / "disk"
        place.mkdir()
        self.run_dir = place / "run"
        if self.order.kind != "fill the disk":
            yield
            return
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
        self.mounted = subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode == 0
        if not self.mounted:  # not root: files may not grow any more
            yield
            return
        try:
            yield
        finally:
            if self.found.problems:
                shutil.copytree(self.run_dir, self.folder / "run", dirs_exist_ok=True)
            subprocess.run(["umount", "-l", place], check=True)

    def outcome(self) -> Outcome:
        order = self.order
        more = [
            f"++trainer.keep_last={order.kept}",
            f"++fault.survive={str(self.lab.survive).lower()}",
            "++fault.respawn_seconds=0.1",
        ]
        if order.kind == "fault within a rank":
            event = f"{{kind: {order.fault}, device: 'emulated:{order.rank}', at_step: {order.number}}}"
            more.append(f"fault.events=[{event}]")
        mark: dict[str, Any] = {"place": order.place, "number": order.number}
        if order.kind not in ("kill the launcher", "kill everything", "SIGTERM"):
            mark["rank"] = order.rank
        # Without a kill to wait for, a rank that is held at its place counts as hung.
        waits = ("SIGTERM", "freeze and wake a rank", "fill the disk", "fault within a rank")
        mark["hold"] = order.hold and order.kind not in waits
        job = Job(self.run_dir, overrides(self.steps, RANKS, *more), mark, self._environment(), self.folder)
        try:
            self._act(job)
            self._end(job)
        finally:
            job.close()
        self._check(job)
        return self.found

    def _environment(self) -> dict[str, str]:
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        return {"TMPDIR": str(temporary)}

    # ------------------------------------------------------------ what is done

    def _act(self, job: Job) -> None:
        """Wait for the moment, and do it."""
        order = self.order
        if order.kind == "fault within a rank":
            self.moment, self.began = job.started, True
            self.found.done = f"{order.fault} in rank {order.rank} at step {order.number}"
            return
        at = self._wait_for_moment(job)
        self.began = job.training()
        self.moment = time.monotonic()
        steps = {
            "kill the launcher": self._kill_launcher,
            "kill everything": self._kill_everything,
            "kill everything, corrupt a byte": self._kill_everything,
            "SIGTERM": self._terminate,
            "fill the disk": self._fill,
            "freeze a rank": self._freeze,
            "freeze and wake a rank": self._freeze,
            "kill a rank that joins": self._kill_twice,
        }
        done = steps.get(order.kind, self._kill_rank)(job)
        self.found.done = f"{done}, {at}"

    def _wait_for_moment(self, job: Job) -> str:
        order = self.order
        if order.place is None:
            moment = job.started + order.moment * self.reference.seconds
            until(lambda: job.poll() is not None or time.monotonic() >= moment, END_SECONDS, 0.002)
            return f"{order.moment:.0%} of the usual time"
        if job.arrival(END_SECONDS) is None:
            return f"after the end: place {order.place} {order.number} did not come"
        time.sleep(order.delay_seconds)
        waits = "held" if order.hold else f"{order.delay_seconds * 1e3:.0f} ms after it"
        return f"{order.place} {order.number}, {waits}"

    def _a_rank(self, job: Job) -> int | None:
        """Return the process of the ordered rank, waiting for its start."""
        found: list[int] = []

        def there() -> bool:
            pid = job.ranks().get(self.order.rank)
            found.extend([pid] if pid is not None else [])
            return bool(found) or job.poll() is not None

        until(there, END_SECONDS)
        return found[0] if found else None

    def _kill_rank(self, job: Job) -> str:
        pid = self._a_rank(job)
        self.moment = time.monotonic()
        if pid is None or not kill(pid):
            return "no process was there"
        self.dead.append(pid)
        return f"rank {self.order.rank} killed"

    def _kill_twice(self, job: Job) -> str:
        """Kill a rank, wait for what takes its place, and kill that as well."""
        first = set(job.ranks().values())
        done = self._kill_rank(job)
        new: list[int] = []

        def there() -> bool:
            new.extend(pid for pid in job.ranks().values() if pid not in first)
            return bool(new) or job.poll() is not None

        if not until(there, END_SECONDS) or not new:
            return f"{done}, and nothing came in its place"
        self.found.done = done
        time.sleep(self.order.moment * 2.0)
        if not kill(new[0]):
            return f"{done}, and what came in its place had ended"
        self.dead.append(new[0])
        return f"{done}, and {self.order.moment * 2.0:.1f} s after its start what came in its place"

    def _freeze(self, job: Job) -> str:
        pid = self._a_rank(job)
        self.moment = time.monotonic()
        if pid is None or not kill(pid, signal.SIGSTOP):
            return "no process was there"
        self.hit = True
        if self.order.kind == "freeze a rank":
            self.dead.append(pid)
            return f"rank {self.order.rank} frozen"
        until(lambda: job.poll() is not None, self.order.wake_seconds)
        kill(pid, signal.SIGCONT)
        if self.order.wake_seconds > 0.9:  # it may have counted as lost meanwhile
            self.dead.append(pid)
        return f"rank {self.order.rank} frozen for {self.order.wake_seconds} s"

    def _kill_launcher(self, job: Job) -> str:
        kill(job.pid)
        return "launcher killed"

    def _kill_everything(self, job: Job) -> str:
        everything = [job.pid, *descendants(job.pid)]
        random.Random(self.order.seed).shuffle(everything)
        for pid in everything:
            kill(pid)
        return f"{len(everything)} processes killed"

    def _terminate(self, job: Job) -> str:
        kill(job.pid, signal.SIGTERM)
        return "SIGTERM to the launcher"

    def _fill(self, job: Job) -> str:
        if not self.mounted:
            for pid in [job.pid, *descendants(job.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
            return "no file may grow"
        ballast = self.run_dir.parent / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        return "disk filled"

    # ------------------------------------------------------------ what must hold

    def _end(self, job: Job) -> None:
        """Wait for the end of the run, and of every process of it."""
        if not job.wait(END_SECONDS):
            living = [f"{pid} ({_command(pid)})" for pid in [job.pid, *descendants(job.pid)]]
            self.found.problems.append(f"hung: not over {END_SECONDS:g} s later; {', '.join(living)}")
            for pid in job.ranks().values():  # their stacks, into their logs
                kill(pid, signal.SIGUSR1)
            time.sleep(1.0)
            return
        self.found.code = job.code
        # Twice: a process that is adopted during the first look may be in neither place then.
        gone = until(
            lambda: job.poll() is not None and not (descendants(os.getpid()) or descendants(os.getpid())),
            GONE_SECONDS,
        )
        if not gone:
            living = [f"{pid} ({_command(pid)})" for pid in descendants(os.getpid())]
            self.found.problems.append(f"left {GONE_SECONDS:g} s after the end: {', '.join(living)}")
        self.found.end_seconds = time.monotonic() - self.moment

    def _check(self, job: Job) -> None:
        found = self.found
        if found.problems:
            return
        if checks.answers(self.run_dir):
            found.problems.append("somebody answers at the port of its store")
        with contextlib.suppress(FileNotFoundError):
            (self.run_dir.parent / "ballast").unlink()
        run = Trajectory.read(self.run_dir)
        found.problems += checks.wrong_checkpoints(self.run_dir, self.reference, EXACT)
        found.problems += checks.wrong_trajectory(run, self.reference, EXACT)
        found.problems += checks.wrong_samples(job.records, self.reference, self.dead)
        if found.code == 0:
            self._check_completed(job, run)
        elif self._may_end(job):
            found.result = "ended"
            self._go_on(run)
        else:
            found.problems.append(f"it ended with {found.code}: {_end_of(job.screen)}")

    def _check_completed(self, job: Job, run: Trajectory) -> None:
        found = self.found
        found.problems += checks.missing_steps([run], self.reference)
        if self.reference.steps not in checks.checkpoints(self.run_dir):
            found.problems.append("no checkpoint of the last step")
        found.problems += _left_over(self.folder / "tmp")
        summary = json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))
        lost = bool(summary["failures"])
        if self.dead and not lost and self.order.kind == "kill a rank that joins":
            found.problems.append("the summary tells of no lost device")
        woke = self.order.kind == "freeze and wake a rank" and self.hit
        found.result = "survived" if lost or woke else "too late"
        if found.result == "survived":
            found.pause_seconds = checks.pause(job.records, self.moment)
        found.end_seconds = None

    def _may_end(self, job: Job) -> bool:
        """Whether the run was right to end, with this code."""
        code, kind = self.found.code, self.order.kind
        if kind == "fill the disk" and code == NO_CONFIG and not self.began:
            return " MiB are free in " in job.screen  # refused before it wrote anything
        if code in (NO_CONFIG, CRASHED):
            return False
        if kind in ("kill the launcher", "kill everything", "kill everything, corrupt a byte"):
            return code == -signal.SIGKILL
        if kind == "SIGTERM":  # before the launcher handles signals it dies of them
            return code == 128 + signal.SIGTERM or (not self.began and code == -signal.SIGTERM)
        if kind == "fill the disk":
            return code not in (None, 0)
        return not self.lab.survive or not self.began

    def _go_on(self, killed: Trajectory) -> None:
        """Resume the run, and compare both parts with the undisturbed run."""
        found, order = self.found, self.order
        saved = checks.checkpoints(self.run_dir)
        if order.kind == "kill everything, corrupt a byte" and saved:
            newest = max(saved)
            found.done += f", {_change_byte(saved[newest], order.byte)}"
            del saved[newest]
        if not saved:
            found.result = "not begun"
            return
        ranks = order.layout if order.kind in ENDS else RANKS
        job = Job(self.folder / "resumed", overrides(self.steps, ranks, f"resume={self.run_dir}"))
        try:
            if not job.wait(END_SECONDS) or job.code != 0:
                found.problems.append(f"resume ended with {job.code}: {_end_of(job.screen)}")
                return
        finally:
            job.close()
        run = Trajectory.read(job.folder)
        begun = max(saved)
        if run.losses and min(run.losses) != begun + 1:
            found.problems.append(f"went on with step {min(run.losses)}, not {begun + 1}")
        bound = 0.0 if ranks == RANKS and order.kind in ENDS else EXACT
        found.problems += checks.wrong_trajectory(run, self.reference, bound, begun)
        found.problems += checks.wrong_checkpoints(job.folder, self.reference, bound)
        found.problems += checks.missing_steps([killed, run], self.reference)
        found.problems += checks.wrong_samples(job.records, self.reference, [])
        found.result = "went on"
        found.lost_steps = max(0, max(killed.losses, default=0) - begun)


def _change_byte(folder: Path, fraction: float) -> str:
    """Change one byte of a checkpoint, and say which."""
    files = sorted(folder.iterdir())
    place = int(fraction * sum(path.stat().st_size for path in files))
    for path in files:
        content = bytearray(path.read_bytes())
        if place < len(content):
            content[place] ^= 0x10
            path.write_bytes(bytes(content))
            return f"byte {place} of {folder.name}/{path.name} changed"
        place -= len(content)
    raise AssertionError("a fraction is below one")


def _left_over(folder: Path) -> list[str]:
    return [
        f"temporary files left behind: {path.name}"
        for path in folder.iterdir()
        if not path.name.startswith(KEPT)
    ]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        log = Path(f"/proc/{pid}/fd/1").readlink().name
        return f"{state}, {log}"
    return "gone"


def _end_of(screen: str) -> str:
    return " / ".join(line.strip() for line in screen.strip().splitlines()[-4:])
