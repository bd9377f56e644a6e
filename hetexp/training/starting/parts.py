"""Builds what a rank has before all ranks agree, and tries the first samples with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from hetexp.balancing.base import BalancingPolicy
from hetexp.checkpoint.weights import load_weights
from hetexp.core.config import Config
from hetexp.core.config.weights import first_weights
from hetexp.core.errors import ConfigError
from hetexp.core.fault import FaultSchedule
from hetexp.core.instantiate import instantiate, parameters
from hetexp.core.plan import Plan
from hetexp.data.base import Data, build_data, same_shape
from hetexp.data.page_locked import on_device
from hetexp.data.sampler import GlobalSampler
from hetexp.hardware.backend import Backend, backend_class, visible_places
from hetexp.model.base import build_model, to_precision
from hetexp.model.dropout import without_dropout
from hetexp.model.first_call import call_once, lazy_names
from hetexp.optimizer.schedule import unit_of
from hetexp.plan.strategy import Strategy
from hetexp.training.data_parallel import DataParallel
from hetexp.training.engine import Engine
from hetexp.training.loss import Loss, batch_counts, build_loss
from hetexp.training.measuring.trial_pass import Trial, first_batch, first_samples
from hetexp.training.nonfinite.loss_scale import check_device
from hetexp.training.seeding import seed_all
from hetexp.training.source import SourceModel
from hetexp.training.starting.agreement import data_facts, model_facts, share_trial
from hetexp.training.streams import check_hooks, sampler_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What a rank builds by itself, before all ranks agree."""

    backend: Backend
    device: torch.device
    data: Data
    train: Dataset[Any]
    evaluation: Dataset[Any] | None
    source: SourceModel | None
    loss: Loss
    strategy: Strategy
    policy: BalancingPolicy
    engine: Engine
    sampler: GlobalSampler
    head: Dataset[Any]
    """Training data whose first samples have indices."""
    first: tuple[Any, Any]
    """Batch of the first samples."""
    model: nn.Module
    """On the CPU."""
    facts: dict[str, Any]
    """What must be equal on all ranks."""


def build_parts(plan: Plan, config: Config, rank: int, store: dist.Store) -> Parts:
    """Build them.

    Raises:
        ConfigError: a class refuses its arguments, or the first samples are no batch.
        SetupError: the device cannot be driven.
    """
    trainer = config.trainer
    backend, device = open_device(plan, config, rank, store)
    # The same seed on every rank: a split that is drawn while the data are built is the same on all ranks.
    seed_all(trainer.seed)
    data = build_data(config.data, config.loss.ignored())
    train, evaluation = data.train, data.evaluation
    loss = build_loss(trainer.loss, config.loss.arguments())
    check_evaluation(config, evaluation is not None, loss)
    if plan.stages or plan.paced:
        train, evaluation = same_shape(train), None if evaluation is None else same_shape(evaluation)
    origin, source = getattr(data, "source", None), None
    if origin is not None:
        source = SourceModel.judging(origin.path, origin.samples, data.facts["scale"], origin.trusted)
    strategy, policy = components(config)
    sampler = sampler_of(strategy, plan, config, train)
    head = first_samples(train)
    first = first_batch(head, data.collate, plan)
    batch_counts(loss, [first[1]], [min(2, len(head))])  # type: ignore[arg-type]  # map-style, as `indexed` is
    model = _build_model(config, data.facts, first[0], plan.precisions[rank])
    check_hooks(model, train)
    return Parts(
        backend=backend,
        device=device,
        data=data,
        train=train,
        evaluation=evaluation,
        source=source,
        loss=loss,
        strategy=strategy,
        policy=policy,
        engine=engine_of(strategy),
        sampler=sampler,
        head=head,
        first=first,
        model=model,
        facts={"data": data_facts(data, sampler), "model": model_facts(model)},
    )


