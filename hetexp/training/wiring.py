"""Builds the objects of one rank from the plan, after all ranks have compared data, model and versions."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetexp.balancing.base import BalancingPolicy
from hetexp.checkpoint.weights import load_weights
from hetexp.comm.communicator import SoloCommunicator
from hetexp.comm.forms import sparse_parameters
from hetexp.core.config import Config
from hetexp.core.config.trainer import how_it_ends
from hetexp.core.config.weights import first_weights
from hetexp.core.errors import ConfigError, must_be
from hetexp.core.fault import FaultSchedule
from hetexp.core.files import write_text
from hetexp.core.instantiate import instantiate, parameters
from hetexp.core.lines import all_rows
from hetexp.core.plan import Plan
from hetexp.data.base import build_data, indexed, same_shape
from hetexp.data.page_locked import on_device
from hetexp.data.samples import Collate
from hetexp.hardware.backend import Backend, backend_class, visible_places
from hetexp.logger.base import Logger, RunInfo
from hetexp.logger.guard import GuardedLogger
from hetexp.logger.jsonl import EARLIER_METRICS, METRICS, MetricsFile
from hetexp.model.base import build_model, to_precision
from hetexp.model.dropout import without_dropout
from hetexp.model.first_call import call_once, lazy_names
from hetexp.optimizer.build import build_optimizer, schedule_of
from hetexp.optimizer.groups import parameter_groups
from hetexp.optimizer.muon import keep_replicas_equal
from hetexp.optimizer.schedule import unit_of
from hetexp.plan.strategy import Strategy
from hetexp.training.agreement import agree, agree_as_newcomer, data_facts, model_facts
from hetexp.training.balancer import Balancer
from hetexp.training.data_parallel import DataParallel
from hetexp.training.engine import Engine
from hetexp.training.group import versions
from hetexp.training.loss import Loss, batch_counts, build_loss
from hetexp.training.measuring.trial_pass import Trial, first_batch
from hetexp.training.nonfinite.loss_scale import LossScale, check_device
from hetexp.training.seeding import seed_all
from hetexp.training.source import SourceModel
from hetexp.training.state import TrainState
from hetexp.training.streams import check_hooks, sampler_of

log = logging.getLogger(__name__)

TAKES_SPARSE = (torch.optim.SGD, torch.optim.Adagrad)
"""torch's optimizers that take sparse gradients beside dense ones."""


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
    trainer, clock = config.trainer, _Clock()
    backend, device = open_device(plan, config, rank, store)
    clock.lap("device")
    # The same seed on every rank: a split that is drawn while the data are built is the same on all ranks.
    seed_all(trainer.seed)
    data = build_data(config.data)
    train, evaluation = data.train, data.evaluation
    loss = build_loss(trainer.loss, config.loss.arguments())
    check_evaluation(config, evaluation is not None, loss)
    if plan.stages or plan.paced:
        train, evaluation = same_shape(train), None if evaluation is None else same_shape(evaluation)
    origin, source = getattr(data, "source", None), None
    if origin is not None:
        source = SourceModel.judging(origin.path, origin.samples, data.facts["scale"], origin.trusted)
    strategy, policy = components(config)
    engine = engine_of(strategy)
    sampler = sampler_of(strategy, plan, config, train)
    dtype = torch.float64 if plan.precisions[rank] == "float64" else torch.float32
    head = indexed(same_shape(train), 2)
    first = first_batch(head, data.collate, plan)
    _check_count(loss, data.collate, first[1])
    model = _build_model(config, data.facts, first[0], dtype)
    check_hooks(model, train)
    facts = {"data": data_facts(data, sampler), "model": model_facts(model)}
    if member is None:
        run_on = agree(plan, config, rank, store, facts)
    else:
        run_on = [versions()]
        agree_as_newcomer(plan, member, store, facts)
    groups = parameter_groups(config.optimizer, model)  # of the whole model, before it is cut
    if plan.stages:  # while the model is whole
        moved = partial(on_device, device=torch.device("cpu"), dtype=next(model.parameters()).dtype)
        Trial(model, loss, data.collate, moved).run(head, first)
    trained = engine.shard(plan, config, rank, model, first[0])
    model.to(device)
    clock.lap("data and model")
    total_steps = planned_steps(config, sampler.steps_per_epoch)
    if rank == 0 and member is None and trainer.max_steps is not None and trainer.epochs is not None:
        known = sampler.steps_per_epoch
        log.info("%s", how_it_ends(trainer, known if known < sys.maxsize else None))
    optimizer = build_optimizer(config.optimizer, trained, groups=groups, lr_factor=trainer.lr_factor)
    _check_sparse(optimizer, model)
    keep_replicas_equal(optimizer, plan.devices)
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
        collate=data.collate,
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
    if not plan.stages:
        Trial(model, loss, data.collate, state.to_device, state.autocast).run(head, first)
    clock.lap("optimizer and first pass")
    # From here on dropout and random samples differ from rank to rank, as the samples do.
    seed_all(trainer.seed + 1 + (rank if member is None else member))
    strategy.configure(plan)
    engine.prepare(first[0])
    clock.show(member)
    return state


