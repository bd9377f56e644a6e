"""A rank's side of a strategy: the interface between the training loop and a strategy's own step.

The loop, checkpoints, evaluation and the summary ask the engine and never which strategy it belongs to. Most
strategies need no engine of their own: `hetexp.training.data_parallel.DataParallel` serves all whose ranks
take one common step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hetexp.comm.communicator import Communicator
from hetexp.data.loader import LocalBatch
from hetexp.data.sampler import Position
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.normalizer import LossNormalizer

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

    from hetexp.checkpoint.folder import TrainingState
    from hetexp.core.config import Config
    from hetexp.core.plan import Plan


@dataclass
class StepResult:
    """One rank's result of a step of the global batch."""

    loss_sum: torch.Tensor
    """Sum over the local elements, on the device: reading it would wait for the device."""
    global_count: float
    """Elements that the step's loss is the mean of."""
    grad_norm: torch.Tensor | None
    """Before clipping, of the whole gradient."""
    learning_rate: float
    """The rate that this step used."""
    skipped: int = 0
    """Number of updates skipped because their gradient was not finite; the same on every rank."""
    unrecoverable: bool = False
    """Whether, in addition, no smaller loss scale would help."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Each microbatch's part of `loss_sum`, from the last attempt."""
    factor: float = 1.0
    """Factor of the losses before backward."""
    synchronised: bool = True
    """Whether all ranks hold the same weights after the step."""
    can_save: bool = True
    """Whether all ranks can save a common checkpoint after the step."""
    met: bool = True
    """Whether all ranks exchanged the step's message, in which the first rank reports its clock."""
    local_count: float = 0
    """Elements that `loss_sum` is the sum over."""


@dataclass(frozen=True)
class CheckpointParts:
    """Model and optimizer of all ranks, gathered on the rank that writes a checkpoint."""

    model: tuple[dict[str, torch.Tensor], dict[str, str]]
    """Tensors by name, and the names that share a tensor with the one that is kept."""
    optimizer: tuple[dict[str, torch.Tensor], dict[str, Any]]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the checkpoint's `state.json`."""


@dataclass(frozen=True)
class Work:
    """A rank's work in a step of a full global batch, for the summary."""

    samples: int
    microbatch: int
    """Most samples of a pass."""
    share: float | None = None
    """Fraction of a step's work; `None`: the fraction of the samples that the rank trained on."""
    modelled: Any = None
    """Modelled seconds on an emulated device (`hetexp.core.cost.step.Work`); `None` on a real one."""


class PacedLink(Protocol):
    """An exchange that emulated links delay."""

    def real_ratio(self) -> float:
        """Return the median of real ÷ modelled time of an exchange before pacing starts."""
        ...

    def late_share(self) -> float:
        """Return the seconds past the due moments ÷ modelled seconds since pacing started."""
        ...

    def start(self, time_scale: float) -> None:
        """Delay every exchange from now on; forget what was exchanged before."""
        ...


