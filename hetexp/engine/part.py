"""One rank's part in a plan that rank 0 has made, and what it tells of its end."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress

from hetexp.comm.connections.lost import is_peer_lost
from hetexp.core.errors import HetexpError
from hetexp.core.plan import Plan
from hetexp.engine.local import take_environment
from hetexp.engine.meeting import Meeting
from hetexp.hardware.detection.lease import Leases
from hetexp.worker import take_part

FAILED = "failed"
"""Topic under which a rank tells why it failed."""


def take_part_of(plan: Plan, seats: Sequence[str], meeting: Meeting) -> None:
    """Do this process's part in a plan, and tell that it is done; a device that the plan leaves out waits.

    Args:
        seats: the device's id of each process of the job.

    Raises:
        Exception: whatever ended the rank; the other processes learn of it.
    """
    known = [device.id for device in plan.devices]
    mine = seats[meeting.seat.rank]
    if mine in known:
        rank = known.index(mine)
        take_environment(plan, rank)
        _log_as(rank)
        sys.path += [path for path in plan.import_paths if path not in sys.path]
        shared = plan.config.get("hardware", {}).get("share_devices", False)
        try:
            with Leases([] if shared else [plan.devices[rank]], plan.run_dir):
                take_part(plan, rank)
        except Exception as error:
            _tell(error, rank, plan, meeting)
            raise
    meeting.tell(f"done/{plan.store_port}", {})


def _log_as(rank: int) -> None:
    level = logging.INFO if rank == 0 else logging.WARNING
    form = f"[rank {rank} %(levelname)s] %(message)s"
    logging.basicConfig(level=level, format=form, stream=sys.stdout, force=True)


def _tell(error: Exception, rank: int, plan: Plan, meeting: Meeting) -> None:
    foreseen = isinstance(error, HetexpError)
    with suppress(RuntimeError):  # rank 0 may be gone
        meeting.tell(
            FAILED,
            {
                "rank": rank,
                "device": plan.devices[rank].id,
                "kind": type(error).__name__,
                "message": str(error) if foreseen else traceback.format_exc(),
                "peer_lost": is_peer_lost(error),
                "time": time.time(),
            },
        )
