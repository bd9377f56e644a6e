"""Tiny parts to train with: one linear layer, made-up samples, and a strategy that works between threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fake_ranks import FakeExchange
from support import unbuilt_config
from torch import nn
from torch.autograd import Variable
from torch.distributed import HashStore
from torch.utils.data import TensorDataset

from hetexp.balancing.equal import Equal
from hetexp.balancing.scheduler import SchedulerSettings
from hetexp.comm.communicator import Communicator
from hetexp.comm.empty_share import EmptyShareGuard
from hetexp.comm.hook import CommHook
from hetexp.core.config import Config, read_config
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.split import apportion, normalise
from hetexp.data.loader import read_ahead
from hetexp.data.sampler import GlobalSampler
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.logger.base import Logger, RunInfo
from hetexp.optimizer.build import schedule_of
from hetexp.plan.strategy import Strategy
from hetexp.strategy.local_sgd.own_steps import OwnSteps
from hetexp.training.balancer import Balancer
from hetexp.training.loss import build_loss
from hetexp.training.nonfinite.loss_scale import LossScale
from hetexp.training.recovery.oom_recovery import recovering_guard
from hetexp.training.replica import Replica
from hetexp.training.starting.parts import engine_of
from hetexp.training.state import TrainState


class Averaging(Strategy):
    """Averages gradients over a `FakeGroup` at the end of backward, as DDP does between processes."""

    name: ClassVar[str] = "averaging"

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.exchanges = 0
        self._quiet = False
        self._queued = False

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        return []

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        parameters = [p for p in model.parameters() if p.requires_grad]

        def exchange() -> None:
            self._queued = False
            self.exchanges += 1
            for parameter in parameters:
                assert parameter.grad is not None, "a rank brought no gradient for a parameter"
                summed = self.communicator.all_reduce(parameter.grad)
                parameter.grad = summed / self.communicator.world_size

        def ready(_: torch.Tensor) -> None:
            if not self._quiet and not self._queued:
                self._queued = True
                Variable._execution_engine.queue_callback(exchange)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(ready)
        return EmptyShareGuard(model)

    @contextmanager
    def _silently(self) -> Iterator[None]:
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def accumulate(self, module: nn.Module) -> AbstractContextManager[None]:
        return self._silently()

    def gradient_divisor(self, world_size: int) -> int:
        return world_size


class Recorder(Logger):
    """Keeps every line."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []

    def start(self, run: RunInfo) -> None:
        return None

    def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
        self.lines.append((step, dict(metrics)))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        return None


def samples(count: int, width: int = 3, classes: int = 4) -> TensorDataset:
    """Return samples whose inputs differ so much that leaving one out or using one twice shows."""
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, width, generator=generator) * torch.arange(1, count + 1).unsqueeze(1) / count
    targets = torch.randint(classes, (count,), generator=generator)
    return TensorDataset(inputs, targets)


@pytest.fixture
def make_state(tmp_path: Path) -> Callable[..., TrainState]:
    """Return a function that builds one rank's parts; the same model and data on every rank."""

    def make(
        communicator: Communicator,
        weights: Sequence[float] = (1.0,),
        *,
        train: Any = None,
        evaluation: Any = None,
        model: nn.Module | None = None,
        learning_rate: float = 0.1,
        climb: bool = False,
        total_steps: int | None = None,
        normalizer: str = "global",
        precisions: tuple[str, ...] = (),
        follow: SchedulerSettings | None = None,
        strategy: Strategy | None = None,
        exchange: bool = True,
        **trainer: Any,
    ) -> TrainState:
        rank = communicator.rank
        assert communicator.world_size == len(weights)
        shares = normalise(weights)
        raw = unbuilt_config(trainer={"max_steps": 3, **trainer})
        raw["debug"] = {"normalizer": normalizer, "exchange": exchange}
        config = read_config(raw)
        settings = config.trainer
        devices = tuple(CpuBackend.describe(i) for i in range(len(weights)))
        plan = Plan(
            run_id="run",
            run_dir=str(tmp_path),
            name="run",
            group=None,
            config=raw,
            devices=devices,
            strategy="averaging",
            shares=shares,
            local_batch_sizes=apportion(settings.global_batch_size, shares).counts,
            collective_backend="gloo",
            threads=(1,) * len(weights),
            precisions=precisions or (settings.precision,) * len(weights),
        )
        data = samples(24) if train is None else train
        if model is None:
            model = nn.Linear(3, 4)
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.copy_(
                        torch.linspace(-1, 1 + number, parameter.numel()).reshape(parameter.shape)
                    )
        dtype = torch.float64 if settings.precision == "float64" else torch.float32
        model.to(dtype)
        steps = total_steps or settings.fast_dev_run or settings.max_steps
        assert steps is not None
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, maximize=climb)
        chosen = strategy or Averaging(communicator)
        state = TrainState(
            plan=plan,
            config=config,
            rank=rank,
            device=torch.device("cpu"),
            backend=CpuBackend(devices[rank]),
            communicator=communicator,
            strategy=chosen,
            model=model,
            module=chosen.wrap(model, torch.device("cpu")),
            optimizer=optimizer,
            schedule=schedule_of(optimizer, settings, steps, -(-len(data) // settings.global_batch_size)),
            loss=build_loss(settings.loss, config.loss.arguments()),
            train_data=data,
            eval_data=evaluation,
            sampler=GlobalSampler(
                len(data),
                settings.global_batch_size,
                settings.seed,
                settings.drop_last,
                settings.overfit_batches,
            ),
            exchange=FakeExchange(communicator) if communicator.world_size > 1 else None,
            loggers=(Recorder(),) if rank == 0 else (),
            total_steps=steps,
            engine=engine_of(chosen),
            policy=Equal(),
            balancer=Balancer(
                plan, settings=follow, ahead=read_ahead(data, settings.num_workers, settings.prefetch_factor)
            ),
            loss_scale=LossScale() if "float16" in plan.precisions else None,
        )
        if isinstance(state.engine, OwnSteps):
            state.guard = recovering_guard(state, together=False)
        if isinstance(state.engine, Replica):
            state.engine.attach_exchange(HashStore())
            state.hook.close()
            state.hook = CommHook()  # the strategy exchanges between threads
        return state

    return make
