"""The engine of independent training: each rank trains and saves a model of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hetexp.checkpoint.manifest import rank_folders, search_rank_checkpoints
from hetexp.comm.communicator import Communicator, SoloCommunicator
from hetexp.comm.summation import Summation
from hetexp.core.errors import CheckpointError, must_be
from hetexp.strategy.independent.merging import MergeSettings, merge_ranks, rank_folder
from hetexp.strategy.local_sgd.outer import broadcast_weights
from hetexp.strategy.local_sgd.own_steps import OwnSteps
from hetexp.strategy.local_sgd.sync_stats import FIX, explain
from hetexp.training.engine import StepResult
from hetexp.training.evaluate import evaluate_locally
from hetexp.training.gradient import Gradient
from hetexp.training.measuring.timer import StepTimer, Totals
from hetexp.training.model_hooks import conclude, share
from hetexp.training.nonfinite.loss_scale import NonFiniteError
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.saving.save import provenance

log = logging.getLogger(__name__)


class IndependentSteps(OwnSteps):
    """One rank's side of `independent`."""

    def __init__(self, settings: MergeSettings) -> None:
        super().__init__()
        self._settings = settings
        self._evaluations: list[dict[str, float]] = []
        """The last evaluation of each rank's model."""

    _begun = False
    """Whether the model has its first weights: rank 0's, or this rank's own from a checkpoint."""
    merged: dict[str, Any] | None = None
    """The report of the merge (`hetexp.strategy.independent.merging`)."""

    @property
    def moves_samples(self) -> bool:
        return False  # they were dealt out for good

    @property
    def group(self) -> Communicator:
        return SoloCommunicator()

    # ------------------------------------------------------------ steps

    def begin(self) -> None:
        if not self._begun:
            state = self.state
            broadcast_weights(state.model, Summation(state.exchange, device=state.device), state.rank)
            self._begun = True

    def after_update(self, step: int, gradient: Gradient, num_samples: int) -> None:
        # The model must see no sample of another rank.
        conclude(self.state, share(self.state, step, gradient.tally, num_samples, among=self.group))

    def conclude(self, step: int, result: StepResult, normalizer: LossNormalizer, meter: StepTimer) -> None:
        """Stop at a gradient that no smaller loss scale makes finite, without a message to other ranks.

        Raises:
            NonFiniteError: `trainer.non_finite` says stop.
        """
        result.synchronised = False
        state, stats = self.state, self.since
        if stats.unrecoverable_step and state.config.trainer.non_finite == "stop":
            device = f"{state.plan.devices[state.rank]}"
            message = explain(
                stats.unrecoverable_step, stats.unrecoverable_loss, state.rank, device, stats.samples_found
            )
            raise NonFiniteError(f"{message} {FIX}")

    def forget(self) -> None:
        super().forget()
        self._begun = False

    # ------------------------------------------------------------ evaluation

    def evaluate(self) -> tuple[dict[str, float], dict[str, float]]:
        """Evaluate every rank's model; the result is the mean over the models, weighted by their shares."""
        plan, results = self.state.plan, self._evaluate_all()
        self._evaluations = results
        line = {
            f"device/{device.id}/eval_{key}": value
            for device, result in zip(plan.devices, results, strict=False)
            for key, value in result.items()
        }
        mean = {
            key: sum(share * result[key] for share, result in zip(plan.shares, results, strict=True))
            for key in (results[0] if results else {})
        }
        return mean, line | {f"eval/{name}": value for name, value in mean.items()}

    def _evaluate_all(self) -> list[dict[str, float]]:
        """Run every rank's own model over all evaluation data; return one result a rank, on every rank."""
        state = self.state
        if state.eval_data is None:
            return []
        local = evaluate_locally(state)
        state.communicator.meet()
        names = state.hooks.measures
        table = torch.zeros((state.communicator.world_size, 3 + len(names)), dtype=torch.float64)
        loss = local.get("loss", math.nan)  # a model may return none in evaluation
        row = [loss, local["samples"], local.get("accuracy", -1.0), *(local[name] for name in names)]
        table[state.rank] = torch.tensor(row, dtype=torch.float64)
        return [
            {"loss": loss, "samples": samples}
            | ({"accuracy": accuracy} if accuracy >= 0 else {})
            | dict(zip(names, values, strict=True))
            for loss, samples, accuracy, *values in state.communicator.all_reduce(table).tolist()
        ]

    # ------------------------------------------------------------ checkpoints

    @property
    def checkpoint_folder(self) -> Path:
        return rank_folder(self.state.checkpoints, self.state.rank)

    @property
    def spare_checkpoints(self) -> int:
        return 1  # ranks resume from a step that all of them have, and one may be behind

    def checkpoint_path(self, step: int) -> str:
        return str(self.state.checkpoints)

    def state_extra(self) -> dict[str, Any]:
        """Return this rank's part of the data, and its device."""
        state, rank = self.state, self.state.rank
        part = {
            "rank": rank,
            "ranks": state.plan.world_size,
            "device": state.plan.devices[rank].id,
            "share": state.plan.shares[rank],
            "samples": self.samples,
            "seed": state.config.trainer.seed,
        }
        return {"part": part, "devices": [provenance(state)[rank]]}

    def find(self, path: Path) -> Path:
        state = self.state
        if not rank_folders(path):
            return super().find(path)
        folders = search_rank_checkpoints(path)
        if len(folders) == state.plan.world_size:
            return folders[state.rank]
        accepted = f"a run of as many devices as this one has ({state.plan.world_size})"
        fix = f"It is of {len(folders)}: hetexp merge makes one model of theirs, from which any run resumes."
        raise CheckpointError(must_be("resume", accepted, str(path), fix))

    def restore(self, folder: Path, extra: Mapping[str, Any]) -> None:
        part = extra.get("part")
        if part is None:
            return
        self._begun, self.samples = True, part["samples"]
        if part["share"] != self.state.plan.shares[self.state.rank]:
            log.warning("resume: the shares have changed: samples are dealt out again.")

    # ------------------------------------------------------------ the end

    def finish(self, step: int) -> tuple[str, dict[str, float]] | None:
        """Merge the models that the ranks have saved, on rank 0; the others wait for it."""
        state, result = self.state, None
        if self._settings.merge and state.rank == 0:
            with state.communicator.working():
                result, self.merged = merge_ranks(state, step, self._settings, self._evaluations)
        state.communicator.meet()
        return result

    def summarise(self, summary: dict[str, Any], totals: Totals, ranks: Any) -> None:
        super().summarise(summary, totals, ranks)
        summary["merge"] = self.merged
