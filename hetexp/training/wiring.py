"""From the plan to the objects of one rank, once all ranks have agreed on what they build."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import hetexp
from hetexp.checkpoint.folder import load_checkpoint
from hetexp.checkpoint.manifest import search_checkpoint
from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.disposal import formed_groups, let_go
from hetexp.comm.exchange import Exchange
from hetexp.comm.hook import GradientHook
from hetexp.comm.paced_exchange import PacedExchange
from hetexp.comm.rendezvous import compare_facts, exchange, form_group
from hetexp.comm.transports import Job, form_paths
from hetexp.core.config import Config
from hetexp.core.errors import ConfigError
from hetexp.core.fault import FaultSchedule
from hetexp.core.instantiate import instantiate
from hetexp.core.lines import all_rows
from hetexp.core.plan import Plan
from hetexp.data.base import build_data, same_shape
from hetexp.data.dealt import DealtSampler
from hetexp.data.loader import read_ahead
from hetexp.data.sampler import GlobalSampler
from hetexp.hardware.backend import Backend, StagePasses, backend_class, visible_places
from hetexp.hardware.emulation.pacing import tensors
from hetexp.hardware.links import links_of
from hetexp.logger.base import Logger, RunInfo
from hetexp.logger.guard import GuardedLogger
from hetexp.logger.jsonl import MetricsFile
from hetexp.model.base import build_model
from hetexp.model.dropout import without_dropout
from hetexp.optimizer.build import build_optimizer, build_schedule
from hetexp.plan.routes import routes_to_try
from hetexp.plan.strategy import Strategy
from hetexp.strategy.hierarchical_sgd import HierarchicalSGD
from hetexp.strategy.hierarchical_sgd.host_group import HostGroup
from hetexp.strategy.local_sgd.local import LocalTraining
from hetexp.strategy.pipeline.cutting import Cut, cut_model
from hetexp.strategy.pipeline.engine import NothingTrained, Staging
from hetexp.training.balancer import Balancer
from hetexp.training.compiled import compiled
from hetexp.training.loss import build_loss
from hetexp.training.nonfinite.loss_scale import LossScale, check_device
from hetexp.training.recovery.oom_recovery import recovering_guard
from hetexp.training.saving.random_states import seed_all
from hetexp.training.source import SourceModel
from hetexp.training.state import TrainState, on_device

log = logging.getLogger(__name__)

LAUNCHER_FIRST_SECONDS = 5.0
"""How much longer than the launcher a rank waits for the others: the launcher knows which one is late."""

HANDSHAKE = "handshake"
"""Topic in the store under which ranks tell what they are about to train."""
LEAVE_SECONDS = 5.0
"""Longest wait for a thread that exchanges gradients to find out that its peers are gone."""


def build_parts(plan: Plan, config: Config, rank: int, store: dist.Store) -> TrainState:
    """Build everything that this rank trains with.

    Raises:
        HandshakeError: the ranks differ in what they are about to train.
        ConfigError: a class refuses its arguments.
        SetupError: the device cannot be driven, or the group did not form.
    """
    parts, cut, run_on = _build_alone(plan, config, rank, store)
    parts.run_on = tuple(run_on)
    if cut is None:
        join_group(parts, plan, rank, store)
        return parts
    parts.plan, parts.communicator, parts.exchange = connect(
        plan, config, rank, store, parts.device, parts.strategy
    )
    parts.staging = Staging(parts, cut, store)
    attach_pieces(parts, cut)
    return parts


def build_newcomer(plan: Plan, config: Config, rank: int, member: int, store: dist.Store) -> TrainState:
    """Build what a process trains with that is to join others; its group forms later.

    Args:
        plan: has its device at the place `rank`, and need not be the one that it will join.
        member: its own number.

    Raises:
        HandshakeError: it differs from the others in what it would train.
    """
    parts, cut, _ = _build_alone(plan, config, rank, store, member)
    assert cut is None, "stages do not re-form"
    return parts


def _build_alone(
    plan: Plan, config: Config, rank: int, store: dist.Store, member: int | None = None
) -> tuple[TrainState, Cut | None, list[dict[str, str]]]:
    """Build what a rank keeps for the whole run, whoever it trains with.

    Args:
        member: number of a process that is to join others; `None`: all begin together.

    Returns:
        This rank's part of a model that is cut, and what each rank runs on, too.
    """
    trainer = config.trainer
    backend, device = open_device(plan, config, rank, store)
    # The same seed on every rank: a split that is drawn while the data are built is the same on all of them.
    seed_all(trainer.seed)
    data = build_data(config.data)
    train, evaluation = data.train, data.evaluation
    if plan.stages or plan.paced:
        train, evaluation = same_shape(train), None if evaluation is None else same_shape(evaluation)
    num_samples = len(train)  # type: ignore[arg-type]  # map-style, as build_data checked
    wanted = getattr(data, "source", None)
    source = (
        None
        if wanted is None
        else SourceModel.judging(wanted.path, wanted.samples, data.facts["scale"], wanted.trusted)
    )
    strategy = instantiate(config.strategy)
    sampler = _sampler(plan, config, strategy, num_samples)
    # Again, and by the CPU's generator: the same weights whatever the device, and whatever the data drew.
    seed_all(trainer.seed)
    model = build_model(config.model, data.facts, trainer.activation_checkpointing)
    if not config.debug.dropout:
        found = without_dropout(model)
        log.info("debug.dropout=false: %s", f"0 instead of {', '.join(found)}" if found else "there was none")
    model.to(torch.float64 if plan.precisions[rank] == "float64" else torch.float32)
    facts = {"data": data_facts(data, sampler), "model": model_facts(model)}
    if member is None:
        run_on = agree(plan, config, rank, store, facts)
    else:
        run_on = [versions()]
        agree_late(plan, member, store, facts)
    inputs, _ = next(iter(DataLoader(same_shape(train), batch_size=min(2, num_samples))))
    cut = part_of(plan, config, rank, model, inputs) if plan.stages else None
    # From here on dropout and random samples differ from rank to rank, as the samples do.
    seed_all(trainer.seed + 1 + (rank if member is None else member))
    model.to(device)
    total_steps = planned_steps(config, sampler.steps_per_epoch)
    optimizer = build_optimizer(config.optimizer, model if cut is None else trained_part(model, cut))
    parts = TrainState(
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
        schedule=build_schedule(optimizer, trainer.schedule, trainer.warmup_steps, total_steps),
        loss=build_loss(trainer.loss),
        train_data=train,
        eval_data=evaluation,
        sampler=sampler,
        paced=None,
        loggers=(),
        total_steps=total_steps,
        balancer=Balancer(plan),
        loss_scale=LossScale() if "float16" in plan.precisions else None,
        source=source,
    )
    strategy.configure(plan)
    if cut is None:
        parts.example = parts.to_device(inputs)
        # Before the strategy wraps the model: an emulated device delays a gradient before DDP may send it.
        backend.attach(model, optimizer, parts.example)
        parts.compiled = compiled(model, config)
    return parts, cut, run_on


def join_group(
    parts: TrainState,
    plan: Plan,
    rank: int,
    store: dist.Store,
    agree_on_state: Callable[[], None] | None = None,
) -> None:
    """Form the group of a plan's ranks, and all that this rank has with the others; all of them call it.

    Whatever it had with other ranks before is left behind (`leave_group`).

    Args:
        store: of this group alone.
        agree_on_state: brings all ranks to one state as soon as they can talk to each other, where they do
            not begin alike.

    Raises:
        SetupError: the group did not form, or no route carries.
        PeerLostError: another rank is gone.
    """
    strategy, config = parts.strategy, parts.config
    strategy.configure(plan)
    parts.rank = rank
    again = agree_on_state is not None
    parts.plan, parts.communicator, parts.exchange = connect(
        plan, config, rank, store, parts.device, strategy, again
    )
    parts.balancer = _balancer(parts)
    if agree_on_state is not None:
        agree_on_state()
    inner = parts.compiled if parts.compiled is not None else parts.model
    parts.module = strategy.wrap(inner, parts.device)
    strategy.attach_group(parts.module, parts.communicator, parts.example, parts.backend.waiting)
    parts.guard = recovering_guard(parts)
    pace_exchange(parts)
    hook_exchange(parts)
    if strategy.steps == "local" and parts.local is None:
        parts.local = LocalTraining(parts, links_of(parts.plan) if parts.plan.paced else None)
        if isinstance(strategy, HierarchicalSGD):
            (own,) = (group for group in strategy.groups_of(parts.plan.devices) if rank in group)
            parts.local.host = HostGroup(parts, own, store)


def leave_group(parts: TrainState) -> None:
    """Leave the other ranks, in the midst of whatever this one does with them; safe to call twice.

    Those that wait for this rank learn of it at once. Model, optimizer and device stay as they are.
    """
    held = formed_groups()
    if parts.exchange is not None:
        parts.exchange.abandon()
    parts.communicator.abandon()
    ended = end_exchanging(parts)
    if parts.exchange is not None and ended:
        parts.exchange.close()
    elif not ended:  # it still reads the exchange's memory
        log.warning("the thread that exchanges gradients did not end within %g s, and is left", LEAVE_SECONDS)
    if parts.hook is not None:
        parts.exchanged_before = parts.hook.sent_bytes, parts.hook.exchange_seconds
    parts.module = parts.strategy.unwrap(parts.module, parts.model)
    parts.optimizer.zero_grad(set_to_none=True)
    parts.exchange, parts.hook, parts.paced, parts.guard = None, None, None, None
    parts.communicator = SoloCommunicator()
    let_go(held)


def end_exchanging(parts: TrainState) -> bool:
    """End the threads that exchange gradients; tell whether they have ended."""
    return all(one.close(LEAVE_SECONDS) for one in (parts.hook, parts.paced) if one is not None)


def _balancer(parts: TrainState) -> Balancer:
    trainer, policy = parts.config.trainer, instantiate(parts.config.balancing)
    # Samples that were dealt out for good cannot follow the devices' speeds, and stages neither.
    settings = policy.settings if policy.follows and not parts.strategy.apart else None
    ahead = read_ahead(parts.train_data, trainer.num_workers, trainer.prefetch_factor)
    return Balancer(parts.plan, settings, ahead)


def open_device(plan: Plan, config: Config, rank: int, store: dist.Store) -> tuple[Backend, torch.device]:
    """Return what drives this rank's device, and the device for tensors, made current.

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
    backend.num_visible = len(set(visible_places(plan.cards))) if plan.cards else 1
    device = backend.torch_device()
    check_device(backend, plan.precisions[rank])
    return backend, device


