"""The base of strategies that cut the model into stages."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, must_be
from hetexp.core.plan import Plan
from hetexp.plan.exchange_checks import check_boundary_wire, refuse_wire, require_exchange
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.plan.strategy import ExchangeText, Preparation, Strategy
from hetexp.strategy.pipeline.prediction import rows_of
from hetexp.strategy.pipeline.schedules import SCHEDULES, Schedule, ScheduleName, oldest_release
from hetexp.strategy.pipeline.shard_plan import Ranges, check_layers, check_ranges

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetexp.training.engine import Engine

log = logging.getLogger(__name__)


class Staged(Strategy):
    """Gives each rank consecutive layers of the model, which it computes for all samples of its pipeline.

    Args:
        schedule: one of torch's (`torch.distributed.pipelining`).
        num_microbatches: of each pipeline and step; `None`: four a stage, at most its samples.
    """

    def __init__(self, schedule: ScheduleName = "1F1B", num_microbatches: int | None = None) -> None:
        self.schedule: Schedule = SCHEDULES[schedule]
        self._num_microbatches = num_microbatches

    def engine(self) -> Engine:
        from hetexp.strategy.pipeline.engine import Stages

        return Stages(self)

    @abstractmethod
    def chosen_groups(self, num_devices: int) -> list[list[int]] | None:
        """Return the ranks of each pipeline, in the order of its stages; `None`: the planner's choice."""

    @abstractmethod
    def chosen_ranges(self) -> list[Ranges] | None:
        """Return the layers of each pipeline's stages; `None`: the planner's choice."""

    def groups_on(self, devices: Sequence[DeviceSpec]) -> list[list[int]] | None:
        """Return the chosen groups, also if `shard_plan` names devices."""
        return self.chosen_groups(len(devices))

    def ranges_in(self, layers: Sequence[str]) -> list[Ranges] | None:
        """Return the chosen ranges, also if `shard_plan` names the model's layers."""
        return self.chosen_ranges()

    def check_layers(self, layers: Sequence[str]) -> list[str]:
        """Return the problems of the chosen stages for a model of these layers."""
        chosen = self.chosen_ranges()
        pairs = zip(chosen, self.keys(), strict=True) if chosen is not None else ()
        return [problem for ranges, key in pairs for problem in check_layers(ranges, layers, key)]

    @abstractmethod
    def keys(self) -> list[str]:
        """Return the Hydra key of each pipeline's ranges."""

    def num_microbatches(self, num_stages: int, num_ranks: int, num_samples: int) -> int:
        """Return the microbatches of a step of one pipeline.

        Args:
            num_samples: of the pipeline in a full global batch.
        """
        if self._num_microbatches is not None:
            return self._num_microbatches
        return self.schedule.num_microbatches(num_stages, num_ranks, num_samples)

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        problems = []
        trainer = config.trainer
        fix = "A pipeline's microbatches are `strategy.num_microbatches`."
        if trainer.accumulate > 1:
            accepted = f"1 if `strategy` is {self.name}"
            problems.append(must_be("trainer.accumulate", accepted, trainer.accumulate, fix))
        if trainer.microbatch_size is not None:
            accepted = f"null if `strategy` is {self.name}"
            problems.append(must_be("trainer.microbatch_size", accepted, trainer.microbatch_size, fix))
        if self.schedule.splits_backward and trainer.activation_checkpointing:
            accepted = f"false if `strategy.schedule` is {self.schedule.name}, which splits the backward pass"
            fix = "1F1B and the other schedules that do not split it may compute activations again."
            problems.append(must_be("trainer.activation_checkpointing", accepted, True, fix))
        release = oldest_release(device.torch for device in devices)
        if release is not None and release < self.schedule.since:
            needed, has = (".".join(map(str, numbers)) for numbers in (self.schedule.since, release))
            fix = (
                f"torch has {self.schedule.name} since {needed}, and a device's interpreter has torch {has}."
            )
            problems.append(
                must_be("strategy.schedule", "one that each rank's torch has", self.schedule.name, fix)
            )
        if self.schedule.splits_backward and any(device.backend == "emulated" for device in devices):
            problems.append(
                must_be(
                    "strategy.schedule",
                    "one that computes a backward pass at once if devices are emulated (GPipe, 1F1B, "
                    "Interleaved1F1B, LoopedBFS)",
                    self.schedule.name,
                )
            )
        return problems

    def check_stages(self, groups: Sequence[Sequence[int]], devices: Sequence[DeviceSpec]) -> list[str]:
        """Return the problems of the chosen ranges and microbatches for pipelines of these ranks."""
        release = oldest_release(device.torch for device in devices)
        problems = []
        chosen = self.chosen_ranges()
        for position, group in enumerate(groups):
            num_stages = self.schedule.stages_a_rank * len(group)
            if chosen is not None:
                ranges, key = chosen[position], self.keys()[position]
                problems += check_ranges(ranges, key)
                accepted = self.schedule.stages_problem(len(ranges), len(group))
                if accepted is not None:
                    problems.append(
                        f"`{key}` must have one range of layers a stage, which are {accepted}, but has "
                        f"{len(ranges)} instead."
                    )
                    continue
                num_stages = len(ranges)
            if self._num_microbatches is None:
                continue
            accepted = self.schedule.microbatches_problem(
                self._num_microbatches, num_stages, len(group), release
            )
            if accepted is not None:
                problem = must_be("strategy.num_microbatches", accepted, self._num_microbatches)
                problems += [problem] if problem not in problems else []
        return problems

    def check_exchange(self, config: Config) -> list[str]:
        wire = refuse_wire(config, self.name)
        return wire + check_boundary_wire(config) + require_exchange(config, self.name)

    def check_model(self, config: Config) -> list[str]:
        """Return why the model cannot be cut as the configuration says.

        This builds the data set and the model. So do the ranks, which report errors of the user's own
        classes.
        """
        from hetexp.strategy.pipeline.pieces import layer_names

        if config.trainer.loss == "model":
            fix = "The last stage returns the model's output and has no labels. strategy=ddp trains it whole."
            return [must_be("trainer.loss", "another loss where the model is cut", "model", fix)]
        try:
            layers = layer_names(config)
        except ConfigError as error:
            return error.problems
        except Exception as error:  # a user's own code, which the ranks run again
            log.info("the model's layers are checked by the ranks only: %r", error)
            return []
        return self.check_layers(layers)

    def prepare(self, plan: Plan, preparation: Preparation) -> Plan:
        return preparation.stages(plan, self)  # no device has the whole model for its own samples

    def predict(self, inputs: PredictionInputs) -> list[PredictedRun]:
        return rows_of(inputs, self)

    def all_reduces(self) -> bool:
        return False  # what stages send goes from one rank to the next

    def averages_gradients(self, plan: Plan) -> bool:
        return len(plan.replica_batch_sizes) > 1

    def describe_exchange(self, plan: Plan) -> ExchangeText | None:
        if len(plan.replica_batch_sizes) < 2:
            return None
        coded = f" as {plan.wire}" if plan.wire != "float32" else ""
        return ExchangeText(f"gradients of the same layers{coded}", how="gloo, through host memory")

    def describe_pipeline(self, num_stages: int, num_ranks: int, num_samples: int) -> str:
        number = self.num_microbatches(num_stages, num_ranks, num_samples)
        return f" in {number} microbatches ({self.schedule.name})"

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        return model  # its pieces are called by the schedule

    def accumulate(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def varies_passes(self) -> bool:
        return False  # all ranks of a pipeline have the same microbatches

    def gradient_divisor(self, world_size: int) -> int:
        return 1  # gradients of pipelines and of tied weights are summed
