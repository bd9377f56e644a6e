"""What a strategy is, and the two wrappers that let ranks with unequal work stay in step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetexp.comm.communicator import Communicator
    from hetexp.comm.empty_share import EmptyShareGuard
    from hetexp.data.sampler import GlobalSampler


class Strategy(ABC):
    """Shares one model's training over the ranks.

    Constructed in the launcher too, to check the plan: constructors import no torch.
    """

    name: ClassVar[str]
    steps: ClassVar[Literal["joint", "local", "staged"]] = "joint"
    """What a rank does in a step: its samples' part of a gradient that all then apply alike (`joint`), steps
    of its own with its own samples (`local`), or its layers' part of all samples (`staged`)."""
    solo: ClassVar[bool] = False
    """Whether one rank trains, without others to talk to."""
    apart: ClassVar[bool] = False
    """Whether each rank trains a model of its own, with a fixed part of the data."""
    exact: ClassVar[bool] = True
    """Whether each step is the one that a single device would take with the global batch."""
    one_process: ClassVar[bool] = False
    """Whether one rank drives all devices."""
    reforms: ClassVar[bool] = False
    """Whether ranks of a running training can form their group again with other members."""
    compiles: ClassVar[bool] = False
    """Whether `wrap` takes a model that `torch.compile` has compiled."""
    codes_gradients: ClassVar[bool] = False
    """Whether gradients may travel in another form than the one that they have (`comm.wire`)."""
    predicted_as: ClassVar[Literal["alone", "all_reduce", "periodic", "apart", "stages"] | None] = None
    """How the cost model predicts a step: one device's own work, the ranks' work with an all-reduce of the
    gradients in backward (`all_reduce`), with one of the weights now and then (`periodic`), with none
    (`apart`), a pipeline of stages; `None`: it does not know this strategy."""

    @abstractmethod
    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        """Return what speaks against this strategy here, one sentence a problem, with the fix."""

    def engine(self) -> Any:
        """Return a new engine, a rank's side of this strategy (`hetexp.training.engine.Engine`).

        `None`: all ranks take one common step, each with its part of the samples, and `wrap` says how their
        gradients are summed (`hetexp.training.data_parallel.DataParallel`).
        """
        return None

    def sampler(self, plan: Plan, config: Config, num_samples: int) -> GlobalSampler:
        """Return what draws the samples of each global batch; every rank has the same.

        Args:
            num_samples: of the training data.
        """
        from hetexp.data.sampler import GlobalSampler

        trainer = config.trainer
        sizes = num_samples, trainer.global_batch_size, trainer.seed
        return GlobalSampler(*sizes, trainer.drop_last, trainer.overfit_batches)

    def configure(self, plan: Plan) -> None:  # noqa: B027
        """Take what it needs of the plan; a rank calls it before `wrap`."""

    @abstractmethod
    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the module to call with a microbatch's inputs, or with `None` for an empty share.

        Args:
            model: on the device already; stays the one that holds the parameters.
        """

    def unwrap(self, module: nn.Module, model: nn.Module) -> nn.Module:
        """Return the bare model, once its group is left for good, and let go of all that is the group's.

        Only if `reforms` says so. `wrap` and `attach_group` follow with another group, between whose ranks
        the weights are equal already.

        Args:
            module: what `wrap` returned.
            model: what holds the parameters.
        """
        return model

    def attach_group(  # noqa: B027
        self,
        module: nn.Module,
        communicator: Communicator,
        inputs: Any,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Prepare what ranks do together within the model itself; all ranks call it after `wrap`.

        Args:
            module: what `wrap` returned.
            inputs: of a small batch, on the device.
            waiting: returns a context for what waits for other ranks in the midst of a pass.
        """

    def equal_passes(self, module: nn.Module) -> bool:
        """Return whether all ranks must do equally many passes in a step, some of them without samples."""
        return False

    def check_exchanged(self, module: nn.Module) -> None:  # noqa: B027
        """Look at the gradients of a pass that exchanged them.

        Raises:
            ConfigError: the configuration lets ranks' weights grow apart.
        """

    @abstractmethod
    def accumulate(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward adds gradients up locally and exchanges nothing."""

    def exchange_through(self, module: nn.Module, hook: Callable[[Any, Any], Any]) -> None:  # noqa: B027
        """Let a communication hook of DDP's form average the gradients, where any are exchanged."""

    def varies_passes(self) -> bool:
        """Return whether ranks may differ in their number of passes, and change it during a run."""
        return True

    def guard(self, module: nn.Module) -> EmptyShareGuard | None:
        """Return the part of a wrapped module that calls the model.

        `None` (a strategy that does not say): a rank that runs out of memory ends the run.
        """
        return None

    def abort_exchange(  # noqa: B027
        self, module: nn.Module, missing: Sequence[nn.Parameter], gradient: float = math.nan
    ) -> None:
        """End the exchange of a backward pass that broke off on this rank, so that no other rank waits.

        Args:
            missing: parameters whose gradients the pass did not come to.
            gradient: what is sent for each of their elements.
        """

    @abstractmethod
    def gradient_divisor(self, world_size: int) -> int:
        """Return the number of ranks that the exchanged gradient is divided by, for the normaliser."""

    def exchanged_bytes(self, model: nn.Module, world_size: int) -> int | None:
        """Return what a rank hands to the exchange of each step's gradients; `None` where that is counted
        while it trains, or not known.
        """
        return None

    def keeps_gradients(self) -> bool:
        """Return whether the gradients' memory stays taken between steps, also where they are set to none."""
        return False

    def bucket_bytes(self, gradient_bytes: int, accumulates: bool) -> int:
        """Return what the exchange holds on the device beside the gradients, from the first step to the last.

        Args:
            gradient_bytes: of all parameters that are trained.
            accumulates: whether a step adds up the gradients of several microbatches.
        """
        return 0
