"""The monitor's process beside a launcher, which ends with the launcher in any case."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hetexp.core.config import MonitorConfig
from hetexp.core.plan import Plan

if TYPE_CHECKING:
    from hetexp.monitor.training import Training

NICE = 10
"""Niceness of the process: ranks go first if both need a core."""
_LOG = logging.getLogger(__name__)


def main() -> None:
    """Sample until the standard input ends, which only the launcher holds open."""
    order = json.loads(sys.argv[1])
    handler = logging.FileHandler(order["log"], encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    if hasattr(os, "nice"):
        with suppress(OSError):
            os.nice(NICE)
    for name in ("SIGINT", "SIGHUP", "SIGTERM"):  # a service manager's stop reaches all processes of a run
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    try:
        from hetexp.monitor.service import Service
        from hetexp.monitor.training import Training

        training = Training(Plan.read(Path(order["plan"])), order["pid"], order["created"])
        ending = threading.Event()
        threading.Thread(target=_listen, args=(training, ending), name="pipe", daemon=True).start()
        Service(MonitorConfig.model_validate(order["monitor"]), training).run(ending)
    except Exception:
        _LOG.exception("The monitor has ended; the run has not.")
    # All files are closed. The launcher waits, and a normal end of the interpreter takes longer.
    logging.shutdown()
    os._exit(0)


def _listen(training: Training, ending: threading.Event) -> None:
    """Read the launcher's messages until the last one."""
    with suppress(OSError, ValueError):
        for line in sys.stdin:
            message = json.loads(line)
            if "steps" in message:
                training.ready(message["steps"])
            if "end" in message:
                training.ended_itself, training.error = True, message["error"]
                break
    ending.set()
