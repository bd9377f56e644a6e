"""`hetexp.setup`: from the user's model, optimizer and data to a run on the available devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, default_collate

from hetexp.comm.communicator import SoloCommunicator
from hetexp.core.config import COLLATE, Config, read_config
from hetexp.core.errors import ConfigError, SetupError, UsageError, must_be
from hetexp.core.instantiate import check_component
from hetexp.core.plan import Plan
from hetexp.core.precision import precision_problems
from hetexp.core.rank_env import ENGINE
from hetexp.core.split import apportion
from hetexp.data.base import as_data, indexed, stream_of
from hetexp.data.loader import PREFETCH, read_ahead
from hetexp.data.sampler import GlobalSampler
from hetexp.data.samples import Explained, build_function
from hetexp.data.streams.stream import StreamSampler
from hetexp.hardware.backend import Backend, backend_class
from hetexp.library.alone import FirstLine, device_alone, plan_alone, torch_device_alone
from hetexp.library.batches import Collate, check_dataset
from hetexp.library.front import Called
from hetexp.library.run import Run
from hetexp.model.first_call import call_once, lazy_names
from hetexp.optimizer.muon import keep_replicas_equal
from hetexp.plan.exchange_checks import float64_problem
from hetexp.training.balancer import Balancer
from hetexp.training.loss import Loss
from hetexp.training.replica import Replica
from hetexp.training.seeding import seed_all, seeded
from hetexp.training.starting.agreement import agree, data_facts, model_facts
from hetexp.training.starting.parts import components, engine_of, open_device
from hetexp.training.state import TrainState
from hetexp.training.wiring import start_loggers


@dataclass
class Launched:
    """The objects of a rank that runs a script under `hetexp launch`."""

    plan: Plan
    rank: int
    store: dist.Store
    ready: Callable[[], None]
    """Called once all ranks agree."""
    run: Run | None = None
    """The result of the script's `setup`."""


CALL_FIRST = "Call the model once, with a batch, before hetexp.setup."
_launched: Launched | None = None


def begin_as(launched: Launched | None) -> None:
    """Let `setup` in this process be a rank of a plan; the worker calls it."""
    global _launched
    _launched = launched


def setup(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any],
    *,
    global_batch_size: int,
    eval_dataset: Dataset[Any] | None = None,
    accumulate: int = 1,
    microbatch_size: int | None = None,
    seed: int = 0,
    drop_last: bool = False,
    num_workers: int = 0,
    prefetch_factor: int = PREFETCH,
    collate: Collate | str | Mapping[str, Any] = default_collate,
    log_every: int = 10,
    run_dir: str | Path | None = None,
) -> Run:
    """Move the model to this process's device and make its training a part of one on all devices.

    Under `hetexp launch` every rank calls it with the same arguments; all begin with rank 0's weights. In any
    other process it uses the best device: the current CUDA, ROCm or XPU device, MPS, or the CPU.

    Args:
        model: moved to the device; it stays the object that holds the parameters.
        optimizer: over the model's parameters.
        dataset: map-style, or a stream (`IterableDataset`), which every rank walks; the same on every rank.
        global_batch_size: samples of one optimizer step, over all devices.
        eval_dataset: for `Run.evaluate`.
        accumulate: microbatches that each device cuts its part of a batch into.
        microbatch_size: most samples of a microbatch, whose number may then differ from device to device.
        seed: of the order of samples, and under `hetexp launch` of dropout and random samples.
        drop_last: whether to leave out the last batch of an epoch if it is not full.
        num_workers: data loader processes of each device.
        prefetch_factor: microbatches that each of them loads ahead.
        collate: makes a batch of samples, as a `DataLoader`'s; or `pad`, `list`, or a node as `data.collate`.
        log_every: steps between lines of `metrics.jsonl`.
        run_dir: run folder outside of `hetexp launch`; by default a new one in `outputs`, made when needed.

    Raises:
        ConfigError: an argument cannot be used.
        HandshakeError: the ranks differ in what they are about to train.
        SetupError: the device cannot be driven, the group did not form, or another launcher has made ranks.
    """
    given: dict[str, Any] = {
        "global_batch_size": global_batch_size,
        "accumulate": accumulate,
        "microbatch_size": microbatch_size,
        "seed": seed,
        "drop_last": drop_last,
        "num_workers": num_workers,
        "prefetch_factor": prefetch_factor,
        "log_every": log_every,
    }
    problems = _check_arguments(given) + check_dataset("dataset", dataset)
    problems += check_dataset("eval_dataset", eval_dataset) if eval_dataset is not None else []
    problems += _check_optimizer(model, optimizer)
    collate = _function_of(collate, problems)
    if problems:
        raise ConfigError(problems)
    launched = _launched
    if launched is not None:
        if launched.run is not None:
            raise UsageError("hetexp.setup must be called once in a script, but is called again.")
        plan, rank, store = launched.plan, launched.rank, launched.store
    else:
        _refuse_other_launchers()
        plan = plan_alone(device_alone(), Path(run_dir) if run_dir is not None else _new_folder())
        rank, store = 0, dist.HashStore()
    plan = _decided(plan, given, model)
    arguments = _Given(model, optimizer, as_data(dataset) or dataset, as_data(eval_dataset), given, collate)
    sampler = _sampler(arguments.train, global_batch_size, seed, drop_last)
    state = _state(plan, read_config(plan.config), rank, store, arguments, sampler)
    called = Called(model)
    assert isinstance(state.engine, Replica), "`hetexp launch` has refused other strategies"
    state.engine.connect(plan, store, again=False)
    state.module = state.strategy.wrap(called, state.device)
    state.engine.attach_exchange(store)
    if launched is None:
        state.loggers = (FirstLine(Path(plan.run_dir)),)
        return Run(state, called, store, collate)
    launched.run = Run(state, called, store, collate)
    launched.run.resume()
    if rank == 0:
        state.loggers = start_loggers(state)  # after `resume`, whose run they name
        launched.ready()
    return launched.run


