"""The work of the monitor's processes: one beside each launcher, or `hetexp monitor`.

Each process records its own run. The process that has a machine's lock samples the devices for all; when it
ends, the next process takes over at once. No failure here affects a training.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock, Timeout
from sqlalchemy.exc import SQLAlchemyError

from hetexp.core.config import MonitorConfig
from hetexp.core.errors import SetupError
from hetexp.hardware.detection.builds import home
from hetexp.monitor.runs import RunWatch, leased
from hetexp.monitor.sample import Sample, host_name
from hetexp.monitor.sampler import Sampler
from hetexp.monitor.store import ACTIVE, Store
from hetexp.monitor.tables import default_path
from hetexp.monitor.training import Training

AGAIN_SECONDS = 5.0
"""Time from a failure of the database to the next try."""
BURY_SECONDS = 10.0
ROLL_UP_SECONDS = 60.0
_LOG = logging.getLogger(__name__)


class Service:
    """Samples at each interval until `run` is asked to end.

    Args:
        config: the typed section.
        training: the run that this process records.
        seen: receives each moment's samples, for a screen.
    """

    def __init__(
        self,
        config: MonitorConfig,
        training: Training | None = None,
        seen: Callable[[float, Sequence[Sample]], None] | None = None,
    ) -> None:
        self._config, self._training, self._seen = config, training, seen
        self._store: Store | None = None
        self._sampler: Sampler | None = None
        self._lock = FileLock(lock_path(config.url), mode=0o666)
        self._watches: dict[Path, RunWatch] = {}
        self._due = {"store": -math.inf, "bury": -math.inf, "roll up": time.monotonic() + ROLL_UP_SECONDS}
        self._logged: str | None = None

    def run(self, ending: threading.Event) -> None:
        """Work until `ending` is set, then record the run's end."""
        try:
            self._attempt(self._record_training)
            interval = self._config.interval_seconds
            while True:
                now = time.time()
                moment = (math.floor(now / interval) + 1) * interval  # the same moments in every process
                if ending.wait(moment - now):
                    break
                self._attempt(self._record_training)
                self._attempt(partial(self._sample, round(moment, 3)))
        finally:
            if self._training is not None:
                self._training.finish()
                self._due["store"] = -math.inf
                self._attempt(self._record_training)
            self._close()

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do work with the database; a failure is logged once, and the work is tried again later."""
        try:
            if self._store is None:
                if time.monotonic() < self._due["store"]:
                    return
                self._store = Store(self._config.url)
            work()
            self._logged = None
        except (SQLAlchemyError, OSError, SetupError) as error:
            if str(error) != self._logged:
                _LOG.warning("%s", error)
            self._logged = str(error)
            store, self._store = self._store, None
            self._due["store"] = time.monotonic() + AGAIN_SECONDS
            if store is not None:
                store.close()

    def _record_training(self) -> None:
        assert self._store is not None
        if self._training is not None:
            self._training.record(self._store)

    def _sample(self, moment: float) -> None:
        assert self._store is not None
        if not self._leads():
            return
        if self._is_due("bury", BURY_SECONDS):
            self._store.bury()
        if self._sampler is None:
            self._sampler = Sampler()
        samples = self._sampler.sample(self._runs(self._store))
        self._store.write(samples, moment)
        if self._seen is not None:
            self._seen(moment, samples)
        if self._is_due("roll up", ROLL_UP_SECONDS):
            self._store.roll_up(self._config.retention)

    def _leads(self) -> bool:
        """Return whether this process samples for all of the machine."""
        if not self._lock.is_locked:
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                return False
        return True

    def _runs(self, store: Store) -> list[RunWatch]:
        """Return the active runs of this machine, with their newest lines."""
        folders = [Path(row["run_dir"]) for row in store.trainings(ACTIVE, host_name())]
        active = dict.fromkeys([*folders, *leased()])
        for folder in self._watches.keys() - active.keys():
            self._watches.pop(folder).close()
        for folder in active:
            self._watches.setdefault(folder, RunWatch(folder)).look()
        return [self._watches[folder] for folder in active]

    def _is_due(self, what: str, every: float) -> bool:
        due = time.monotonic() >= self._due[what]
        if due:
            self._due[what] = time.monotonic() + every
        return due

    def _close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        if self._sampler is not None:
            self._sampler.__exit__()
        if self._store is not None:
            self._store.close()
        self._lock.release()


def lock_path(url: str | None) -> Path:
    """Return the lock file of the process that samples this machine into a database."""
    parts = urlsplit(url or "")
    if url is None or parts.scheme == "sqlite":
        path = default_path() if url is None else Path(parts.path[1:])
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f"{path.name}.lock")
    home().mkdir(parents=True, exist_ok=True)
    return home() / f"monitor-{hashlib.sha256(url.encode()).hexdigest()[:12]}.lock"


def any_sampler(url: str | None) -> bool:
    """Return whether another process samples into this database now."""
    lock = FileLock(lock_path(url), mode=0o666)
    try:
        lock.acquire(timeout=0)
    except OSError:  # held, or a file of another user, who then samples into it
        return True
    lock.release()
    return False
