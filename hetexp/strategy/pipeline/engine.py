"""The engine of pipelines: a rank computes its layers for all samples of its pipeline."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetexp.checkpoint.folder import TrainingState, load_checkpoint
from hetexp.checkpoint.manifest import search_checkpoint
from hetexp.core.config import Config
from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.core.split import apportion
from hetexp.data.loader import LocalBatch, local_batches
from hetexp.data.page_locked import on_device
from hetexp.data.sampler import Position
from hetexp.hardware.backend import StagePasses
from hetexp.hardware.emulation.pacing import tensors
from hetexp.hardware.memory.out_of_memory import is_out_of_memory
from hetexp.strategy.pipeline.checkpoint import gather, load_part
from hetexp.strategy.pipeline.cutting import Cut, cut_model
from hetexp.strategy.pipeline.shared_gradients import parameters_by_name
from hetexp.strategy.pipeline.staging import NothingTrained, StageSettings, Staging
from hetexp.training.engine import CheckpointParts, PacedLink, StepResult, Work
from hetexp.training.gradient import Gradient
from hetexp.training.group import connect
from hetexp.training.loss import batch_counts
from hetexp.training.measuring.timer import StepTimer, Totals
from hetexp.training.nonfinite.loss_scale import unscale_and_check
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.recovery.oom_recovery import fatal_out_of_memory, sizes_of
from hetexp.training.replica import Replica, gradient_of
from hetexp.training.step import advance_schedule, guarded_step


class Stages(Replica):
    """One rank's side of `pipeline` and `hybrid`; the rank's model has the layers of its stages only."""

    cut: Cut
    staging: Staging

    def __init__(self, settings: StageSettings) -> None:
        self._settings = settings

    # ------------------------------------------------------------ building

    def shard(self, plan: Plan, config: Config, rank: int, model: nn.Module, inputs: Any) -> nn.Module:
        if config.resume is not None:  # a checkpoint is of the whole model
            load_checkpoint(search_checkpoint(Path(plan.working_dir, config.resume))[0], model, None)
        dtype = torch.float64 if plan.precisions[rank] == "float64" else torch.float32
        self.cut = cut_model(plan, rank, model, on_device(inputs, torch.device("cpu"), dtype))
        if not self.cut.whole.trained:
            raise ConfigError("`model` must have a parameter that requires a gradient, but has none.")
        return model if any(p.requires_grad for p in model.parameters()) else NothingTrained()

    def prepare(self, inputs: Any) -> None:
        """Do nothing: the device gets the pieces of the model once the group is formed."""

    def join(
        self, plan: Plan, rank: int, store: dist.Store, agree_on_state: Callable[[], None] | None = None
    ) -> None:
        connect(self.state, plan, store)
        self.staging = Staging(self.state, self.cut, store, self._settings)
        self._attach_pieces()

    def _attach_pieces(self) -> None:
        """Attach this rank's pieces of the model to the device."""
        state, cut, stages = self.state, self.cut, []
        for stage, piece, example in zip(cut.stages, cut.pieces, cut.examples, strict=True):
            inputs = state.to_device(example)
            bounds = (stage.first_layer, stage.end_layer)
            takes, gives = (cut.layouts[n].num_bytes(state.dtype) if n in cut.layouts else 0 for n in bounds)
            if takes:
                for tensor in tensors(inputs):
                    tensor.requires_grad_(tensor.is_floating_point())
            stages.append(StagePasses(piece, inputs, takes, gives))
        state.backend.attach_stages(stages, state.model, state.optimizer)

    # ------------------------------------------------------------ training

    @property
    def moves_samples(self) -> bool:
        return False

    @property
    def computes_loss(self) -> bool:
        return False

    def loaded_in(self) -> tuple[int, int | None]:
        return self.staging.num_microbatches, None

    def batches(
        self, start: Position, num_steps: int, first_step: int = 0, num_workers: int = 0
    ) -> Generator[LocalBatch, None, None]:
        state, sizes = self.state, self.state.plan.replica_batch_sizes
        return local_batches(
            state.train_data,
            state.sampler,
            start,
            num_steps,
            lambda _, total: apportion(total, sizes),
            self.staging.replica,
            *self.loaded_in(),
            num_workers,
            first_step,
            state.collate,
            prefetch_factor=state.config.trainer.prefetch_factor,
            page_locked=state.backend.copies_page_locked,
        )

    def step(self, step: int, batch: LocalBatch, normalizer: LossNormalizer, meter: StepTimer) -> StepResult:
        """Take the step that one device would take with the global batch.

        The rank of a pipeline's last stage multiplies its loss by S / N, with N the global count and S the
        loss scale. All further gradients are sums: over microbatches, pipelines, and the two ends of a tied
        weight.
        """
        state = self.state
        done = guarded_step(state, self, step, batch.microbatches, normalizer, meter)
        advance_schedule(state, done.finite)
        meter.samples += batch.local_samples
        return done.result(local_count=normalizer.local_count)

    def gradient(
        self, step: int, microbatches: list[Any], normalizer: LossNormalizer, meter: StepTimer
    ) -> Gradient:
        state, staging = self.state, self.staging
        counted, sizes = microbatches if staging.is_last else [], sizes_of(microbatches)
        targets = [targets for _, targets in counted]
        normalizer.start(*batch_counts(state.loss, targets, sizes[: len(targets)]))
        state.optimizer.zero_grad(set_to_none=True)
        why = "The other ranks of the pipeline cannot do the step again."
        with fatal_out_of_memory(state, step, sizes, why), _bare_shortage():
            state.backend.begin_step(step)
            factor, global_count = normalizer.factor()
            state.loss.set_global_counts(*normalizer.term_counts)
            loss_sum = staging.run(microbatches, factor)
            staging.gradients.sum()
        meter.add(staging.times.busy_seconds[-1], staging.times.step_seconds[-1])
        gradient = Gradient(loss_sum, global_count, factor=factor)
        checked = state.config.trainer.non_finite != "continue"
        gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
        gradient.finite, norm = unscale_and_check(gradients, normalizer.loss_scale, checked), None
        clips = state.config.trainer.clip_norm is not None
        if checked or normalizer.loss_scale is not None or clips:
            gradient.finite, norm = staging.gradients.agree(gradient.finite, clips)
        if norm is not None:
            gradient.norm = torch.tensor(norm, dtype=state.dtype, device=state.device)
        return gradient

    def smaller(self, step: int, microbatches: list[Any], gradient: Gradient) -> list[Any] | None:
        return None  # all ranks of a pipeline have the same microbatches

    # ------------------------------------------------------------ evaluation

    def forward(self, inputs: Any, number: int, num_samples: int) -> Any:
        return self.staging.evaluate(inputs, number, num_samples)

    def evaluation_part(self, total: int) -> tuple[int, int, int]:
        sizes = self.state.plan.replica_batch_sizes
        return *apportion(total, sizes).bounds(self.staging.replica), self.staging.rows

    def shares(self, samples: Sequence[float], total: float) -> Sequence[float]:
        return self.state.plan.shares  # of the work: every rank has all samples of its pipeline

    def replicated(self) -> Iterator[tuple[str, str, torch.Tensor, tuple[int, ...]]]:
        """Yield the tensors of several ranks: replicas of a layer, and both ends of a tied weight."""
        model, cut = self.state.model, self.cut
        local, absent = parameters_by_name(model, cut), torch.zeros(())
        buffers = dict(model.named_buffers())
        for name in dict.fromkeys(cut.whole.parameters.values()):
            ranks, parameter = cut.holders[name], local.get(name)
            if len(ranks) > 1:
                yield "weight", name, absent if parameter is None else parameter.detach(), ranks
                if name in cut.whole.trained:
                    yield "gradient", name, absent if parameter is None else gradient_of(parameter), ranks
        for name in cut.whole.buffers:
            if len(cut.holders[name]) > 1:
                yield "buffer", name, buffers.get(name, absent), cut.holders[name]

    # ------------------------------------------------------------ checkpoints

    def checkpoint_bytes(self, local_bytes: int) -> int:
        return self.staging.sum_once(local_bytes)

    def gather(self, step: int) -> CheckpointParts | None:
        return gather(self.state, self.cut, self.staging.all_ranks, step)

    def load(self, folder: Path) -> TrainingState:
        return load_part(self.state, self.cut, folder)

    # ------------------------------------------------------------ emulation and summary

    @property
    def paced_links(self) -> Sequence[PacedLink]:
        return [self.staging.gradients]

    def start_pacing(self, time_scale: float) -> None:
        super().start_pacing(time_scale)
        self.staging.times.forget()  # those of the warm-up

    def work(self) -> Work:
        plan, staging = self.state.plan, self.staging
        return Work(
            plan.replica_batch_sizes[staging.replica], staging.rows, share=plan.shares[self.state.rank]
        )

    def sent_bytes(self, steps: int) -> float | None:
        return self.staging.sent_bytes() + self.staging.gradients.num_bytes

    def facts(self) -> dict[str, Any]:
        """Return the times of this rank's stages: medians over all microbatches of all steps."""
        staging, times = self.staging, self.staging.times
        return {
            "stages": [
                {
                    "index": stage.index,
                    "layers": [stage.first_layer, stage.end_layer],
                    "forward_s": times.median(stage.index, "forward"),
                    "backward_s": times.median(stage.index, "backward"),
                    "weights_s": times.median(stage.index, "weights"),
                }
                for stage in self.cut.stages
            ],
            "busy_s": statistics.median(times.busy_seconds) if times.busy_seconds else None,
            "step_s": statistics.median(times.step_seconds) if times.step_seconds else None,
            "microbatches": staging.num_microbatches,
            "sent": staging.sent_bytes(),
        }

    def summarise(self, summary: dict[str, Any], totals: Totals, ranks: Sequence[dict[str, Any]]) -> None:
        plan, predicted = self.state.plan, self.state.plan.predicted_step_seconds
        summary["pipeline"] = [
            self._pipeline(replica, samples, [rank["facts"] for rank in ranks])
            for replica, samples in enumerate(plan.replica_batch_sizes)
        ]
        scale = self.state.time_scale or 1.0
        summary["predicted_step_s"] = None if predicted is None else predicted * scale

    def _pipeline(self, replica: int, samples: int, facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the summary's entry of one pipeline, with its stages in order.

        `step_s` is the median time of a step's schedule, from the first microbatch to the last gradient,
        without the exchange between pipelines and the update. `bubble` is the fraction of it in which a
        device neither computed nor moved tensors, the mean over the pipeline's devices.
        """
        plan = self.state.plan
        ranks = [rank for rank, stages in enumerate(plan.stages) if stages[0].replica == replica]
        steps = [facts[rank]["step_s"] for rank in ranks]
        busy = [facts[rank]["busy_s"] for rank in ranks]
        step = max(steps) if all(seconds is not None for seconds in steps) else None
        stages = [stage | {"rank": rank} for rank in ranks for stage in facts[rank]["stages"]]
        return {
            "devices": [plan.devices[rank].id for rank in ranks],
            "samples": samples,
            "microbatches": facts[ranks[0]]["microbatches"],
            "step_s": step,
            "boundary_wire": plan.boundary_wire,
            "boundary_bytes": sum(facts[rank]["sent"] for rank in ranks),
            "bubble": 1.0 - sum(busy) / len(ranks) / step if step else None,
            "stages": sorted(stages, key=lambda stage: stage["index"]),
        }


@contextmanager
def _bare_shortage() -> Iterator[None]:
    """Raise the out-of-memory error itself, which torch's schedule wraps into another one."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, RuntimeError) and is_out_of_memory(error.__cause__):
            raise error.__cause__ from None
        raise
