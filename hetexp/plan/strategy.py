"""What a strategy is: what the planner and the launcher ask it, and what its ranks do."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hetexp.balancing.base import BalancingPolicy
from hetexp.core.config import Config
from hetexp.core.cost.calibration import Exchange
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import must_be
from hetexp.core.plan import Plan
from hetexp.plan.exchange_checks import refuse_boundary_wire, refuse_wire
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.plan.stages.assign import StagedStrategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetexp.comm.communicator import Communicator
    from hetexp.comm.empty_share import EmptyShareGuard
    from hetexp.data.sampler import GlobalSampler


class Preparation(Protocol):
    """Makes a plan final; the strategy chooses which of the two it needs."""

    def samples(self, plan: Plan) -> Plan:
        """Return the plan with each rank's samples, and the passes and memory that they need."""

    def stages(self, plan: Plan, cuts: StagedStrategy) -> Plan:
        """Return the plan with each rank's stages of the model."""


@dataclass(frozen=True)
class ExchangeText:
    """What ranks exchange, in words for a diagram."""

    what: str
    when: str = "each step"
    how: str | None = None
    """`None`: as the plan sums large tensors."""
    direct: bool = False
    """Whether the devices' own links carry it, if `how` is given."""


class Strategy(ABC):
    """Shares one model's training over the ranks.

    Constructed in the launcher too, to check the plan: constructors import no torch.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    """Whether each step is the one that a single device would take with the global batch. A subclass does not
    inherit it, since what it changes may change the step: it says so itself."""
    reforms: ClassVar[bool] = False
    """Whether ranks of a running training can form their group again with other members."""
    compiles: ClassVar[bool] = False
    """Whether `wrap` takes a model that `torch.compile` has compiled."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.exact = cls.__dict__.get("exact", False)

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

    def check_candidate(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        """Return what speaks against this strategy on these devices, or on those of them that it needs."""
        return self.check(config, devices)

    def check_exchange(self, config: Config) -> list[str]:
        """Return what speaks against `comm.wire`, `comm.boundary_wire` and `debug.exchange` with it."""
        return refuse_wire(config, self.name) + refuse_boundary_wire(config, self.name)

    def check_model(self, config: Config) -> list[str]:
        """Return what speaks against the model, as far as that is known before anything starts."""
        return []

    def check_script(self) -> list[str]:
        """Return what speaks against a user's own training loop (`hetexp launch`) with it."""
        why = "The loop of a script is data parallel; hetexp train has the other strategies."
        return [must_be("strategy", "ddp or single with hetexp launch", self.name, why)]

    def check_external_ranks(self, engine: str, world_size: int) -> list[str]:
        """Return what speaks against ranks that another engine has started.

        Args:
            engine: its name, for the message.
        """
        return []

    def check_hosts(self) -> list[str]:
        """Return what speaks against devices of several machines (`cluster.hosts`)."""
        return []

    def fallback_hint(self) -> str:
        """Return what to write so that a run goes on if the strategy cannot run; empty if that is clear."""
        return "Or strategy.fallback=single goes on with the fastest of the devices alone."

    def fallback_from(self, reason: str) -> dict[str, str] | None:
        """Return what the summary says if one device trains alone instead; `None` if that was asked for.

        Args:
            reason: why the strategy cannot run.
        """
        return {"from": self.name, "to": "single", "reason": reason}

    def candidates(
        self, offered: Callable[[], Mapping[str, Strategy]], several_hosts: bool
    ) -> Mapping[str, Strategy]:
        """Return the strategies of which the fastest takes its place; none if it trains itself.

        Args:
            offered: returns all that are configured, by the names of their options.
            several_hosts: whether a network is between some of the devices.

        Raises:
            ConfigError: one that it names is none of them.
        """
        return {}

    def prepare(self, plan: Plan, preparation: Preparation) -> Plan:
        """Return the plan that is launched, from the one of a rank a device.

        Raises:
            ConfigError: a device has less memory than it needs, or the model does not fit the strategy.
        """
        return preparation.samples(plan)

    def predict(self, inputs: PredictionInputs) -> list[PredictedRun]:
        """Return what a step of it is predicted to take, usually a row a policy.

        `inputs` has the models of one device alone and of an all-reduce in backward; a strategy with neither
        computes its rows from the devices' curves and links.
        """
        return [PredictedRun(None, problem="the cost model does not know this strategy")]

    def step_exchange(self, exchange: Exchange, plan: Plan, devices: Sequence[DeviceSpec]) -> Exchange:
        """Return what a step exchanges, from what it exchanges under DDP.

        Args:
            devices: those of the plan that take part, as links see them.
        """
        return exchange

    def may_leave_out(self, policy: BalancingPolicy) -> bool:
        """Return whether devices that would slow the run down may be left out."""
        return policy.drop_slower

    def all_reduces(self) -> bool:
        """Return whether all ranks together sum something large: gradients or weights."""
        return True

    def averages_gradients(self, plan: Plan) -> bool:
        """Return whether gradients are averaged over ranks that each have a part of the batch."""
        return plan.world_size > 1

    def describe_exchange(self, plan: Plan) -> ExchangeText | None:
        """Return what ranks exchange beside activations; `None` if nothing."""
        return ExchangeText(f"gradients as {plan.wire}" if plan.wire != "float32" else "gradients")

    def describe_pipeline(self, num_stages: int, num_ranks: int, num_samples: int) -> str:
        """Return how a pipeline of the plan takes its samples of a step; empty if there are none.

        Args:
            num_samples: that the pipeline takes of a full global batch.
        """
        return ""

    def ignores_commands(self) -> str:
        """Return why ranks do not take commands while they train; empty if they do."""
        return ""

    def refuses_restart(self) -> str:
        """Return why a run cannot start again without a device that was lost; empty if it can."""
        return ""

    def resumes_ranks(self, path: Path) -> bool:
        """Return whether each rank goes on from a checkpoint of its own in this folder."""
        return False

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
