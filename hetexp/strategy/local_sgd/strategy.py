"""Local SGD: each device takes its own optimizer steps, and now and then the weights are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from hetexp.core.config import Config
from hetexp.core.cost.calibration import Exchange
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import must_be
from hetexp.core.plan import Plan
from hetexp.plan.exchange_checks import refuse_boundary_wire, refuse_wire, require_exchange
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.plan.strategy import ExchangeText
from hetexp.strategy.local_sgd.prediction import rows_of, sync_seconds, without_gradients
from hetexp.strategy.local_sgd.rounds import mean_of_rounds, rounds_of
from hetexp.strategy.unexchanged import Unexchanged

if TYPE_CHECKING:
    from hetexp.training.engine import Engine


class LocalSGD(Unexchanged):
    """Exchanges weights every `sync_every` steps, and no gradients.

    A global step has the same samples as under any strategy; each rank trains on its slice alone. At a sync
    the ranks' weights are averaged by their samples since the last one, and an outer SGD steps from the last
    synced weights towards that average (Stich 2019; with AdamW inside and Nesterov momentum outside it is
    DiLoCo, Douillard et al. 2023).

    Args:
        sync_every: steps from one average of the weights to the next. The last step of a run always averages.
        local_steps: local steps of a device: `equal` takes one for each global step, `speed` as many as its
            share allows. With `speed` each local step has about as many samples as the smallest share.
        local_batch_size: samples of a local step under `speed`; `None`: those of the smallest share.
        outer_lr: learning rate of the outer SGD; 1 takes the average itself. DiLoCo has 0.7, a momentum of
            0.9, Nesterov and AdamW.
        outer_momentum: momentum of the outer SGD.
        outer_nesterov: whether that momentum is Nesterov's.
        inner_state: optimizer's state at a sync: `keep` each device's own, `average` it as the weights, or
            `reset` it.
        wire: type that the change of the weights travels in. `float32` is the weights' own type; `bfloat16`
            and `int8` compress, with error feedback.
    """

    name: ClassVar[str] = "local_sgd"
    exact = False

    def __init__(
        self,
        sync_every: PositiveInt = 50,
        local_steps: Literal["equal", "speed"] = "equal",
        local_batch_size: PositiveInt | None = None,
        outer_lr: PositiveFloat = 1.0,
        outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        outer_nesterov: bool = False,
        inner_state: Literal["keep", "average", "reset"] = "keep",
        wire: Literal["float32", "bfloat16", "int8"] = "float32",
    ) -> None:
        self.sync_every = sync_every
        self.local_steps = local_steps
        self.local_batch_size = local_batch_size
        self.outer_lr, self.outer_momentum, self.outer_nesterov = outer_lr, outer_momentum, outer_nesterov
        self.inner_state = inner_state
        self.wire = wire

    def rounds(self, world_size: int) -> Sequence[Sequence[Sequence[int]]]:
        """Return rounds of averaging between syncs, one after each global step, over and over again.

        A round is a list of groups: the ranks of each replace their weights by the mean of the group's. None
        by default. A strategy such as gossip averaging overrides it.
        """
        return ()

    def engine(self) -> Engine:
        from hetexp.strategy.local_sgd.engine import LocalSteps

        return LocalSteps(self)

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        problems = []
        trainer, every = config.trainer, self.sync_every
        for key in ("eval_every", "checkpoint_every"):
            steps = getattr(trainer, key)
            if steps % every:
                after = -(-steps // every) * every
                accepted = f"a multiple of `strategy.sync_every` ({every})"
                fix = f"Only at a sync do all devices hold one model. Write trainer.{key}={after}."
                problems.append(must_be(f"trainer.{key}", accepted, steps, fix))
        if self.outer_nesterov and self.outer_momentum == 0:
            accepted = "above 0 if `strategy.outer_nesterov` is true"
            problems.append(must_be("strategy.outer_momentum", accepted, self.outer_momentum))
        if self.local_batch_size is not None and self.local_steps == "equal":
            accepted = "null unless `strategy.local_steps` is speed"
            problems.append(must_be("strategy.local_batch_size", accepted, self.local_batch_size))
        return problems

    def check_exchange(self, config: Config) -> list[str]:
        wire = refuse_wire(config, self.name, f"Write strategy.wire={config.comm.wire}.")
        return wire + refuse_boundary_wire(config, self.name) + require_exchange(config, self.name)

    def predict(self, inputs: PredictionInputs) -> list[PredictedRun]:
        return rows_of(inputs, self, self._steps_of)

    def step_exchange(self, exchange: Exchange, plan: Plan, devices: Sequence[DeviceSpec]) -> Exchange:
        """Return what a step exchanges: its part of the averages of the weights, which nothing hides."""
        quiet = without_gradients(exchange)
        if len(devices) < 2:
            return quiet
        rounds = [
            [sync_seconds(exchange, plan, [devices[rank] for rank in group]) for group in groups]
            for groups in rounds_of(self, len(devices))
        ]
        sync = sync_seconds(exchange, plan, devices, self.wire)
        seconds = (sync + (self.sync_every - 1) * mean_of_rounds(rounds)) / self.sync_every
        return replace(quiet, other_seconds=seconds)

    def averages_gradients(self, plan: Plan) -> bool:
        return False

    def describe_exchange(self, plan: Plan) -> ExchangeText | None:
        what = f"weights as {self.wire}" if self.wire != "float32" else "weights"
        when = "each step" if self.sync_every == 1 else f"every {self.sync_every} steps"
        in_groups = self.sync_every > 1 and any(rounds_of(self, plan.world_size))
        return ExchangeText(what, f"each step in groups, {when} by all" if in_groups else when)

    def ignores_commands(self) -> str:
        return f"strategy={self.name} has no step at whose end all its devices exchange data."

    def _steps_of(self, counts: Sequence[int]) -> list[int]:
        """Return the optimizer steps that each rank takes in a step of the global batch."""
        if self.local_steps != "speed":
            return [1] * len(counts)
        size = self.local_batch_size or min((count for count in counts if count), default=1)
        return [max(1, round(count / size)) for count in counts]
