"""The base of engines whose ranks hold the whole model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetexp.checkpoint.choose import ResumeRequest, choose
from hetexp.checkpoint.folder import TrainingState, load_checkpoint
from hetexp.comm.communicator import Communicator
from hetexp.core.call import call_model
from hetexp.core.config import Config
from hetexp.core.plan import Plan
from hetexp.data.base import indexed
from hetexp.data.loader import LocalBatch, local_batches, read_ahead
from hetexp.data.prefetch import reads_in_waits
from hetexp.data.sampler import Position
from hetexp.hardware.backend import backend_class
from hetexp.hardware.emulation.pacing import tensors
from hetexp.training.balancer import Balancer
from hetexp.training.compiled import compiled
from hetexp.training.engine import Engine, PacedLink, Work
from hetexp.training.evaluate import evaluate
from hetexp.training.group import attach_hook, connect, leave
from hetexp.training.measuring.efficiency import account_for
from hetexp.training.measuring.timer import Totals
from hetexp.training.recovery.oom_recovery import recovering_guard
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)


class Replica(Engine):
    """A rank that holds the whole model and computes all its layers."""

    state: TrainState
    recovers_together = True
    """Whether all ranks decide together how to go on after one of them ran out of memory in a step."""

    def bind(self, state: TrainState) -> None:
        self.state = state

    # ------------------------------------------------------------ building

    def shard(self, plan: Plan, config: Config, rank: int, model: nn.Module, inputs: Any) -> nn.Module:
        return model

    def prepare(self, inputs: Any) -> None:
        state = self.state
        state.example = state.to_device(inputs)
        # Before the strategy wraps the model: an emulated device delays a gradient before DDP may send it.
        state.backend.attach(state.model, state.optimizer, state.example)
        state.compiled = compiled(state.model, state.config)

    def connect(self, plan: Plan, store: dist.Store, again: bool) -> None:
        """Form the group; see `hetexp.training.group.connect`."""
        connect(self.state, plan, store, again=again)

    def join(
        self, plan: Plan, rank: int, store: dist.Store, agree_on_state: Callable[[], None] | None = None
    ) -> None:
        state, strategy = self.state, self.state.strategy
        strategy.configure(plan)
        state.rank = rank
        self.connect(plan, store, agree_on_state is not None)
        state.balancer = self.balancer()
        if agree_on_state is not None:
            agree_on_state()
        inner = state.compiled if state.compiled is not None else state.model
        state.module = strategy.wrap(inner, state.device)
        with state.autocast():
            strategy.attach_group(state.module, state.communicator, state.example, state.backend.waiting)
        state.guard = recovering_guard(state, self.recovers_together)
        self.attach_exchange(store)

    def balancer(self) -> Balancer:
        """Return the balancer of the plan's ranks."""
        state, trainer = self.state, self.state.config.trainer
        settings = state.policy.settings if state.policy.follows and self.moves_samples else None
        ahead = read_ahead(
            state.train_data,
            trainer.num_workers,
            trainer.prefetch_factor,
            state.collate,
            self.reads_in_waits,
        )
        return Balancer(state.plan, settings, ahead)

    @property
    def reads_in_waits(self) -> bool:
        state = self.state
        on_cards = any(not backend_class(device.backend).computes_on_cpu for device in state.plan.devices)
        workers = state.config.trainer.num_workers
        return on_cards and reads_in_waits(state.train_data, workers, state.collate)

    def attach_exchange(self, store: dist.Store) -> None:
        """Set up the exchange of gradients or weights; the model is wrapped already.

        Args:
            store: of the group.
        """
        attach_hook(self.state, self.exchanges_in_backward)

    def leave(self) -> None:
        leave(self.state)

    # ------------------------------------------------------------ training

    @property
    def group(self) -> Communicator:
        return self.state.communicator

    def loaded_in(self) -> tuple[int, int | None]:
        return self.state.config.trainer.accumulate, self.state.microbatch_size

    def batches(
        self, start: Position, num_steps: int, first_step: int = 0, num_workers: int = 0
    ) -> Generator[LocalBatch, None, None]:
        state = self.state
        return local_batches(
            state.train_data,
            state.sampler,
            start,
            num_steps,
            state.balancer.split,
            state.rank,
            *self.loaded_in(),
            num_workers,
            first_step,
            state.collate,
            prefetch_factor=state.config.trainer.prefetch_factor,
            page_locked=state.backend.copies_page_locked,
        )

    # ------------------------------------------------------------ evaluation

    def forward(self, inputs: Any, number: int, num_samples: int) -> Any:
        state = self.state
        with state.autocast():
            return call_model(state.model, state.to_device(inputs))

    def evaluation_part(self, total: int) -> tuple[int, int, int]:
        return *self.state.balancer.now(total).bounds(self.state.rank), self.state.evaluation_batch

    def evaluate(self) -> tuple[dict[str, float], dict[str, float]]:
        result = evaluate(self.state)
        return result, {f"eval/{name}": value for name, value in result.items()}

    def shares(self, samples: Sequence[float], total: float) -> Sequence[float]:
        return [count / total for count in samples]

    def replicated(self) -> Iterator[tuple[str, str, torch.Tensor, tuple[int, ...]]]:
        model, ranks = self.state.model, tuple(range(self.state.communicator.world_size))
        for name, parameter in model.named_parameters():
            yield "weight", name, parameter.detach(), ranks
            if self.shares_gradients and parameter.requires_grad:
                yield "gradient", name, gradient_of(parameter), ranks
        for name, buffer in model.named_buffers():
            yield "buffer", name, buffer, ranks

    shares_gradients = False
    """Whether all ranks hold the same gradient after a step."""
    exchanges_in_backward = False
    """Whether the strategy's wrapper exchanges gradients during backward."""

    # ------------------------------------------------------------ checkpoints

    @property
    def checkpoint_folder(self) -> Path:
        return self.state.checkpoints

    def find(self, path: Path) -> Path:
        # A script's own `run.resume` names a run or a checkpoint; a launcher has chosen already.
        request = ResumeRequest.read(str(path), Path())
        chosen = choose(Path(request.path or path), request.which, contents=False)
        for sentence in chosen.skipped:
            log.warning("resume: %s", sentence)
        return chosen.folder

    def load(self, folder: Path) -> TrainingState:
        return load_checkpoint(folder, self.state.model, self.state.optimizer)

    # ------------------------------------------------------------ emulation and summary

    @property
    def paced_links(self) -> Sequence[PacedLink]:
        return [self.state.hook]

    def work(self) -> Work:
        state = self.state
        samples = state.balancer.now(state.config.trainer.global_batch_size).counts[state.rank]
        sizes = state.pass_sizes(samples)
        modelled = state.backend.modelled_work(sizes, _input_bytes(state))
        return Work(samples, max(sizes, default=0), modelled=modelled)

    def summarise(self, summary: dict[str, Any], totals: Totals, ranks: Sequence[dict[str, Any]]) -> None:
        account_for(self.state, summary, totals, ranks)


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, or a zero if it has none."""
    return torch.zeros(()) if parameter.grad is None else parameter.grad


def _input_bytes(state: TrainState) -> int:
    """Return the bytes of one sample's inputs on the way to the device."""
    if state.input_bytes is not None:
        return state.input_bytes
    inputs, _ = state.collate.load(indexed(state.train_data, 1), [0])
    return sum(t.numel() * t.element_size() for t in tensors(state.to_device(inputs)))