def pace_exchange(parts: TrainState) -> None:
    """Let the exchange of gradients take as long as the links of emulated devices, where there are any."""
    plan, backend = parts.plan, parts.backend
    exchange = parts.exchange
    if not plan.paced or exchange is None:
        return
    links, limit = links_of(plan), parts.config.comm.timeout_seconds
    parts.paced = PacedExchange(
        exchange, links, parts.rank, backend.synchronize, backend.backward_done, limit, parts.config.comm.wire
    )
    if parts.time_scale is not None:  # found before, with other members
        parts.paced.start(parts.time_scale)
    parts.strategy.exchange_through(parts.module, parts.paced.hook)


def hook_exchange(parts: TrainState) -> None:
    """Let DDP's gradients travel by the plan's route and wire, where torch's own exchange does not do it."""
    plan = parts.plan
    plain = plan.way.library not in (None, "shm") and plan.wire == "float32"
    if parts.exchange is None or parts.paced is not None or plain or parts.strategy.steps != "joint":
        return
    parts.hook = GradientHook(parts.exchange, parts.config.comm.wire, plan.world_size)
    parts.hook.sent_bytes, parts.hook.exchange_seconds = parts.exchanged_before
    parts.strategy.exchange_through(parts.module, parts.hook.hook)


def _sampler(plan: Plan, config: Config, strategy: Strategy, num_samples: int) -> GlobalSampler:
    trainer = config.trainer
    sizes = (num_samples, trainer.global_batch_size, trainer.seed)
    if strategy.apart:
        return DealtSampler(*sizes, plan.shares, trainer.drop_last, trainer.overfit_batches)
    return GlobalSampler(*sizes, trainer.drop_last, trainer.overfit_batches)


