"""Independent training: each device trains a model on its part of the data; the end merges them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from hetexp.checkpoint.manifest import rank_folders
from hetexp.core.config import Config
from hetexp.core.cost.calibration import Exchange
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import must_be
from hetexp.core.plan import Plan
from hetexp.plan.exchange_checks import require_exchange
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.plan.strategy import ExchangeText
from hetexp.strategy.local_sgd.prediction import rows_of, without_gradients
from hetexp.strategy.unexchanged import Unexchanged

if TYPE_CHECKING:
    from torch import nn

    from hetexp.data.partitioned import PartitionedSampler
    from hetexp.strategy.independent.engine import IndependentSteps


class Independent(Unexchanged):
    """Exchanges neither gradients nor weights while it trains.

    The training samples are dealt out once, by the seed and in proportion to the shares, each to one rank.
    All ranks start from the same weights and take the same number of steps with their local batch sizes.

    Args:
        merge: whether to merge the models after the last step; otherwise `hetexp merge` does it later.
        soup: how to merge: `greedy` adds a model only if the evaluation loss falls; `None`: the mean weighted
            by samples. `greedy` goes from the best model to the worst (Wortsman et al. 2022).
        batch_norm: running statistics of the merged model: `recalibrate` measures them on training data,
            `average` takes their mean.
    """

    name: ClassVar[str] = "independent"
    exact = False

    def __init__(
        self,
        merge: bool = True,
        soup: Literal["greedy"] | None = None,
        batch_norm: Literal["recalibrate", "average"] = "recalibrate",
    ) -> None:
        self.merge, self.soup, self.batch_norm = merge, soup, batch_norm

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        if self.soup is not None and not self.merge:
            fix = "hetexp merge --soup greedy does it later."
            return [must_be("strategy.soup", "null unless `strategy.merge` is true", self.soup, fix)]
        return []

    def engine(self) -> IndependentSteps:
        from hetexp.strategy.independent.engine import IndependentSteps

        return IndependentSteps(self)

    def sampler(self, plan: Plan, config: Config, num_samples: int) -> PartitionedSampler:
        from hetexp.data.partitioned import PartitionedSampler

        trainer = config.trainer
        sizes = num_samples, trainer.global_batch_size, trainer.seed
        return PartitionedSampler(*sizes, plan.shares, trainer.drop_last, trainer.overfit_batches)

    def check_exchange(self, config: Config) -> list[str]:
        return super().check_exchange(config) + require_exchange(config, self.name)

    def check_hosts(self) -> list[str]:
        fix = "Each machine keeps its models: run it on each by itself, and `hetexp merge` them."
        return [must_be("strategy", "one that ends with one model over several machines", self.name, fix)]

    def predict(self, inputs: PredictionInputs) -> list[PredictedRun]:
        return rows_of(inputs, self, lambda counts: [1] * len(counts))

    def step_exchange(self, exchange: Exchange, plan: Plan, devices: Sequence[DeviceSpec]) -> Exchange:
        return without_gradients(exchange)

    def all_reduces(self) -> bool:
        return False

    def averages_gradients(self, plan: Plan) -> bool:
        return False

    def describe_exchange(self, plan: Plan) -> ExchangeText | None:
        return ExchangeText("models, merged to one", "after the last step") if self.merge else None

    def ignores_commands(self) -> str:
        return f"strategy={self.name} has no step at whose end all its devices exchange data."

    def refuses_restart(self) -> str:
        return f"strategy={self.name} trains a model on each device, and one of them is lost."

    def resumes_ranks(self, path: Path) -> bool:
        return bool(rank_folders(path))

    def exchanged_bytes(self, model: nn.Module, world_size: int) -> int | None:
        return 0
