"""Every rank but rank 0: tells of its device, then does what rank 0 says."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from hetexp.app import detect_for, plain
from hetexp.core.config import check_config, read_config
from hetexp.core.errors import SetupError
from hetexp.core.plan import Plan
from hetexp.engine.local import own_device
from hetexp.engine.meeting import Meeting
from hetexp.engine.part import take_part_of
from hetexp.engine.probe import ProbeServer
from hetexp.hardware.selection.devices import select_devices
from hetexp.hardware.selection.pool import Selection


def follow(meeting: Meeting, composed: DictConfig | None) -> None:
    """Take part in what rank 0 plans until it says that nothing more comes.

    Args:
        composed: the configuration as this process reads it, for this host's devices; `None` where it cannot
            be read, which rank 0 tells the person of.

    Raises:
        SetupError: rank 0 has given up, or is gone.
        Exception: whatever ended this rank.
    """
    selection = _selected(composed)
    probe = ProbeServer(meeting.address) if meeting.seat.local_rank == 0 else None
    meeting.tell("device", own_device(selection, meeting.seat, meeting.address, probe))
    try:
        _obey(meeting)
    finally:
        if probe is not None:
            probe.close()


def _obey(meeting: Meeting) -> None:
    """Do what rank 0 says until it says that nothing more comes."""
    while True:
        order = meeting.next_order()
        if "plan" not in order:
            break
        plan = Plan.from_dict(order["plan"])
        read_config(plan.config)  # by this host's own hetexp, before anything is built
        take_part_of(plan, order["seats"], meeting)
    meeting.part()
    if order["end"] is not None:
        raise SetupError(f"rank {meeting.seat.rank} ends: rank 0 has given up ({order['end']}).")


def _selected(composed: DictConfig | None) -> Selection:
    config = check_config(plain(composed)[0])[0] if composed is not None else None
    if config is None:
        return Selection(problems=["`hardware` cannot be read on every host."])
    return select_devices(config.hardware, detect_for(config.hardware, Path.cwd()))
