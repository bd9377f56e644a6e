"""What ranks compare before they train together: data, model, configuration and versions.

One rank tries the first samples for all. Its result, and the error of a rank that cannot start, travel here.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

import hetexp
from hetexp.comm.rendezvous import all_gather_json, compare_facts
from hetexp.core.config import Config
from hetexp.core.errors import HandshakeError, StartRefusedError
from hetexp.core.plan import Plan
from hetexp.data.base import size_of
from hetexp.data.sampler import GlobalSampler
from hetexp.hardware.backend import backend_class
from hetexp.training.group import versions
from hetexp.training.loss import Loss, single_losses
from hetexp.training.measuring.trial_pass import Tried
from hetexp.training.saving.data_facts import contents, contents_problems

log = logging.getLogger(__name__)

LAUNCHER_FIRST_SECONDS = 5.0
"""How much longer than the launcher a rank waits for the others: the launcher can name the late rank."""

HANDSHAKE = "handshake"
"""Topic in the store for the facts that ranks compare before they train."""
REFUSED = "refused"
"""The only fact of a rank that cannot start: the class of its error."""
TRIAL = "trial"
"""Key in the store of what the trial of the first samples has shown."""


def agree(
    plan: Plan, config: Config, rank: int, store: dist.Store, facts: dict[str, Any]
) -> list[dict[str, str]]:
    """Compare the facts that must be equal on all ranks before they train together.

    Versions of torch and Python may differ from vendor to vendor; those of hetexp may not.

    Returns:
        Each rank's versions (`versions`).

    Raises:
        HandshakeError: names each fact that differs, or the rank that did not come.
        StartRefusedError: another rank cannot start (`starting_together`).
    """
    local = {"hetexp": hetexp.__version__, "config": plan.config_hash, **facts} | {"runs on": versions()}
    all_facts = all_gather_json(store, HANDSHAKE, rank, plan.world_size, local, _limit(config))
    for other, fact in enumerate(all_facts):
        _heed(plan, other, fact)
    run_on = [fact.pop("runs on") for fact in all_facts]
    names = [f"rank {r} ({device.id})" for r, device in enumerate(plan.devices)]
    _compare(all_facts, names)
    if any(build != run_on[0] for build in run_on):
        builds = (", ".join(f"{key} {value}" for key, value in build.items()) for build in run_on)
        listed = "; ".join(f"{name}: {build}" for name, build in zip(names, builds, strict=True))
        log.info("ranks of different builds: %s; they compute in %s", listed, ", ".join(plan.precisions))
    return run_on


def trying_rank(plan: Plan) -> int:
    """Return the rank that tries the first samples for all.

    It is the first one that computes on the CPU: after a wrong index a card gives no reason, and no result.
    """
    on_cpu = (r for r, spec in enumerate(plan.devices) if backend_class(spec.backend).computes_on_cpu)
    return next(on_cpu, 0)


@contextmanager
def starting_together(plan: Plan, config: Config, rank: int, store: dist.Store) -> Iterator[None]:
    """Let the other ranks end at once if the block fails, in which this rank builds what it is to agree on.

    Most errors come on every rank. Then the rank that tries the samples reports its own, and the others none.

    Raises:
        StartRefusedError: that rank has failed as well.
    """
    try:
        yield
    except Exception as error:  # the user's own classes run any code
        with suppress(RuntimeError):  # the launcher may be gone
            store.set(f"{HANDSHAKE}/{rank}", json.dumps({REFUSED: type(error).__name__}))
            teller = trying_rank(plan)
            if teller != rank:
                store.wait([f"{HANDSHAKE}/{teller}"], timedelta(seconds=_limit(config)))
                _heed(plan, teller, json.loads(store.get(f"{HANDSHAKE}/{teller}")))
        raise


def share_trial(tried: Tried, store: dist.Store) -> None:
    """Give all ranks the result of the trial; the rank that tries calls it before `agree`."""
    store.set(TRIAL, json.dumps({"seen_dims": tried.seen_dims, "remarks": tried.remarks}))


def heed_trial(loss: Loss, store: dist.Store, tell: bool) -> None:
    """Take over the result of the trial; all ranks call it after `agree`.

    Args:
        tell: whether this rank logs the trial's remarks.
    """
    result = json.loads(store.get(TRIAL))
    for single, dim in zip(single_losses(loss), result["seen_dims"], strict=True):
        single.seen_dim = dim
    for remark in result["remarks"] if tell else ():
        log.warning("%s", remark)


def _heed(plan: Plan, rank: int, facts: dict[str, Any]) -> None:
    """End this rank's start if another rank cannot start."""
    if REFUSED in facts:
        device = plan.devices[rank].id
        raise StartRefusedError(f"rank {rank} ({device}) cannot start, and reports why.") from None


def _limit(config: Config) -> float:
    """Return the most seconds that ranks wait for each other before they train."""
    return config.launch.timeout_seconds + LAUNCHER_FIRST_SECONDS


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
