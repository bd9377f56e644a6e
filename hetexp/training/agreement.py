"""What ranks compare before they train together: data, model, configuration and versions."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

import torch.distributed as dist
from torch import nn

import hetexp
from hetexp.comm.rendezvous import all_gather_json, compare_facts
from hetexp.core.config import Config
from hetexp.core.errors import HandshakeError
from hetexp.core.plan import Plan
from hetexp.data.base import size_of
from hetexp.data.sampler import GlobalSampler
from hetexp.training.group import versions
from hetexp.training.saving.data_facts import contents, contents_problems

log = logging.getLogger(__name__)

LAUNCHER_FIRST_SECONDS = 5.0
"""How much longer than the launcher a rank waits for the others: the launcher can name the late rank."""

HANDSHAKE = "handshake"
"""Topic in the store for the facts that ranks compare before they train."""


def agree(
    plan: Plan, config: Config, rank: int, store: dist.Store, facts: dict[str, Any]
) -> list[dict[str, str]]:
    """Compare the facts that must be equal on all ranks before they train together.

    Versions of torch and Python may differ from vendor to vendor; those of hetexp may not.

    Returns:
        Each rank's versions (`versions`).

    Raises:
        HandshakeError: names each fact that differs, or the rank that did not come.
    """
    local = {"hetexp": hetexp.__version__, "config": plan.config_hash, **facts} | {"runs on": versions()}
    limit = config.launch.timeout_seconds + LAUNCHER_FIRST_SECONDS
    all_facts = all_gather_json(store, HANDSHAKE, rank, plan.world_size, local, limit)
    run_on = [fact.pop("runs on") for fact in all_facts]
    names = [f"rank {r} ({device.id})" for r, device in enumerate(plan.devices)]
    _compare(all_facts, names)
    if any(build != run_on[0] for build in run_on):
        builds = (", ".join(f"{key} {value}" for key, value in build.items()) for build in run_on)
        listed = "; ".join(f"{name}: {build}" for name, build in zip(names, builds, strict=True))
        log.info("ranks of different builds: %s; they compute in %s", listed, ", ".join(plan.precisions))
    return run_on


def agree_as_newcomer(plan: Plan, member: int, store: dist.Store, facts: dict[str, Any]) -> None:
    """Compare the facts of a process that joins a training with those of the run's first rank.

    Raises:
        HandshakeError: names each fact that differs.
    """
    first = json.loads(store.get(f"{HANDSHAKE}/0"))
    first.pop("runs on")
    local = {"hetexp": hetexp.__version__, "config": plan.config_hash, **facts}
    _compare([first, json.loads(json.dumps(local))], ["the first rank", f"member {member}"])


def _compare(facts: list[dict[str, Any]], names: list[str]) -> None:
    """Check that all ranks have the same facts, and the same samples as far as these can be compared.

    Raises:
        HandshakeError: names what differs.
    """
    of_data = [fact["data"].pop("contents", {}) for fact in facts]
    compare_facts(facts, names)
    if problems := contents_problems(of_data, names):
        raise HandshakeError(f"the ranks do not agree: {' '.join(problems)}")


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return facts that distinguish two models: parameter count, and a hash of all names, shapes and types.

    A model's own method `facts` adds facts about weights that its state leaves out.
    """
    shapes = {name: f"{list(value.shape)} {value.dtype}" for name, value in model.state_dict().items()}
    own_facts = getattr(model, "facts", None)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(shapes),
        "shapes": hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:12],
        "shape": dict(list(shapes.items())[:50]),
        **(own_facts() if callable(own_facts) else {}),
    }


def data_facts(data: Any, sampler: GlobalSampler) -> dict[str, Any]:
    """Return facts that distinguish two data sets: lengths, the order of samples, and some samples."""
    evaluation = data.evaluation
    return {
        "training_samples": size_of(data.train),
        "evaluation_samples": size_of(evaluation) if evaluation is not None else 0,
        "sample_order": sampler.fingerprint(),
        "contents": {"training": contents(data.train), "evaluation": contents(evaluation)},
    }
