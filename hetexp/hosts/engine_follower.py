"""The ranks of another engine: each reports its device, then executes what rank 0 plans."""

from __future__ import annotations

import logging
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from hetexp.comm.connections.lost import is_peer_lost
from hetexp.core.config import read_config
from hetexp.core.errors import HetexpError, SetupError
from hetexp.core.plan import Plan
from hetexp.hardware.detection.lease import Leases
from hetexp.hardware.link_probe import LIMIT_SECONDS
from hetexp.hardware.link_probe import answer as answer_probe
from hetexp.hardware.selection.pool import Selection
from hetexp.hosts.channel import WireError, handshake_as_member
from hetexp.hosts.engine_devices import device_report, set_environment
from hetexp.hosts.engine_store import EngineStore
from hetexp.launch.processes.failure import RankFailure
from hetexp.worker import take_part

FAILED = "failed"
"""Topic under which a rank reports why it failed."""


def follow_rank_0(store: EngineStore, selection: Selection) -> None:
    """Execute the commands of rank 0 until the last one.

    Args:
        selection: the devices of this host, as the configuration selects them.

    Raises:
        SetupError: rank 0 has given up, or is gone.
        Exception: whatever ended this rank.
    """
    rank_env = store.rank_env
    store.report("device", device_report(selection, rank_env, store.address))
    while "end" not in (command := store.next_command()):
        if "plan" in command:
            plan = Plan.from_dict(command["plan"])
            read_config(plan.config)  # by this host's own hetexp, before anything is built
            run_rank_of(plan, command["device_ids"], store)
        elif command["probe"] == rank_env.rank:
            with suppress(OSError, WireError):  # rank 0 reports what goes wrong
                _answer_probe(command["address"], command["port"], command["token"])
    store.leave()
    if command["end"] is not None:
        raise SetupError(f"rank {rank_env.rank} ends: rank 0 has given up ({command['end']}).")


def _answer_probe(address: str, port: int, token: str) -> None:
    """Let rank 0 measure the network to this host."""
    with socket.create_connection((address, port), LIMIT_SECONDS) as connection:
        handshake_as_member(connection, token.encode(), "probe", "", LIMIT_SECONDS)
        answer_probe(connection)


def run_rank_of(plan: Plan, device_ids: Sequence[str], store: EngineStore) -> None:
    """Run this process's rank of a plan, and report the end; without a rank this process only waits.

    Args:
        device_ids: of the device of each process in the job.

    Raises:
        Exception: whatever ended the rank; the other processes get a report.
    """
    planned = [device.id for device in plan.devices]
    device_id = device_ids[store.rank_env.rank]
    if device_id in planned:
        rank = planned.index(device_id)
        set_environment(plan, rank)
        level = logging.INFO if rank == 0 else logging.WARNING
        form = f"[rank {rank} %(levelname)s] %(message)s"
        logging.basicConfig(level=level, format=form, stream=sys.stdout, force=True)
        sys.path += [path for path in plan.import_paths if path not in sys.path]
        shared = plan.config.get("hardware", {}).get("share_devices", False)
        try:
            with Leases([] if shared else [plan.devices[rank]], plan.run_dir):
                take_part(plan, rank)
        except Exception as error:
            message = str(error) if isinstance(error, HetexpError) else traceback.format_exc()
            failure = RankFailure(
                rank, type(error).__name__, message, peer_lost=is_peer_lost(error), time=time.time()
            )
            with suppress(RuntimeError):  # rank 0 may be gone
                store.report(FAILED, asdict(failure))
            raise
    store.report(f"done/{plan.store_port}", {})
