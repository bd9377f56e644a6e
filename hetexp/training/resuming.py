"""How a run goes on from a checkpoint, whatever strategy and devices it is of."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hetexp.checkpoint.choose import Wish, choose
from hetexp.checkpoint.folder import load_checkpoint
from hetexp.checkpoint.manifest import rank_folders, search_rank_checkpoints
from hetexp.core.errors import CheckpointError, must_be
from hetexp.optimizer.build import restart_schedule
from hetexp.training.precision import LossScale
from hetexp.training.random_states import restore_random
from hetexp.training.rank_states import restore_rank
from hetexp.training.staged_saving import load_part
from hetexp.training.state import Parts, Progress

log = logging.getLogger(__name__)


def resume(parts: Parts) -> Progress:
    """Load the checkpoint that `resume` names, and return where the run stands.

    Raises:
        CheckpointError: it is not there, not complete or not of this model.
    """
    if parts.config.resume is None:
        return Progress()
    folder = _checkpoint_of(parts, Path(parts.plan.working_dir, parts.config.resume))
    if parts.staging is None:
        state = load_checkpoint(folder, parts.model, parts.optimizer)
    else:
        state = load_part(parts, folder)
    parts.resumed_from = {key: state.extra.get(key) for key in ("run_id", "group")} | {"step": state.step}
    # The rates are a function of the step: they follow from it and from this run's own configuration.
    restart_schedule(parts.schedule, state.step)
    parts.balancer.restore(state.extra.get("balancer"))
    if parts.loss_scale is not None and state.extra.get("loss_scale") is not None:
        parts.loss_scale = LossScale.from_dict(state.extra["loss_scale"])
    restore_rank(parts, folder)
    part = state.extra.get("part")
    if parts.local is not None and part is not None:
        parts.local.goes_on, parts.local.samples = True, part["samples"]
        if parts.strategy.apart and part["share"] != parts.plan.shares[parts.rank]:
            log.warning("resume: the shares are others than before: samples are dealt out anew.")
    restore_random(parts, folder)
    parts.microbatch_limits = _limits_before(parts, state.extra.get("devices", []))
    return Progress.from_dict(state.step, state.position, state.extra["progress"])


def _checkpoint_of(parts: Parts, path: Path) -> Path:
    """Return the checkpoint that this rank goes on from: its own, where each has one.

    Raises:
        CheckpointError: there is none, or there are those of another number of ranks.
    """
    if parts.strategy.apart and rank_folders(path):
        folders = search_rank_checkpoints(path)
        if len(folders) == parts.plan.world_size:
            return folders[parts.rank]
        accepted = f"a run of as many devices as this one has ({parts.plan.world_size})"
        fix = f"It is of {len(folders)}: hetexp merge makes one model of theirs, which any run goes on from."
        raise CheckpointError(must_be("resume", accepted, str(path), fix))
    wish = Wish.read(str(path), Path())  # of a script's own `run.resume`; else the launcher has chosen
    chosen = choose(Path(wish.path or path), wish.which, contents=False)
    for sentence in chosen.skipped:
        log.warning("resume: %s", sentence)
    return chosen.folder


def _limits_before(parts: Parts, devices: list[dict[str, Any]]) -> list[int | None]:
    """Return the microbatch limits that memory set to the same devices before."""
    known = {(one["id"], one["name"]): one.get("microbatch_limit") for one in devices}
    return [known.get((device.id, device.name)) for device in parts.plan.devices]
