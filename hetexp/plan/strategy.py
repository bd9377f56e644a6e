"""The interface of a strategy, for the planner, the launcher and the ranks."""

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

BUCKET_CAP_BYTES = 25 * 2**20
"""torch's default size of a bucket of gradients."""


class Preparation(Protocol):
    """Makes a plan final, by one of two methods that the strategy chooses."""

    def samples(self, plan: Plan) -> Plan:
        """Return the plan with each rank's samples, microbatch size and memory."""

    def stages(self, plan: Plan, cuts: StagedStrategy) -> Plan:
        """Return the plan with each rank's stages of the model."""


@dataclass(frozen=True)
class ExchangeText:
    """The text about an exchange between ranks in a diagram."""

    what: str
    when: str = "each step"
    how: str | None = None
    """`None`: by the plan's route."""
    direct: bool = False
    """Whether the devices' own links carry it, if `how` is given."""


class Strategy(ABC):
    """Distributes the training of a model over ranks.

    The launcher also builds it, to check the plan, so that constructors must not import torch.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    """Whether each step equals that of a single device with the global batch. A subclass does not inherit it,
    because its changes may change the step."""
    reforms: ClassVar[bool] = False
    """Whether ranks can form their group again with other members during the training."""
    compiles: ClassVar[bool] = False
    """Whether `wrap` takes a model that `torch.compile` has compiled."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.exact = cls.__dict__.get("exact", False)

    @abstractmethod
    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        """Return the problems with this strategy on these devices, as sentences with the fix."""

    def engine(self) -> Any:
        """Return a new engine, a rank's side of this strategy (`hetexp.training.engine.Engine`).

        `None`: all ranks take one common step, each with its part of the samples, and `wrap` says how their
        gradients are summed (`hetexp.training.data_parallel.DataParallel`).
        """
        return None

    def sampler(self, plan: Plan, config: Config, num_samples: int) -> GlobalSampler:
        """Return the sampler of each global batch, the same on every rank.

        Args:
            num_samples: of the training data.
        """
        from hetexp.data.sampler import GlobalSampler

        trainer = config.trainer
        sizes = num_samples, trainer.global_batch_size, trainer.seed
        return GlobalSampler(*sizes, trainer.drop_last, trainer.overfit_batches)

    def check_candidate(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        """Return the problems with this strategy on these devices, or on those of them that it needs."""
        return self.check(config, devices)

    def check_exchange(self, config: Config) -> list[str]:
        """Return the problems with `comm.wire`, `comm.boundary_wire` and `debug.exchange`."""
        return refuse_wire(config, self.name) + refuse_boundary_wire(config, self.name)

    def check_model(self, config: Config) -> list[str]:
        """Return the problems with the model that are known before anything starts."""
        return []

    def check_script(self) -> list[str]:
        """Return the problems with a user's own training loop (`hetexp launch`)."""
        why = "The loop of a script is data parallel; hetexp train has the other strategies."
        return [must_be("strategy", "ddp or single with hetexp launch", self.name, why)]

    def check_external_ranks(self, engine: str, world_size: int) -> list[str]:
        """Return the problems with ranks that another engine has started.

        Args:
            engine: its name, for the message.
        """
        return []

    def check_hosts(self) -> list[str]:
        """Return the problems with devices of several machines (`cluster.hosts`)."""
        return []

    def fallback_hint(self) -> str:
        """Return the hint about a run that goes on if the strategy cannot run; empty: no hint."""
        return "Or strategy.fallback=single goes on with the fastest of the devices alone."

    def fallback_from(self, reason: str) -> dict[str, str] | None:
        """Return the summary's entry if one device trains alone instead; `None` if the strategy means that.

        Args:
            reason: why the strategy cannot run.
        """
        return {"from": self.name, "to": "single", "reason": reason}

    def candidates(
        self, offered: Callable[[], Mapping[str, Strategy]], several_hosts: bool
    ) -> Mapping[str, Strategy]:
        """Return the strategies of which the fastest replaces this one; empty if this one trains itself.

        Args:
            offered: returns all configured strategies, by the names of their options.
            several_hosts: whether the devices are in several hosts.

        Raises:
            ConfigError: it names a strategy that is not configured.
        """
        return {}

    def prepare(self, plan: Plan, preparation: Preparation) -> Plan:
        """Return the final plan, from the plan with a rank for each device.

        Raises:
            ConfigError: a device has too little memory, or the model does not fit the strategy.
        """
        return preparation.samples(plan)

    def predict(self, inputs: PredictionInputs) -> list[PredictedRun]:
        """Return the predicted runs, usually one for each policy.

        `inputs` has the cost models of one device alone and of an all-reduce in backward. Other strategies
        compute their rows from the devices' curves and links.
        """
        return [PredictedRun(None, problem="the cost model does not know this strategy")]

    def step_exchange(self, exchange: Exchange, plan: Plan, devices: Sequence[DeviceSpec]) -> Exchange:
        """Return the exchange of a step, from that of a step under DDP.

        Args:
            devices: of the plan that take part, with their links.
        """
        return exchange

    def may_leave_out(self, policy: BalancingPolicy) -> bool:
        """Return whether devices that make a step longer may be left out."""
        return policy.drop_slower

    def all_reduces(self) -> bool:
        """Return whether all ranks together sum large tensors: gradients or weights."""
        return True

    def averages_gradients(self, plan: Plan) -> bool:
        """Return whether gradients are averaged over ranks that each have a part of the batch."""
        return plan.world_size > 1

    def describe_exchange(self, plan: Plan) -> ExchangeText | None:
        """Return the text about the exchange besides activations; `None` if there is none."""
        return ExchangeText(f"gradients as {plan.wire}" if plan.wire != "float32" else "gradients")

    def describe_pipeline(self, num_stages: int, num_ranks: int, num_samples: int) -> str:
        """Return a text about a pipeline's microbatches; empty if the strategy has no pipelines.

        Args:
            num_samples: of a full global batch for this pipeline.
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
        """Read the plan; a rank calls it before `wrap`."""

    @abstractmethod
    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the module to call with a microbatch's inputs, or with `None` for an empty share.

        Args:
            model: on the device already; it keeps the parameters.
        """

    def unwrap(self, module: nn.Module, model: nn.Module) -> nn.Module:
        """Return the bare model after its group has ended, and drop everything of that group.

        It is called only if `reforms` is true. `wrap` and `attach_group` follow with another group, whose
        ranks have equal weights already.

        Args:
            module: result of `wrap`.
            model: with the parameters.
        """
        return model

    def attach_group(  # noqa: B027
        self,
        module: nn.Module,
        communicator: Communicator,
        inputs: Any,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Prepare the communication within the model itself; all ranks call it after `wrap`.

        Args:
            module: result of `wrap`.
            inputs: of a small batch, on the device.
            waiting: returns a context for waits for other ranks during a pass.
        """

    def equal_passes(self, module: nn.Module) -> bool:
        """Return whether all ranks must do the same number of passes in a step, some without samples."""
        return False

    def check_exchanged(self, module: nn.Module) -> None:  # noqa: B027
        """Check the gradients of a pass that exchanged them.

        Raises:
            ConfigError: with this configuration the ranks' weights would diverge.
        """

    @abstractmethod
    def accumulate(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward adds gradients up locally and exchanges nothing."""

    def exchange_through(self, module: nn.Module, hook: Callable[[Any, Any], Any]) -> None:  # noqa: B027
        """Let a communication hook of DDP's form average the gradients, if they are exchanged."""

    def varies_passes(self) -> bool:
        """Return whether the number of passes may differ between ranks, and change during a run."""
        return True

    def guard(self, module: nn.Module) -> EmptyShareGuard | None:
        """Return the part of a wrapped module that calls the model.

        With `None` a rank that runs out of memory ends the run.
        """
        return None

    def abort_exchange(  # noqa: B027
        self, module: nn.Module, missing: Sequence[nn.Parameter], gradient: float = math.nan
    ) -> None:
        """End the exchange of a backward pass that failed on this rank, so that no other rank waits.

        Args:
            missing: parameters whose gradients the pass did not compute.
            gradient: value that is sent for each of their elements.
        """

    @abstractmethod
    def gradient_divisor(self, world_size: int) -> int:
        """Return the divisor of exchanged gradients: the number of ranks, or 1 if the exchange only sums."""

    def exchanged_bytes(self, model: nn.Module, world_size: int) -> int | None:
        """Return the bytes of a rank's gradients in each step's exchange.

        `None`: they are counted during the training, or not known.
        """
        return None

    def keeps_gradients(self) -> bool:
        """Return whether the gradients' memory stays allocated between steps, even without gradients."""
        return False

    def bucket_bytes(self, gradient_bytes: int, accumulates: bool) -> int:
        """Return the bytes of the exchange's buffers on the device, besides the gradients.

        Args:
            gradient_bytes: of all parameters that are trained.
            accumulates: whether a step adds up the gradients of several microbatches.
        """
        return 0

    def bucket_cap_bytes(self, gradient_bytes: int) -> int:
        """Return the size at which a bucket of gradients is full and leaves.

        Args:
            gradient_bytes: of all parameters that are trained.
        """
        return BUCKET_CAP_BYTES