def _give_shapes(model: nn.Module, dataset: Dataset[Any], seed: int, collate: Collate) -> None:
    """Call a model with lazy layers once, with a batch of the first two samples.

    Raises:
        ConfigError: the batch does not show the model's inputs, or they do not give it all shapes.
    """
    if not lazy_names(model):
        return
    with seeded(seed):  # each rank draws the same weights, and the script goes on as without them
        first = indexed(dataset, 2)
        batch = collate([first[index] for index in range(min(2, len(first)))])  # type: ignore[arg-type]
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            call_once(model, batch[0], CALL_FIRST)
            return
    raise ConfigError(
        "`model` must have shapes for all its tensors, but has lazy layers, and only batches of the form "
        f"(inputs, targets) show how to call it. {CALL_FIRST}"
    )


@dataclass(frozen=True)
class _Given:
    """The script's arguments."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Dataset[Any]
    evaluation: Dataset[Any] | None
    trainer: dict[str, Any]
    collate: Collate

    @property
    def ahead(self) -> int:
        """Steps that the loader reads ahead."""
        trainer = self.trainer
        return read_ahead(self.train, trainer["num_workers"], trainer["prefetch_factor"], self.collate)


def _sampler(train: Dataset[Any], global_batch_size: int, seed: int, drop_last: bool) -> GlobalSampler:
    stream = stream_of(train)
    if stream is not None:
        return StreamSampler(stream, global_batch_size, seed, drop_last)
    return GlobalSampler(len(train), global_batch_size, seed, drop_last)  # type: ignore[arg-type]


class _OfTheScript(Loss):
    """A placeholder for the configured loss: a script computes its own."""

    def count(self, targets: Any) -> float:
        raise NotImplementedError

    def total(self, output: Any, targets: Any) -> torch.Tensor:
        raise NotImplementedError


def _state(
    plan: Plan, config: Config, rank: int, store: dist.Store, given: _Given, sampler: GlobalSampler
) -> TrainState:
    """Return this rank's state, agreed on by all ranks, with a model that nothing wraps yet."""
    model, optimizer = given.model, given.optimizer
    _give_shapes(model, given.train, config.trainer.seed, given.collate)
    strategy, policy = components(config)
    run_on: tuple[dict[str, str], ...] = ()
    facts: dict[str, Any] = {"data": {}}
    if _launched is None:
        backend: Backend = backend_class(plan.devices[0].backend)(plan.devices[0])
        device = torch_device_alone(plan.devices[0])
    else:
        backend, device = open_device(plan, config, rank, store)
        facts = {
            "setup": given.trainer,
            "data": data_facts(given, sampler),
            "model": model_facts(model),
        }
        run_on = tuple(agree(plan, config, rank, store, facts))
        if plan.world_size > 1:  # dropout and random samples differ from rank to rank, as the samples do
            seed_all(config.trainer.seed + 1 + rank)
    _move(model, optimizer, device)
    keep_replicas_equal(optimizer, plan.devices)
    settings = policy.settings if policy.follows else None
    # The script steps its own schedule; this one only counts steps, and must not touch the script's rates.
    steps = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=0.0)
    return TrainState(
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
        schedule=LambdaLR(steps, lambda _: 1.0),
        loss=_OfTheScript(),
        train_data=given.train,
        eval_data=given.evaluation,
        sampler=sampler,
        loggers=(),
        total_steps=0,
        data_facts=facts["data"],
        run_on=run_on,
        engine=engine_of(strategy),
        policy=policy,
        balancer=Balancer(plan, settings, given.ahead),
    )