def try_samples(parts: Parts, plan: Plan, config: Config, rank: int, store: dist.Store) -> Parts:
    """Try the first samples for all ranks, share what they show, and return this rank's parts.

    Raises:
        ConfigError: model, loss and samples do not fit together.
    """
    model, collate, precision = parts.model, parts.data.collate, plan.precisions[rank]
    # A stage alone takes no samples, and a device need not hold the whole model.
    device = torch.device("cpu") if plan.stages else parts.device
    model.to(device)
    trial = Trial(
        model,
        build_loss(config.trainer.loss, config.loss.arguments()),
        collate,
        partial(on_device, device=device, dtype=_dtype(precision)),
        nullcontext if plan.stages else partial(parts.backend.autocast, precision),
    )
    tried = trial.run(parts.head, parts.first)
    share_trial(tried, store)
    if not tried.on_copy:  # the model may have counted the pass
        model = _build_model(config, parts.data.facts, parts.first[0], precision)
    return replace(parts, model=model)


def _build_model(config: Config, facts: Mapping[str, Any], inputs: Any, precision: str) -> nn.Module:
    """Return the model with its first weights, on the CPU, in the type of a rank's precision.

    Args:
        inputs: of the first samples, for lazy layers.
    """
    trainer = config.trainer
    # With the CPU's generator: the same weights on all devices, however much the data drew.
    seed_all(trainer.seed)
    model = build_model(config.model, facts, trainer.activation_checkpointing)
    if not config.debug.dropout:
        rates = without_dropout(model)
        log.info("debug.dropout=false: %s", f"0 instead of {', '.join(rates)}" if rates else "there was none")
    if lazy_names(model):
        seed_all(trainer.seed)  # the samples may have drawn numbers, but weights follow the seed
        call_once(model, inputs)
    to_precision(model, _dtype(precision))  # before weights from files, which may be in float64
    weights, strict = first_weights(config.model, parameters(config.model["_target_"]))
    if weights is not None:
        load_weights(model, Path(weights), strict)
    return model


def _dtype(precision: str) -> torch.dtype:
    """Return the type of weights and inputs; the same on every rank."""
    return torch.float64 if precision == "float64" else torch.float32


def components(config: Config) -> tuple[Strategy, BalancingPolicy]:
    """Return the strategy and the policy of a rank.

    Raises:
        ConfigError: a class refuses its arguments.
    """
    return instantiate(config.strategy), instantiate(config.balancing)


def engine_of(strategy: Strategy) -> Engine:
    """Return a rank's side of a strategy."""
    engine: Engine | None = strategy.engine()
    return DataParallel() if engine is None else engine


def open_device(plan: Plan, config: Config, rank: int, store: dist.Store) -> tuple[Backend, torch.device]:
    """Return the backend of this rank's device, and the device for tensors, made current.

    Raises:
        SetupError: this interpreter's torch cannot drive it, or it does not compute in the planned precision.
    """
    torch.set_num_threads(plan.threads[rank])
    torch.autograd.set_detect_anomaly(config.debug.detect_anomaly)
    spec = plan.devices[rank]
    backend = backend_class(spec.backend)(spec)
    backend.faults = FaultSchedule(
        config.fault.events, spec.id, lambda position: store.add(f"fault/{position}", 1) == 1
    )
    backend.spared_port = plan.store_port
    backend.deviation_seed = config.hardware.deviation_seed
    backend.precision = plan.precisions[rank]
    devices = plan.devices_of(rank)
    backend.num_visible = len(set(visible_places(devices))) if len(devices) > 1 else 1
    device = backend.torch_device()
    check_device(backend, plan.precisions[rank])
    return backend, device


def check_evaluation(config: Config, has_data: bool, loss: Loss) -> None:
    """Check that there are the evaluations, and the metric in them, that other keys rely on.

    Raises:
        ConfigError: there are not.
    """
    trainer = config.trainer
    users = {"trainer.early_stopping.patience": trainer.early_stopping.patience is not None}
    users["trainer.schedule"] = unit_of(trainer) == "evaluation"
    reason = "" if has_data else "evaluation data, but `data` has none"
    if not reason and trainer.early_stopping.metric == "accuracy" and type(loss).correct is Loss.correct:
        reason = f"`trainer.early_stopping.metric` loss: `trainer.loss` {trainer.loss} defines no accuracy"
    problems = [f"`{key}` needs {reason}." for key, used in users.items() if used and reason]
    if problems:
        raise ConfigError(problems)