def part_of(plan: Plan, config: Config, rank: int, model: nn.Module, inputs: Any) -> Cut:
    """Cut the model, after loading what `resume` names: a checkpoint is of the whole model.

    Args:
        model: whole, on the CPU.
        inputs: a small batch of the training data.

    Raises:
        CheckpointError: the checkpoint is not there, not complete or not of this model.
        ConfigError: the model cannot be cut, or has nothing to train.
    """
    if config.resume is not None:
        load_checkpoint(search_checkpoint(Path(plan.working_dir, config.resume))[0], model, None)
    dtype = torch.float64 if plan.precisions[rank] == "float64" else torch.float32
    cut = cut_model(plan, rank, model, on_device(inputs, torch.device("cpu"), dtype))
    if not cut.whole.trained:
        raise ConfigError("`model` must have a parameter that requires a gradient, but has none.")
    return cut


def trained_part(model: nn.Module, cut: Cut) -> nn.Module:
    """Return the module whose parameters this rank's optimizer gets."""
    return model if any(p.requires_grad for p in model.parameters()) else NothingTrained()


def attach_pieces(parts: TrainState, cut: Cut) -> None:
    """Let the device know this rank's pieces of the model, instead of the whole one."""
    stages = []
    for stage, piece, example in zip(cut.stages, cut.pieces, cut.examples, strict=True):
        inputs = parts.to_device(example)
        bounds = (stage.first_layer, stage.end_layer)
        takes, gives = (cut.layouts[n].num_bytes(parts.dtype) if n in cut.layouts else 0 for n in bounds)
        if takes:
            for tensor in tensors(inputs):
                tensor.requires_grad_(tensor.is_floating_point())
        stages.append(StagePasses(piece, inputs, takes, gives))
    parts.backend.attach_stages(stages, parts.model, parts.optimizer)


