"""The state of one rank's training: its objects and its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hetexp.balancing.base import BalancingPolicy
from hetexp.comm.communicator import Communicator
from hetexp.comm.empty_share import EmptyShareGuard
from hetexp.comm.exchange import Exchange
from hetexp.comm.hook import CommHook
from hetexp.comm.step_message import StepMessage
from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.data.base import stream_of
from hetexp.data.loader import cut
from hetexp.data.page_locked import on_device
from hetexp.data.sampler import GlobalSampler, Position
from hetexp.data.samples import Collate
from hetexp.hardware.backend import Backend
from hetexp.hardware.emulation.pacing import tensors
from hetexp.logger.base import Logger
from hetexp.model.base import WithAuxiliary
from hetexp.model.hooks import NO_HOOKS, ModelHooks
from hetexp.plan.strategy import Strategy
from hetexp.training.balancer import Balancer
from hetexp.training.engine import Engine
from hetexp.training.loss import Loss, summed
from hetexp.training.nonfinite.loss_scale import LossScale
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.saving.saver import Saver
from hetexp.training.source import SourceModel

if TYPE_CHECKING:
    from hetexp.optimizer.build import Schedule


@dataclass
class TrainState:
    """The objects of one rank, built by `hetexp.training.wiring` and used by the loop."""

    plan: Plan
    config: Config
    rank: int
    device: torch.device
    backend: Backend
    communicator: Communicator
    strategy: Strategy
    model: nn.Module
    """Holds the parameters."""
    module: nn.Module
    """The strategy's wrapper of the model, called in training."""
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    loss: Loss
    train_data: Dataset[Any]
    eval_data: Dataset[Any] | None
    sampler: GlobalSampler
    loggers: tuple[Logger, ...]
    """Empty on all ranks but rank 0."""
    total_steps: int
    """Optimizer steps of the whole run, those before a resume included; fewer once a stream ends before."""
    collate: Collate = field(default_factory=Collate)
    """Makes batches `(inputs, targets)` of samples of both."""
    exchange: Exchange | None = None
    """Sums gradients and other large tensors over all ranks; `None` for a single rank."""
    hook: CommHook = field(default_factory=CommHook)
    """Exchanges DDP's gradients compressed, through memory or at the pace of emulated links."""
    time_scale: float | None = None
    """Real seconds a modelled second of emulated devices; `None` without any."""
    data_facts: dict[str, Any] = field(default_factory=dict)
    """What the ranks have compared of the data, for checkpoints."""
    run_on: tuple[dict[str, str], ...] = ()
    """Each rank's versions of Python and torch."""
    engine: Engine = field(kw_only=True)
    """Takes the strategy's steps."""
    policy: BalancingPolicy = field(kw_only=True)
    balancer: Balancer = field(kw_only=True)
    """Splits each batch over the ranks."""
    loss_scale: LossScale | None = None
    """Set on all ranks if any of them computes in float16."""
    compiled: nn.Module | None = None
    """The model compiled by torch.compile, if it is."""
    example: Any = None
    """Inputs of a small batch of the training data, on the device."""
    guard: EmptyShareGuard | None = None
    """Catches out-of-memory errors of the model; `None` if these end the run."""
    input_bytes: int | None = None
    """Of one sample, if a script calls the model itself; `None`: those of the training data's inputs."""
    source: SourceModel | None = None
    """The model whose activations are trained on, if evaluations use it."""
    resumed_from: dict[str, Any] | None = None
    """The run that this one goes on from: its `run_id`, `group`, and the `step` of its checkpoint."""
    doing: str = ""
    """This rank's activity, for the launcher, which limits the time of `steps` and of no other activity."""
    microbatch_limits: list[int | None] = field(default_factory=list)
    """Most samples of a pass of each rank, if its memory ran out with more; the same on every rank."""
    exchanged_before: tuple[int, float] = (0, 0.0)
    """Bytes and seconds of this rank's `GradientHook` in groups before the present one."""
    survives: bool = False
    """Whether the run goes on if another rank is lost: the step that broke off is done again."""
    while_waiting: Callable[[], None] | None = None
    """Called in a step before it waits for the device."""
    random_states: Callable[[], Any] = lambda: None
    """Returns the host's random numbers at the end of the last step; `None`: they are the present ones."""
    saver: Saver = field(init=False)
    """Writes this rank's checkpoints."""

    def __post_init__(self) -> None:
        self.engine.bind(self)
        self.saver = Saver(self.backend.lock_pages)
        self.microbatch_limits = self.microbatch_limits or [None] * self.plan.world_size

    @property
    def group(self) -> str:
        """Group of this run's trackers: the sweep's, else that of the run it goes on from, else its own."""
        before = self.resumed_from or {}
        return self.plan.group or before.get("group") or before.get("run_id") or self.plan.run_id

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters, cached: to collect them at each step takes as long as many kernels."""
        return list(self.model.parameters())

    @property
    def hooks(self) -> ModelHooks:
        """The model's hooks between steps, which do nothing if it defines none."""
        return self.model if isinstance(self.model, ModelHooks) else NO_HOOKS

    @property
    def has_buffers(self) -> bool:
        """Whether the model has buffers, such as running statistics, which a step may change."""
        return any(module._buffers for module in self._modules)

    @cached_property
    def _modules(self) -> list[nn.Module]:
        return list(self.model.modules())

    @property
    def precision(self) -> str:
        """The precision of this rank's forward and backward passes."""
        return self.plan.precisions[self.rank]

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, gradients, inputs and loss; the same on every rank."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward passes and losses; gradients are taken outside of it."""
        return self.backend.autocast(self.precision)

    @property
    def checks_finite(self) -> bool:
        """Whether gradients are checked for values that are not finite; all ranks must hold them alike."""
        checks = self.config.trainer.non_finite != "continue" or self.loss_scale is not None
        return checks and self.config.debug.exchange

    @property
    def walks_stream(self) -> bool:
        """Whether the training data are a stream, which every rank walks by itself."""
        return stream_of(self.train_data) is not None

    @property
    def checkpoints(self) -> Path:
        return Path(self.plan.run_dir) / "checkpoints"

    @property
    def microbatch_size(self) -> int | None:
        """Most samples of a pass of this rank by the configuration or the plan; `None`: no limit."""
        return self.plan.microbatch_size(self.rank)

    @property
    def evaluation_batch(self) -> int:
        """Samples of an evaluation batch: as many as of a training microbatch."""
        return max(self.pass_sizes(self.plan.local_batch_sizes[self.rank]), default=1)

    @property
    def timed_devices(self) -> Sequence[DeviceSpec]:
        """The devices that are timed, one a rank; none if one rank drives several."""
        return self.plan.devices if len(self.plan.all_devices) == self.plan.world_size else ()

    def normalizer(self, message: StepMessage) -> LossNormalizer:
        """Return the normalizer of this run's losses, for steps that exchange this message."""
        divisor = self.strategy.gradient_divisor(self.communicator.world_size)
        return LossNormalizer(message, divisor, self.config.debug.normalizer, self.loss_scale)

    def pass_sizes(self, num_samples: int, rank: int | None = None) -> list[int]:
        """Return the sizes of the microbatches of `num_samples` local samples on a rank, or on this one."""
        rank = self.rank if rank is None else rank
        sizes = cut(num_samples, self.config.trainer.accumulate, self.plan.microbatch_size(rank))
        limit = self.microbatch_limits[rank]
        return sizes if limit is None else [part for size in sizes for part in cut(size, 1, limit)]

    def num_passes(self, counts: Sequence[int]) -> int:
        """Return the number of passes of every rank in a step; 1 if each runs as many as it needs.

        Args:
            counts: every rank's samples.
        """
        if not self.strategy.equal_passes(self.module):
            return 1
        return max((len(self.pass_sizes(count, rank)) for rank, count in enumerate(counts)), default=1)

    def local_loss(self, output: Any, targets: Any, num_samples: int | None = None) -> torch.Tensor:
        """Return the sum of the loss over a microbatch, at least in float32."""
        loss = self.loss.for_samples(num_samples)
        return summed(loss, output, self.targets_for(output, targets)).to(self.device)

    def targets_for(self, output: Any, targets: Any) -> Any:
        """Return a microbatch's targets where the loss takes them.

        Raises:
            ConfigError: they hold values that the device would fail of.
        """
        if self.loss.targets_on_host:
            return targets
        # One process may drive several devices, and gather the outputs on any of them.
        device = next((t.device for t in tensors(output)), self.device)
        if device.type != "cpu":
            plain = output.output if isinstance(output, WithAuxiliary) else output
            self.loss.check(plain, targets)
        return self.to_device(targets, device)

    def to_device(self, value: Any, device: torch.device | None = None) -> Any:
        """Move a microbatch's inputs or targets to a device, floating-point ones in the weights' type.

        Args:
            device: `None`: the rank's own.
        """
        return on_device(value, device or self.device, self.dtype, self.config.trainer.channels_last)


@dataclass
class Progress:
    """The progress of the run, the same on every rank."""

    step: int = 0
    position: Position = field(default_factory=Position)
    samples: int = 0
    best: float | None = None
    """Best value of the early-stopping metric so far."""
    bad_evaluations: int = 0
    """Evaluations since the best one."""
    skipped_steps: int = 0
    """Number of steps whose gradient was not finite, so that the weights stayed as they were."""
    schedule: dict[str, Any] | None = None
    """State of a schedule that counts epochs or evaluations (`hetexp.optimizer.schedule`); never changed in
    place."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for a checkpoint."""
        return {
            "samples": self.samples,
            "best": self.best,
            "bad_evaluations": self.bad_evaluations,
            "skipped_steps": self.skipped_steps,
            "schedule": self.schedule,
        }

    @classmethod
    def from_dict(cls, step: int, position: dict[str, int], raw: dict[str, Any]) -> Progress:
        """Read the result of `to_dict`, and the step and position, which a checkpoint keeps separately."""
        return cls(step=step, position=Position.from_dict(position), **raw)
