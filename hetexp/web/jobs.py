"""The trainings of this machine: the server's, started in order as devices become free, and all others.

A thread polls for changes. The monitor's table has the state of each training. The process that follows a run
(`hetexp.monitor.follow`) writes its progress there. This thread adds the starts of launchers, and the ends of
those that had no plan yet.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from hetexp.core.files import read_json, write_text
from hetexp.monitor.processes import lives, started_at
from hetexp.monitor.sample import host_name
from hetexp.monitor.store import ABANDONED, ACTIVE, Store
from hetexp.web.job import Job, alive, has_begun, launch, log_tail, own_job, signalled
from hetexp.web.refused import RefusedError

POLL_SECONDS = 0.25
END_SECONDS = 6.0
"""Longest time until the process beside a launcher notes its end (`hetexp.monitor.follow.END_SECONDS`)."""
STOP_SECONDS = 45.0
"""Time after which a launcher that was asked to end is killed: a last checkpoint may take a while."""
MOST_PENDING = 100
FOREIGN = "its folder is not below this server's outputs, or is another user's, whose server may start it"
_STATES = {"completed": "completed", "failed": "failed", "interrupted": "stopped"}
_LOG = logging.getLogger(__name__)
Row = dict[str, Any]


class Jobs:
    """The trainings of this machine.

    Args:
        store: the monitor's database.
        changed: callback for the row of each changed training, called on the thread.
        root: the server's working folder; it starts no training of another folder, or of another user.
        stop_seconds: time after which a launcher that was asked to end is killed.
    """

    def __init__(
        self, store: Store, changed: Callable[[Row], None], root: Path, stop_seconds: float = STOP_SECONDS
    ) -> None:
        self._store, self._changed, self._root, self._stop_seconds = store, changed, root, stop_seconds
        self._lock = threading.RLock()
        self._wake, self._ending = threading.Event(), False
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._gone_since: dict[str, float] = {}
        self._seen: dict[str, Row] = {}
        self._waits: dict[str, list[str]] = {}
        self._asked: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def start(self) -> None:
        """Find the trainings of an earlier server, and begin to follow all trainings."""
        for row in self._store.trainings(("failed",), host_name()):
            self._completed(row)
        self.look()
        self._thread.start()

    def close(self) -> None:
        """End the thread; trainings go on."""
        self._ending = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def add(self, job: Job, strategy: str, emulated: bool) -> Row:
        """Take a job into the queue.

        Raises:
            RefusedError: too many trainings wait already.
        """
        with self._lock:
            waiting = self._store.trainings(("pending",), host_name(), MOST_PENDING)
            if len(waiting) >= MOST_PENDING:
                raise RefusedError(
                    409, [(None, f"{MOST_PENDING} trainings wait already; stop some of them.")]
                )
            job.write()
            row: Row = {
                "id": job.id,
                "name": job.name,
                "state": "pending",
                "gpu_ids": list(job.gpu_ids),
                "distributed": len(job.gpu_ids) > 1,
                "emulated": emulated,
                "strategy": strategy,
                "run_dir": str(job.run_dir),
                "host": host_name(),
                "created": time.time(),
            }
            self._store.begin(row)
        self._wake.set()
        return self._store.training(job.id) or row

    def stop(self, row: Row) -> None:
        """Ask a training to end, as Ctrl-C does: it writes a last checkpoint. A waiting one never starts.

        Raises:
            RefusedError: the training has ended, or runs on another machine or as another user.
        """
        with self._lock:
            row = self._store.training(row["id"]) or row
            if row["state"] not in ACTIVE:
                raise RefusedError(409, [("id", f"Training {row['id']} has ended already ({row['state']}).")])
            if row["host"] != host_name():
                raise RefusedError(
                    409, [("id", f"Training {row['id']} runs on {row['host']}: stop it there.")]
                )
            job = own_job(row, self._root)
            if job is not None:
                job.stopping(time.time())
            if row["pid"] is None and (job is None or not alive(job.run_dir)):
                self._end(row, "stopped", None)
            elif job is None and lives(row["pid"], row["process_mark"]):
                try:
                    signalled(row["pid"], SIGTERM)
                except PermissionError:
                    message = f"Training {row['id']} is another user's."
                    raise RefusedError(409, [("id", message)]) from None
        self._wake.set()

    def delete(self, row: Row) -> None:
        """Forget a training that has ended; its folder stays.

        Raises:
            RefusedError: the training has not ended.
        """
        with self._lock:
            row = self._store.training(row["id"]) or row
            if row["state"] in ACTIVE:
                raise RefusedError(409, [("id", f"Training {row['id']} has not ended; stop it first.")])
            self._store.forget(row["id"])
            self._seen.pop(row["id"], None)

    def waits_for(self, training_id: str) -> list[str]:
        """Return the reasons why a pending training has not started."""
        return self._waits.get(training_id, [])

    def look(self) -> None:
        """Look once: note ends, start waiting trainings, and report changes."""
        with self._lock:
            rows = self._store.trainings(ACTIVE, host_name(), 1000)
            jobs = {row["id"]: own_job(row, self._root) for row in rows}
            self._start_waiting([row for row in rows if self._goes_on(row, jobs[row["id"]])], jobs)
        self._report_changes()

    def _run(self) -> None:
        while not self._ending:
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            try:
                self.look()
            except SQLAlchemyError as error:  # a database may be unreachable for a moment
                _LOG.warning("%s", error)

    def _goes_on(self, row: Row, job: Job | None) -> bool:
        """Return whether a training has not ended, and note an end that no other process noted."""
        if job is None:
            return True  # not this server's: the machine's sampler notes its end (`Store.bury`)
        run_dir, process = Path(row["run_dir"]), self._processes.get(row["id"])
        if process.poll() is None if process is not None else alive(run_dir):
            self._gone_since.pop(row["id"], None)
            self._signal_stop(row, job)
            return True
        if row["pid"] is None and process is None and not has_begun(run_dir):
            return True  # it waits for its start
        gone = self._gone_since.setdefault(row["id"], time.monotonic())
        followed = (run_dir / "plan.json").exists()
        if not followed or time.monotonic() - gone > END_SECONDS:
            self._conclude(row, job)
        return False

    def _signal_stop(self, row: Row, job: Job) -> None:
        """Signal a training that was asked to end: SIGTERM as soon as possible, SIGKILL after a time."""
        if job.stop_asked is None or row["pid"] is None or not lives(row["pid"], row["process_mark"]):
            return
        if time.time() - job.stop_asked > self._stop_seconds:
            # its ranks end with it (`hetexp.launch.processes.parent_death`)
            signalled(row["pid"], SIGKILL, group=True)
        elif row["id"] not in self._asked:
            self._asked.add(row["id"])
            signalled(row["pid"], SIGTERM)

    def _start_waiting(self, rows: list[Row], jobs: dict[str, Job | None]) -> None:
        """Start each waiting training, unless its devices are in use or an older training waits for them."""
        taken: dict[str, str] = {}
        waiting = []
        for row in sorted(rows, key=lambda row: row["created"]):
            job = jobs[row["id"]]
            if job is None:
                continue
            if row["pid"] is not None or row["id"] in self._processes or alive(Path(row["run_dir"])):
                taken |= dict.fromkeys(job.takes, str(row["name"]))
            else:
                waiting.append((row, job))
        self._waits = {row["id"]: [FOREIGN] for row in rows if jobs[row["id"]] is None and row["pid"] is None}
        for row, job in waiting:
            reasons = [f"{device}, which {taken[device]} uses" for device in sorted(job.takes & taken.keys())]
            reasons = reasons or job.held()
            taken |= dict.fromkeys(job.takes - taken.keys(), str(row["name"]))
            if reasons:
                self._waits[row["id"]] = reasons
            elif job.stop_asked is None:
                self._launch(row, job)

    def _launch(self, row: Row, job: Job) -> None:
        try:
            process = launch(job)
        except OSError as error:
            self._end(row, "failed", f"its launcher could not be started: {error}")
            return
        if process is not None:
            self._processes[job.id] = process
            self._store.update(job.id, pid=process.pid, process_mark=started_at(process.pid))

    def _conclude(self, row: Row, job: Job) -> None:
        """Note the end of a training if its launcher did not."""
        run_dir = Path(row["run_dir"])
        with suppress(OSError, ValueError, KeyError, TypeError):
            summary = read_json(run_dir / "summary.json")
            error = None if summary["error"] is None else str(summary["error"])
            self._end(row, _STATES.get(str(summary["status"]), "failed"), error)
            return
        if job.stop_asked is not None:
            self._end(row, "stopped", None)
            return
        lines = [line for line in log_tail(run_dir, 40) if line.strip()]
        self._end(row, "failed", "\n".join(lines[-12:]) or ABANDONED)

    def _end(self, row: Row, state: str, error: str | None) -> None:
        ended = {"state": state, "error": error, "ended": time.time()}
        self._store.update(row["id"], **ended | ({"progress": 1.0} if state == "completed" else {}))
        self._forget(row["id"])

    def _forget(self, training_id: str) -> None:
        self._gone_since.pop(training_id, None)
        self._asked.discard(training_id)
        process = self._processes.pop(training_id, None)
        if process is not None:
            process.poll()

    def _report_changes(self) -> None:
        """Report the trainings that changed or ended since the last look."""
        now = {row["id"]: row for row in self._store.trainings(ACTIVE, limit=1000)}
        for key in self._seen.keys() - now.keys():
            row = self._store.training(key)
            if row is not None:
                self._changed(self._completed(row))
        for key, row in now.items():
            if self._seen.get(key) != row:
                self._changed(row)
        self._seen = now

    def _completed(self, row: Row) -> Row:
        """Return the row of an ended training, completed by facts that only the server has."""
        job = own_job(row, self._root) if row["host"] == host_name() else None
        with self._lock:
            self._forget(row["id"])
            if job is not None and row["state"] == "failed" and row["error"] == ABANDONED:
                self._conclude(row, job)
                row = self._store.training(row["id"]) or row
        return row


def report_of(row: Row) -> str:
    """Return the report of an ended training as a page, which is written once.

    Raises:
        RefusedError: the training has not ended, or has no summary.
    """
    from hetexp.core.errors import ConfigError
    from hetexp.core.instantiate import only_trusted
    from hetexp.report.comparison import compare
    from hetexp.report.page.html import render
    from hetexp.report.runs import read_runs

    run_dir = Path(row["run_dir"])
    if row["state"] in ACTIVE or row["host"] != host_name() or not (run_dir / "summary.json").exists():
        raise RefusedError(404, [("id", f"Training {row['id']} has no report.")])
    page = run_dir / "report.html"
    if not page.exists():
        try:
            with only_trusted(how="--trust {} to hetexp report"):
                text = render(compare(read_runs([run_dir]), row["name"]))
        except ConfigError as error:
            raise RefusedError(404, [("id", problem) for problem in error.problems]) from None
        except Exception as error:
            _LOG.warning("%s has no report", run_dir, exc_info=True)
            message = f"The files of training {row['id']} are not as hetexp writes them ({error!r:.100})."
            raise RefusedError(404, [("id", message)]) from None
        write_text(page, text)
    return page.read_text(encoding="utf-8")
