"""Builds the objects of one rank from the plan, after all ranks have compared data, model and versions."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import hetexp
from hetexp.balancing.base import BalancingPolicy
from hetexp.comm.communicator import SoloCommunicator
from hetexp.comm.rendezvous import all_gather_json, compare_facts
from hetexp.core.config import Config
from hetexp.core.config.trainer import how_it_ends
from hetexp.core.errors import ConfigError, HandshakeError
from hetexp.core.fault import FaultSchedule
from hetexp.core.instantiate import instantiate
from hetexp.core.lines import all_rows
from hetexp.core.plan import Plan
from hetexp.data.base import build_data, same_shape
from hetexp.data.sampler import GlobalSampler
from hetexp.hardware.backend import Backend, backend_class, visible_places
from hetexp.logger.base import Logger, RunInfo
from hetexp.logger.guard import GuardedLogger
from hetexp.logger.jsonl import MetricsFile
from hetexp.model.base import build_model
from hetexp.model.dropout import without_dropout
from hetexp.optimizer.build import build_optimizer, schedule_of
from hetexp.optimizer.groups import parameter_groups
from hetexp.optimizer.schedule import unit_of
from hetexp.plan.strategy import Strategy
from hetexp.training.balancer import Balancer
from hetexp.training.data_parallel import DataParallel
from hetexp.training.engine import Engine
from hetexp.training.group import versions
from hetexp.training.loss import Loss, build_loss
from hetexp.training.nonfinite.loss_scale import LossScale, check_device
from hetexp.training.saving.data_facts import contents, contents_problems
from hetexp.training.seeding import seed_all
from hetexp.training.source import SourceModel
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

LAUNCHER_FIRST_SECONDS = 5.0
"""How much longer than the launcher a rank waits for the others: the launcher can name the late rank."""

HANDSHAKE = "handshake"
"""Topic in the store for the facts that ranks compare before they train."""


def build_state(plan: Plan, config: Config, rank: int, store: dist.Store) -> TrainState:
    """Build this rank's state and join its group.

    Raises:
        HandshakeError: the ranks differ in data, model, configuration or version of hetexp.
        ConfigError: a class refuses its arguments.
        SetupError: the device cannot be driven, or the group did not form.
    """
    state = _build_ungrouped(plan, config, rank, store)
    state.engine.join(plan, rank, store)
    return state


def build_newcomer(plan: Plan, config: Config, rank: int, member: int, store: dist.Store) -> TrainState:
    """Build the state of a process that joins a training under way; its group forms later.

    Args:
        plan: any plan with its device at the place `rank`; it may join under another one.
        member: its own number.

    Raises:
        HandshakeError: it differs from the others in data, model, configuration or version of hetexp.
    """
    return _build_ungrouped(plan, config, rank, store, member)


def _build_ungrouped(
    plan: Plan, config: Config, rank: int, store: dist.Store, member: int | None = None
) -> TrainState:
    """Build the state that a rank keeps for the whole run, in whatever group.

    Args:
        member: number of a process that joins a training under way; `None`: all begin together.
    """
    trainer = config.trainer
    backend, device = open_device(plan, config, rank, store)
    # The same seed on every rank: a split that is drawn while the data are built is the same on all ranks.
    seed_all(trainer.seed)
    data = build_data(config.data)
    train, evaluation = data.train, data.evaluation
    loss = build_loss(trainer.loss)
    check_evaluation(config, evaluation is not None, loss)
    if plan.stages or plan.paced:
        train, evaluation = same_shape(train), None if evaluation is None else same_shape(evaluation)
    num_samples = len(train)  # type: ignore[arg-type]  # map-style, as build_data checked
    origin, source = getattr(data, "source", None), None
    if origin is not None:
        source = SourceModel.judging(origin.path, origin.samples, data.facts["scale"], origin.trusted)
    strategy, policy = components(config)
    engine = engine_of(strategy)
    sampler = strategy.sampler(plan, config, num_samples)
    # Again, and with the CPU's generator: the same weights on all devices, however much the data drew.
    seed_all(trainer.seed)
    model = build_model(config.model, data.facts, trainer.activation_checkpointing)
    if not config.debug.dropout:
        rates = without_dropout(model)
        log.info("debug.dropout=false: %s", f"0 instead of {', '.join(rates)}" if rates else "there was none")
    model.to(torch.float64 if plan.precisions[rank] == "float64" else torch.float32)
    facts = {"data": data_facts(data, sampler), "model": model_facts(model)}
    if member is None:
        run_on = agree(plan, config, rank, store, facts)
    else:
        run_on = [versions()]
        agree_as_newcomer(plan, member, store, facts)
    groups = parameter_groups(config.optimizer, model)  # of the whole model, before it is cut
    inputs, _ = next(iter(DataLoader(same_shape(train), batch_size=min(2, num_samples))))
    trained = engine.shard(plan, config, rank, model, inputs)
    # From here on dropout and random samples differ from rank to rank, as the samples do.
    seed_all(trainer.seed + 1 + (rank if member is None else member))
    model.to(device)
    total_steps = planned_steps(config, sampler.steps_per_epoch)
    if rank == 0 and member is None and trainer.max_steps is not None and trainer.epochs is not None:
        log.info("%s", how_it_ends(trainer, sampler.steps_per_epoch))
    optimizer = build_optimizer(config.optimizer, trained, groups=groups, lr_factor=trainer.lr_factor)
    state = TrainState(
        plan=plan,
        config=config,
        rank=rank,
        device=device,
        backend=backend,
        communicator=SoloCommunicator(),
        strategy=strategy,
        model=model,
        module=model,
        optimizer=optimizer,
        schedule=schedule_of(optimizer, trainer, total_steps, sampler.steps_per_epoch),
        loss=loss,
        train_data=train,
        eval_data=evaluation,
        sampler=sampler,
        loggers=(),
        total_steps=total_steps,
        engine=engine,
        policy=policy,
        balancer=Balancer(plan),
        loss_scale=LossScale() if "float16" in plan.precisions else None,
        source=source,
        data_facts=facts["data"],
        run_on=tuple(run_on),
    )
    strategy.configure(plan)
    engine.prepare(inputs)
    return state


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
        "training_samples": len(data.train),
        "evaluation_samples": len(evaluation) if evaluation is not None else 0,
        "sample_order": sampler.fingerprint(),
        "contents": {"training": contents(data.train), "evaluation": contents(evaluation)},
    }


def planned_steps(config: Config, steps_per_epoch: int) -> int:
    """Return the optimizer steps of the whole run, by the lower of the two limits."""
    trainer = config.trainer
    if trainer.fast_dev_run:
        return trainer.fast_dev_run
    limits = [trainer.max_steps, trainer.epochs * steps_per_epoch if trainer.epochs else None]
    return min(limit for limit in limits if limit is not None)


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


def start_loggers(state: TrainState) -> tuple[Logger, ...]:
    """Open `metrics.jsonl` and the configured tracker; rank 0 calls it, after `resume`.

    If the file has rows already, another process of this run wrote them: the tracker then gets them again.
    """
    info = run_info(state)
    path = Path(state.plan.run_dir) / "metrics.jsonl"
    metrics: Logger = MetricsFile(path)
    begun = path.stat().st_size > 0
    tracker: Logger = GuardedLogger(instantiate(state.config.logger))
    for logger in (metrics, tracker):
        logger.start(info)
    if begun:
        tracker.retell(all_rows(path))
    return metrics, tracker


def run_info(state: TrainState) -> RunInfo:
    """Return the names and the configuration of this run for a tracker.

    A resumed run is a separate run there, since both runs may have logged the same steps. It joins the sweep
    of the first one, and its configuration names that run.
    """
    plan, before = state.plan, state.resumed_from
    about_plan = {
        "devices": [str(d) for d in plan.all_devices],
        "shares": list(plan.card_shares or plan.shares),
        "overrides": list(plan.overrides),
    }
    return RunInfo(
        run_id=plan.run_id,
        run_dir=Path(plan.run_dir),
        name=plan.name,
        group=plan.group or (before["group"] if before is not None else None),
        job_type="sweep" if plan.group else "train",
        tags=_tags(plan, resumed=before is not None),
        config=plan.config | {"plan": about_plan} | ({"resumed_from": before} if before is not None else {}),
    )


def _tags(plan: Plan, resumed: bool) -> tuple[str, ...]:
    """Return the option of each configuration group; `auto` and `custom` with the name of the group."""
    tags = ["emulated"] if plan.emulated else []
    tags += ["resumed"] if resumed else []
    options = {"strategy": plan.strategy} | plan.choices
    for group in ("hardware", "strategy", "balancing", "model", "data"):
        option = options.get(group)
        if option:
            tags.append(f"{group}={option}" if option in ("auto", "custom") else option)
    return tuple(dict.fromkeys(tags))