def _decided(plan: Plan, given: Mapping[str, Any], model: nn.Module) -> Plan:
    """Return the plan with the script's options: batch, microbatches, and float64 if the model has it.

    Raises:
        ConfigError: a device does not compute in float64, or the exchange does not support it.
    """
    config = {**plan.config, "trainer": {**plan.config["trainer"], **given}}
    counts = apportion(given["global_batch_size"], plan.shares).counts
    plan = replace(plan, config=config, local_batch_sizes=counts)
    if all(parameter.dtype != torch.float64 for parameter in model.parameters()):
        return plan
    if precision_problems("float64", plan.devices):
        lacking = [str(d) for d in plan.devices if d.precisions is not None and "float64" not in d.precisions]
        raise ConfigError(
            "`model` must be of float32 if a device does not compute in float64, but is of float64 "
            f"instead: {', '.join(lacking)}."
        )
    if plan.wire != "float32":
        raise ConfigError(float64_problem(plan.wire))
    return replace(plan, precisions=("float64",) * plan.world_size)


def _move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the model, and replace the optimizer's parameters if the move creates new ones."""
    before = list(model.parameters())
    model.to(device)
    now = dict(zip(map(id, before), model.parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [now.get(id(parameter), parameter) for parameter in group["params"]]
    if optimizer.state:  # of an earlier training: it moves to the parameters' device
        optimizer.load_state_dict(optimizer.state_dict())


def _check_arguments(given: Mapping[str, Any]) -> list[str]:
    """Return the problems of the script's numbers, one sentence each."""
    problems = []
    least = {"global_batch_size": 1, "accumulate": 1, "seed": 0, "num_workers": 0, "prefetch_factor": 1}
    least["log_every"] = 1
    if given["microbatch_size"] is not None:
        least["microbatch_size"] = 1
        if given["accumulate"] != 1:
            accepted = "1 if `microbatch_size` is given"
            fix = "Both cut the local batch: keep one of them."
            problems.append(must_be("accumulate", accepted, given["accumulate"], fix))
    for name, smallest in least.items():
        value = given[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            problems.append(must_be(name, f"a whole number from {smallest} on", value))
    return problems


def _function_of(collate: Collate | str | Mapping[str, Any], problems: list[str]) -> Collate:
    """Return the function, maybe a shipped one by its name or a node; a problem is added to the others."""
    if callable(collate):
        return Explained(collate)
    target = collate.get("_target_") if isinstance(collate, Mapping) else collate
    if target not in COLLATE:
        problems.append(must_be("collate", f"a function, {' or '.join(COLLATE)}", target))
        return default_collate
    node = {"_target_": target} if isinstance(collate, str) else dict(collate)
    wrong = check_component("collate", {**node, "_target_": COLLATE[target]})
    if not wrong:
        return Explained(build_function(node))
    problems += wrong
    return default_collate


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the problems of the optimizer's parameters."""
    parameters = {id(parameter) for parameter in model.parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held <= parameters:
        return []
    others = len(held - parameters)
    return [
        f"`optimizer` must hold parameters of the model only, but {others} of its {len(held)} are "
        "others, whose gradients would not be exchanged. Modules that train together belong into one, and "
        "the optimizer is made after the last change of the model."
    ]


def _refuse_other_launchers() -> None:
    """Refuse to run as a rank of torchrun, whose ranks would train independently.

    Raises:
        SetupError: this process is a rank of torchrun.
    """
    if os.environ.get("WORLD_SIZE", "") not in ("", "0", "1") and os.environ.get(ENGINE) != "none":
        raise SetupError(
            "hetexp.setup does not take part in the ranks of torchrun (WORLD_SIZE is "
            f"{os.environ['WORLD_SIZE']}). Start the script with `hetexp launch {Path(sys.argv[0]).name}`. "
            f"If the variable is left from another job, unset it or set {ENGINE}=none."
        )


def _new_folder() -> Path:
    now = datetime.now()
    return Path.cwd() / "outputs" / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-{os.urandom(3).hex()}"
