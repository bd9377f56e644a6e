"""Puts the emulated card of a rank under a person's own training script, paced just as under hetexp.

Which card, links and time scale, the benchmark says in the environment: the plan of a run of hetexp.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import PrefixStore, distributed_c10d

from hetexp.comm.paced_exchange import PacedExchange
from hetexp.comm.subgroup import form_subgroup
from hetexp.core.config import read_config
from hetexp.core.plan import Plan
from hetexp.hardware.emulation.emulated import OUTRUN_TOLERANCE, EmulatedBackend
from hetexp.hardware.links import links_of

TIMEOUT_SECONDS = 300.0


class EmulatedCard:
    """Paces the passes of a model and the exchange of its gradients.

    Args:
        model: before DDP wraps it.
        optimizer: torch's own.
        inputs: a small batch, to count operations by.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
        torch.set_num_threads(1)
        self._plan = plan = Plan.read(Path(os.environ["BENCH_PLAN"]))
        self._rank = rank = int(os.environ["RANK"])
        self._scale = float(os.environ["BENCH_TIME_SCALE"])
        self._backend = backend = EmulatedBackend(plan.devices[rank])
        backend.deviation_seed = read_config(plan.config).hardware.deviation_seed
        backend.precision = plan.precisions[rank]
        backend.attach(model, optimizer, inputs)
        model.register_forward_pre_hook(lambda *_: self._begin_step(), prepend=True)
        optimizer.register_step_pre_hook(lambda *_: backend.begin_update())
        self._exchange: PacedExchange | None = None
        self._step = 0

    def connect(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        """Let the gradients travel over the emulated links, and start the pace on all ranks."""
        links = links_of(self._plan)
        done = self._backend.backward_done
        world = range(self._plan.world_size)
        store = PrefixStore("exchange", distributed_c10d._get_default_store())
        real = form_subgroup(world, self._rank, store, self._plan, torch.device("cpu"), TIMEOUT_SECONDS)
        self._exchange = PacedExchange(
            real, links, self._rank, self._backend.synchronize, done, TIMEOUT_SECONDS
        )
        ddp.register_comm_hook(None, self._exchange.hook)
        self._backend.start_pacing(self._scale)
        self._exchange.start(self._scale)
        torch.distributed.barrier()

    def finish(self) -> None:
        """Wait for the end of the last update."""
        self._backend.pause()
        torch.distributed.barrier()

    @property
    def valid(self) -> bool:
        """Whether this machine kept the pace of this rank's card and links."""
        assert self._exchange is not None
        late = self._exchange.late_share() > OUTRUN_TOLERANCE
        return not late and self._backend.invalid_reason() is None

    def _begin_step(self) -> None:
        self._backend.begin_step(self._step)
        self._step += 1
        if self._exchange is not None:
            self._exchange.begin_step()


class Stopwatch:
    """Times the steps after the first few.

    Args:
        card: that they run on.
        warm_steps: left out.
    """

    def __init__(self, card: EmulatedCard, warm_steps: int) -> None:
        self._card, self._warm, self._steps, self._began = card, warm_steps, 0, 0.0

    def step(self) -> None:
        """A step begins."""
        if self._steps == self._warm:
            self._card.finish()
            self._began = time.perf_counter()
        self._steps += 1

    def seconds(self) -> float:
        """Return the mean of a step, the last one over on all ranks."""
        self._card.finish()
        return (time.perf_counter() - self._began) / (self._steps - self._warm)

    def tell(self) -> None:
        """Print on rank 0 what was measured, for the benchmark to read."""
        seconds = self.seconds()
        lost = torch.tensor([0.0 if self._card.valid else 1.0])
        torch.distributed.all_reduce(lost)
        if int(os.environ["RANK"]) == 0:
            print(f"step_seconds={seconds!r} valid={not lost.item()}", flush=True)