def connect(
    plan: Plan,
    config: Config,
    rank: int,
    store: dist.Store,
    device: torch.device,
    strategy: Strategy,
    again: bool = False,
) -> tuple[Plan, Communicator, Exchange | None]:
    """Return what this rank talks to the others through, and what sums large tensors over all of them.

    Args:
        again: whether the run has trained before, with other members.

    Returns:
        The plan too: with another route where the self-test found that the planned one does not carry.

    Raises:
        SetupError: the group did not form, or no route carries.
        PeerLostError: another rank is gone.
    """
    comm = config.comm
    if strategy.solo:
        return plan, SoloCommunicator(), None
    if plan.world_size == 1:
        limit = comm.timeout_seconds
        return plan, form_group(store, rank, 1, plan.collective_backend, device, limit), None
    apart = strategy.steps == "joint" and (plan.paced or comm.wire != "float32")
    limits = comm.timeout_seconds, comm.self_test_seconds
    job = Job(store, rank, plan.world_size, device, *limits, apart, again)
    paths = form_paths(routes_to_try(plan), job)
    if paths.fallback is not None:
        route = paths.route if plan.route is not None else None
        native = paths.route.library not in (None, "gloo", "shm")
        backend = str(paths.route.library) if native else "gloo"
        plan = replace(plan, route=route, collective_backend=backend, route_fallback=paths.fallback)
    return plan, paths.communicator, paths.exchange


def agree(
    plan: Plan, config: Config, rank: int, store: dist.Store, facts: dict[str, Any]
) -> list[dict[str, str]]:
    """Compare with the other ranks what must be equal before they train together.

    Versions of torch and Python may differ from vendor to vendor; those of hetexp may not.

    Returns:
        What each rank runs on (`versions`).

    Raises:
        HandshakeError: names each fact that differs, or the rank that did not come.
    """
    mine = {"hetexp": hetexp.__version__, "config": plan.config_hash, **facts}
    limit = config.launch.timeout_seconds + LAUNCHER_FIRST_SECONDS
    everyone = exchange(store, HANDSHAKE, rank, plan.world_size, mine | {"runs on": versions()}, limit)
    run_on = [fact.pop("runs on") for fact in everyone]
    names = [f"rank {r} ({device.id})" for r, device in enumerate(plan.devices)]
    compare_facts(everyone, names)
    if any(one != run_on[0] for one in run_on):
        builds = (", ".join(f"{key} {value}" for key, value in one.items()) for one in run_on)
        listed = "; ".join(f"{name}: {build}" for name, build in zip(names, builds, strict=True))
        log.info("ranks of different builds: %s; they compute in %s", listed, ", ".join(plan.precisions))
    return run_on