class Engine(ABC):
    """One rank's side of a strategy: its steps, and its parts of checkpoints and of the summary."""

    # ------------------------------------------------------------ building

    @abstractmethod
    def bind(self, state: Any) -> None:
        """Take the rank's `hetexp.training.state.TrainState`; only `shard` is called before it."""

    @abstractmethod
    def shard(self, plan: Plan, config: Config, rank: int, model: nn.Module, inputs: Any) -> nn.Module:
        """Reduce the model, in place, to this rank's layers; return the module to optimize.

        Args:
            model: the whole model on the CPU.
            inputs: a small batch of the training data.

        Raises:
            ConfigError: the model cannot be divided like this.
            CheckpointError: the checkpoint to resume from does not fit.
        """

    @abstractmethod
    def prepare(self, inputs: Any) -> None:
        """Attach the rank's device to the model, before any group is formed."""

    @abstractmethod
    def join(
        self, plan: Plan, rank: int, store: dist.Store, agree_on_state: Callable[[], None] | None = None
    ) -> None:
        """Form the group of a plan's ranks and their exchanges; all of them call it.

        A rank that was in another group has left that one (`leave`).

        Args:
            store: of this group alone.
            agree_on_state: brings all ranks to one state as soon as they can exchange data; `None` if all
                start alike.

        Raises:
            SetupError: the group did not form, or no route works.
            PeerLostError: another rank is gone.
        """

    @abstractmethod
    def leave(self) -> None:
        """Leave the other ranks at any moment; safe to call twice. Model and optimizer stay as they are."""

    # ------------------------------------------------------------ training

    @abstractmethod
    def loaded_in(self) -> tuple[int, int | None]:
        """Return the microbatches that a loader makes of a rank's samples, and the largest size of one."""

    @abstractmethod
    def batches(
        self, start: Position, num_steps: int, first_step: int = 0, num_workers: int = 0
    ) -> Generator[LocalBatch, None, None]:
        """Yield this rank's part of the next global batches.

        Args:
            first_step: number of the first one.
            num_workers: processes that load samples ahead.
        """

    @abstractmethod
    def step(self, step: int, batch: LocalBatch, normalizer: LossNormalizer, meter: StepTimer) -> StepResult:
        """Take one step of the global batch; every rank calls it.

        Args:
            step: number of steps done; -1 in a warm-up, which is undone.
        """

    @property
    @abstractmethod
    def group(self) -> Communicator:
        """The ranks that together hold one model; a rank alone if each trains a model of its own."""

    @property
    def reads_in_waits(self) -> bool:
        """Whether ranks of cards read the next samples while they wait for the device; alike on all ranks."""
        return False

    @property
    def moves_samples(self) -> bool:
        """Whether a policy may move samples from rank to rank while the run trains."""
        return True

    @property
    def computes_loss(self) -> bool:
        """Whether this rank alone can compute the loss of a sample."""
        return True

    def finish(self, step: int) -> tuple[str, dict[str, float]] | None:
        """End the run after its last checkpoint; return a checkpoint made here and its evaluation, if any."""
        return None

    # ------------------------------------------------------------ evaluation

    @abstractmethod
    def forward(self, inputs: Any, number: int, num_samples: int) -> Any:
        """Return the model's output for a batch; `None` on a rank without the model's last layers.

        Args:
            inputs: on the host.
            number: of the batch.
        """

    @abstractmethod
    def evaluation_part(self, total: int) -> tuple[int, int, int]:
        """Return this rank's part of `total` samples: its first, its end, and the size of a batch."""

    @abstractmethod
    def evaluate(self) -> tuple[dict[str, float], dict[str, float]]:
        """Evaluate on all ranks; return the result and the line to log, the same on every rank."""

    def device_metrics(self, losses: Sequence[float], counts: Sequence[float]) -> dict[str, float | None]:
        """Return the strategy's metrics of each device for a log line.

        Args:
            losses: each rank's sum since the last line.
            counts: each rank's elements.
        """
        return {}

    @abstractmethod
    def shares(self, samples: Sequence[float], total: float) -> Sequence[float]:
        """Return each rank's share of the work in a log line.

        Args:
            samples: each rank's own since the last line.
            total: samples of all global batches since then.
        """

    @abstractmethod
    def replicated(self) -> Iterator[tuple[str, str, torch.Tensor, tuple[int, ...]]]:
        """Yield kind, name and value of each tensor that several ranks should hold alike, and those ranks.

        All ranks yield the same kinds and names in the same order.
        """

    # ------------------------------------------------------------ checkpoints

    @property
    @abstractmethod
    def checkpoint_folder(self) -> Path:
        """Folder that this rank's group writes its checkpoints to."""

    @property
    def spare_checkpoints(self) -> int:
        """Number of checkpoints to keep beyond those that the configuration asks for."""
        return 0

    def checkpoint_path(self, step: int) -> str:
        """Return the path that the summary names as the checkpoint of a step."""
        from hetexp.checkpoint.manifest import folder_name

        return str(self.checkpoint_folder / folder_name(step))

    def checkpoint_bytes(self, local_bytes: int) -> int:
        """Return the size of a checkpoint; all ranks call it.

        Args:
            local_bytes: of this rank's model and optimizer.
        """
        return local_bytes

    def state_files(self) -> dict[str, bytes]:
        """Return further files of a checkpoint, on the group's first rank; all ranks call it."""
        return {}

    def state_extra(self) -> dict[str, Any]:
        """Return further entries of a checkpoint's `state.json`, for the rank that writes."""
        return {}

    def gather(self, step: int) -> CheckpointParts | None:
        """Return the model and optimizer of all ranks on the rank that writes; all ranks call it.

        Returns:
            `None` if that rank's own model and optimizer are whole.
        """
        return None

    @abstractmethod
    def find(self, path: Path) -> Path:
        """Return the checkpoint folder that this rank resumes from.

        Raises:
            CheckpointError: no checkpoint fits.
        """

    @abstractmethod
    def load(self, folder: Path) -> TrainingState:
        """Load a checkpoint's model and optimizer.

        Raises:
            CheckpointError: it is not of this model or optimizer.
        """

    def restore(self, folder: Path, extra: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore what `state_files` and `state_extra` saved; model and optimizer are loaded already."""

    # ------------------------------------------------------------ emulation and summary

    @property
    def paced_links(self) -> Sequence[PacedLink]:
        """The exchanges that emulated links delay."""
        return ()

    def rehearse_exchange(self) -> None:  # noqa: B027
        """Run the exchanges that are no part of a step, so that their time on this machine is known."""

    def start_pacing(self, time_scale: float) -> None:
        """Delay exchanges from now on.

        Args:
            time_scale: real seconds a modelled second.
        """
        for link in self.paced_links:
            link.start(time_scale)

    def forget(self) -> None:  # noqa: B027
        """Reset the engine: weights and optimizer are as before the first step."""

    def extra_step_seconds(self) -> float:
        """Return modelled seconds of a step beyond passes, update and the exchange in backward."""
        return 0.0

    @abstractmethod
    def work(self) -> Work:
        """Return what this rank computes in a step."""

    @abstractmethod
    def sent_bytes(self, steps: int) -> float | None:
        """Return the bytes that this rank sends in a step; `None` if not known.

        Args:
            steps: number of steps that the run has done.
        """

    def facts(self) -> dict[str, Any]:
        """Return this rank's measurements as plain types, for `summarise`."""
        return {}

    @abstractmethod
    def summarise(self, summary: dict[str, Any], totals: Any, ranks: Sequence[dict[str, Any]]) -> None:
        """Add this strategy's fields to the run's summary.

        Args:
            totals: `hetexp.training.measuring.timer.Totals` after the warm-up.
            ranks: each rank's report, with the result of `facts` under `facts`.
        """
