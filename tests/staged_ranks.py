"""Ranks of a run in stages without launcher: real processes that build their parts again and again."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetexp.app import check, compose_config
from hetexp.comm.step_message import StepMessage
from hetexp.core.config import read_config
from hetexp.core.plan import Plan
from hetexp.data.loader import LocalBatch
from hetexp.launch.prepare.preparation import Preparation
from hetexp.plan.planner import make_plan
from hetexp.plan.run_spec import Request
from hetexp.strategy.pipeline.engine import Stages
from hetexp.strategy.pipeline.shared_gradients import parameters_by_name
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.replicas import ReplicaCheck, ReplicaError
from hetexp.training.state import Progress, TrainState
from hetexp.training.wiring import build_state


def planned(folder: Path, overrides: tuple[str, ...]) -> Plan:
    """Return the plan of a command line, as the launcher makes it."""
    quick = ("balancing=equal", "logger=none", "hardware.threads_per_rank=1")
    spec = check(compose_config([*quick, *overrides]), Request(folder, Path.cwd())).accepted()
    return spec.strategy.prepare(make_plan(spec), Preparation(spec))


def trained(plans: list[Plan], steps: int) -> list[list[dict[str, torch.Tensor]]]:
    """Train each plan in turn with the same processes.

    Returns:
        Of each plan the model's tensors after each step, as a checkpoint of it would hold them.
    """
    world = plans[0].world_size
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    told: Any = context.SimpleQueue()
    folder = Path(plans[0].run_dir)
    paths = []
    for number, plan in enumerate(plans):
        paths.append(folder / f"plan_{number}.json")
        replace(plan, store_port=store.port).write(paths[-1])
    processes = [
        context.Process(target=_rank, args=(paths, rank, store.port, steps, told)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
        if process.exitcode is None:
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * world
    return [torch.load(folder / f"trained_{number}.pt") for number in range(len(plans))]


def _rank(paths: list[Path], rank: int, port: int, steps: int, told: Any) -> None:
    torch.set_num_threads(1)
    for number, path in enumerate(paths):
        plan = Plan.read(path)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        state = build_state(plan, read_config(plan.config), rank, dist.PrefixStore(f"{number}", store))
        found = _steps(state, steps)
        if rank == 0:
            torch.save(found, path.parent / f"trained_{number}.pt")
        state.communicator.close()


def _steps(state: TrainState, steps: int) -> list[dict[str, torch.Tensor]]:
    normalizer = LossNormalizer(
        StepMessage(state.communicator), state.strategy.gradient_divisor(state.plan.world_size)
    )
    meter = StepTimer(state.backend)
    found = []
    state.model.train()
    for number, batch in enumerate(state.engine.batches(Progress().position, steps)):
        state.engine.step(number, batch, normalizer, meter)
        tied_are_equal(state)
        packed = state.engine.gather(number + 1)
        if packed is not None:
            found.append({name: tensor.clone() for name, tensor in packed.model[0].items()})
    one_bad_gradient_stops_all(state, batch, normalizer)
    replicas_are_compared(state)
    return found


def one_bad_gradient_stops_all(state: TrainState, batch: LocalBatch, normalizer: LossNormalizer) -> None:
    """Check that a gradient that is not finite on the last rank makes all of them leave the step out."""
    assert isinstance(state.engine, Stages)
    gradients = state.engine.staging.gradients
    if state.rank == state.plan.world_size - 1:
        add_up = gradients.sum

        def spoil() -> None:
            add_up()
            next(p.grad for p in state.model.parameters() if p.grad is not None).mul_(torch.inf)

        gradients.sum = spoil  # type: ignore[method-assign]
    before = [p.detach().clone() for p in state.model.parameters()]
    result = state.engine.step(99, batch, normalizer, StepTimer(state.backend))
    assert result.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True))


def replicas_are_compared(state: TrainState) -> None:
    """Check that what several ranks hold is compared, and nothing else."""
    assert isinstance(state.engine, Stages)
    check = ReplicaCheck(state)
    state.optimizer.zero_grad()
    check.compare(1)
    cut, own = state.engine.cut, parameters_by_name(state.model, state.engine.cut)
    shared = [(name, ranks) for name, ranks in cut.holders.items() if len(ranks) > 1]
    for name, ranks in shared[:1]:
        if state.rank == ranks[-1]:
            own[name].data.mul_(1.5)
        with pytest.raises(ReplicaError, match=f"the weight of {name} differs"):
            check.compare(2)


def tied_are_equal(state: TrainState) -> None:
    """Check that every rank that holds a parameter holds the same bits."""
    assert isinstance(state.engine, Stages)
    cut = state.engine.cut
    whole, world = cut.whole, state.plan.world_size
    own = {whole.parameters[name]: p for name, p in state.model.named_parameters()}
    for name, ranks in cut.holders.items():
        if len(ranks) < 2 or name not in whole.parameters.values():
            continue
        size = torch.tensor([own[name].numel() if name in own else 0])
        dist.all_reduce(size, op=dist.ReduceOp.MAX)
        mine = own[name].detach().reshape(-1) if name in own else torch.zeros(int(size), dtype=state.dtype)
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine.contiguous())
        assert all(torch.equal(everyone[rank], everyone[ranks[0]]) for rank in ranks), name