def agree_late(plan: Plan, member: int, store: dist.Store, facts: dict[str, Any]) -> None:
    """Compare what a process that joins others would train with what the run's first rank reported.

    Raises:
        HandshakeError: names each fact that differs.
    """
    first = json.loads(store.get(f"{HANDSHAKE}/0"))
    first.pop("runs on")
    mine = {"hetexp": hetexp.__version__, "config": plan.config_hash, **facts}
    compare_facts([first, json.loads(json.dumps(mine))], ["the first rank", f"member {member}"])


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return what tells two models apart: parameter count, a hash of all names, shapes and types, and what a
    model's own method `facts` says of weights that its state leaves out.
    """
    shapes = {name: f"{list(value.shape)} {value.dtype}" for name, value in model.state_dict().items()}
    named = dict(list(shapes.items())[:50])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(shapes),
        "shapes": hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:12],
        "shape": named,
        **_facts_of_its_own(model),
    }


def _facts_of_its_own(model: nn.Module) -> dict[str, Any]:
    tell = getattr(model, "facts", None)
    return dict(tell()) if callable(tell) else {}


def data_facts(data: Any, sampler: GlobalSampler) -> dict[str, Any]:
    """Return what tells two data sets apart: their lengths, and the order in which samples will come."""
    evaluation = data.evaluation
    return {
        "training_samples": len(data.train),
        "evaluation_samples": len(evaluation) if evaluation is not None else 0,
        "sample_order": sampler.fingerprint(),
    }


def planned_steps(config: Config, steps_per_epoch: int) -> int:
    """Return the optimizer steps of the whole run: whichever of the limits comes first."""
    trainer = config.trainer
    if trainer.fast_dev_run:
        return trainer.fast_dev_run
    limits = [trainer.max_steps, trainer.max_epochs * steps_per_epoch if trainer.max_epochs else None]
    return min(limit for limit in limits if limit is not None)


def start_loggers(parts: TrainState) -> tuple[Logger, ...]:
    """Open `metrics.jsonl` and the configured tracker; rank 0 calls it, after `resume`.

    If the file has rows already, another process of this run wrote them: the tracker gets them again.
    """
    info = run_info(parts)
    path = Path(parts.plan.run_dir) / "metrics.jsonl"
    metrics: Logger = MetricsFile(path)
    begun = path.stat().st_size > 0
    tracker: Logger = GuardedLogger(instantiate(parts.config.logger))
    for logger in (metrics, tracker):
        logger.start(info)
    if begun:
        tracker.retell(all_rows(path))
    return metrics, tracker


def run_info(parts: TrainState) -> RunInfo:
    """Return what names this run in a tracker.

    A run that goes on from another one is a run of its own there, since both may have logged the same steps;
    it joins the sweep of the other one, and its configuration says which one that was.
    """
    plan, before = parts.plan, parts.resumed_from
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
    """Return what distinguishes runs: each group's option, with the group if it says nothing alone."""
    tags = ["emulated"] if plan.emulated else []
    tags += ["resumed"] if resumed else []
    chosen = {"strategy": plan.strategy} | plan.choices
    for group in ("hardware", "strategy", "balancing", "model", "data"):
        option = chosen.get(group)
        if option:
            tags.append(f"{group}={option}" if option in ("auto", "custom") else option)
    return tuple(dict.fromkeys(tags))


def versions() -> dict[str, str]:
    """Return the versions that this rank runs on."""
    return {"python": platform.python_version(), "torch": torch.__version__}