class _Clock:
    """Seconds of the phases of a rank's start."""

    def __init__(self) -> None:
        self._last, self._seconds = time.perf_counter(), dict[str, float]()

    def lap(self, phase: str) -> None:
        """End a phase."""
        now = time.perf_counter()
        self._seconds[phase], self._last = now - self._last, now

    def show(self, member: int | None) -> None:
        """Log the phases of a member that joins a training under way."""
        if member is not None:
            phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self._seconds.items())
            log.info("member %d is built: %s", member, phases)


def _build_model(config: Config, facts: Mapping[str, Any], inputs: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model with its first weights, on the CPU, floating-point ones in this type.

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
    to_precision(model, dtype)  # before weights from files, which may be in float64
    weights, strict = first_weights(config.model, parameters(config.model["_target_"]))
    if weights is not None:
        load_weights(model, Path(weights), strict)
    return model


def _check_count(loss: Loss, collate: Collate, targets: Any) -> None:
    """Check that the loss can count the elements of a batch.

    Raises:
        ConfigError: it cannot, or takes rows for samples where tensors have none.
    """
    if loss.counts_rows and not collate.has_rows:
        accepted = "the dotted path of a function of the targets, as a batch's tensors have no rows to count"
        raise ConfigError(must_be("loss.count", accepted, "samples"))
    batch_counts(loss, [targets])


def _check_sparse(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Check that one of torch's optimizers takes the sparse gradients of a model.

    Raises:
        ConfigError: it does not, or takes no others, of which there are some.
    """
    sparse = sparse_parameters(model)
    if not sparse or type(optimizer).__module__.partition(".")[0] != "torch":
        return
    named = [(name, p in sparse) for name, p in model.named_parameters() if p.requires_grad]
    is_sparse_adam = isinstance(optimizer, torch.optim.SparseAdam)
    odd = next((name for name, is_sparse in named if is_sparse != is_sparse_adam), None)
    if odd is None or (not is_sparse_adam and isinstance(optimizer, TAKES_SPARSE)):
        return
    accepted = "torch.optim.SGD or Adagrad"
    if not is_sparse_adam:
        accepted += ", or SparseAdam if all gradients are sparse"
    form = "dense" if is_sparse_adam else "sparse (sparse=True)"
    target = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    raise ConfigError(must_be("optimizer._target_", accepted, target, f"The gradient of {odd} is {form}."))


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

    If the file has rows already, another process of this run wrote them: the tracker then gets them again. It
    also gets the rows of the run that this one goes on from, since a killed run's own tracker lacks the last.
    """
    info = run_info(state)
    path = Path(state.plan.run_dir) / METRICS
    earlier = _earlier_rows(state)
    metrics: Logger = MetricsFile(path)
    begun = path.stat().st_size > 0
    tracker: Logger = GuardedLogger(instantiate(state.config.logger))
    for logger in (metrics, tracker):
        logger.start(info)
    if begun or earlier:
        tracker.retell([*earlier, *(all_rows(path) if begun else ())])
    return metrics, tracker


def _earlier_rows(state: TrainState) -> list[dict[str, Any]]:
    """Return the metrics of the runs before this one, up to the checkpoint that it goes on from.

    The run folder keeps them in `EARLIER_METRICS`, for later processes of this run, and for runs that go on
    from it. There are none if the checkpoint is no longer beside the metrics of its run.
    """
    run_dir = Path(state.plan.run_dir)
    kept = run_dir / EARLIER_METRICS
    before = state.resumed_from
    if kept.exists() or before is None or before.get("run_id") == state.plan.run_id:
        return list(all_rows(kept))
    checkpoint = Path(state.plan.working_dir, state.config.resume or "").absolute()
    folders = (folder for folder in (checkpoint, *checkpoint.parents[:3]) if (folder / METRICS).is_file())
    source = next(folders, run_dir)
    if source == run_dir:
        return []
    rows = list(all_rows(source / EARLIER_METRICS))
    for row in all_rows(source / METRICS):
        if rows and row["step"] < rows[-1]["step"]:  # it went on from its own checkpoint
            rows = [earlier for earlier in rows if earlier["step"] < row["step"]]
        rows.append(row)
    rows = [row for row in rows if row["step"] <= before["step"]]
    write_text(kept, "".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


def run_info(state: TrainState) -> RunInfo:
    """Return the names and the configuration of this run for a tracker.

    A resumed run is a separate run there, since both runs may have logged the same steps. It joins the group
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
        group=state.group,
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
