"""Runs a rank's stages by torch's schedule, with their activations and the gradients that ranks share.

Activations travel from stage to stage through the host (`hetexp.comm.boundary`), so that any vendors mix.
Microbatches may differ in size and even be empty, as torch only sees tensors of one size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from hetexp.comm.boundary import nothing, number_of, pack, unpack
from hetexp.core.stage import Stage
from hetexp.model.cut import Piece
from hetexp.strategy.pipeline.cutting import Cut
from hetexp.strategy.pipeline.schedules import Schedule
from hetexp.strategy.pipeline.shared_gradients import SharedGradients
from hetexp.torch_private import leave_out_first_messages
from hetexp.training.loss import num_rows

if TYPE_CHECKING:
    from hetexp.training.state import TrainState

HOST = torch.device("cpu")


class NothingTrained(nn.Module):
    """A module with an empty parameter for the optimizer of a rank without trained parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))


@dataclass
class Feed:
    """The microbatches of the step under way, and the sum of their losses."""

    microbatches: list[Any] = field(default_factory=list)
    """`(inputs, targets)` each; `None` for an empty one."""
    sizes: list[int] = field(default_factory=list)
    factor: float = 1.0
    loss_sum: torch.Tensor | None = None


class StageModule(nn.Module):
    """A stage as torch's schedule calls it: from one tensor on the host to the next, or to the loss."""

    def __init__(
        self, state: TrainState, cut: Cut, stage: Stage, piece: Piece, feed: Feed, rows: int
    ) -> None:
        super().__init__()
        self.piece = piece
        self._state, self._cut, self._stage, self._feed = state, cut, stage, feed
        self._capacity = capacity_after(state, cut, stage, rows)
        self._anchor = torch.zeros((), dtype=state.dtype, requires_grad=True)

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """Return [capacity] on the host; the last stage returns [1], the loss times the factor.

        Args:
            received: [1], the number of a microbatch, on the first stage; else the packed tensor of the stage
                before.
        """
        state, feed, number = self._state, self._feed, number_of(received)
        rows = feed.sizes[number]
        if rows == 0:
            anchor = received if received.requires_grad else self._anchor
            return nothing(anchor, 0 if self._is_last else number, self._capacity)
        with state.autocast():
            output = self.piece(self._inputs(received, number, rows))
            if self._is_last:
                total = state.local_loss(output, feed.microbatches[number][1], rows)
        if not self._is_last:
            layout = self._cut.layouts[self._stage.end_layer]
            return pack(output, number, layout, self._capacity, state.dtype, self._anchor)
        assert feed.loss_sum is not None
        feed.loss_sum += total.detach()
        return torch.stack([total * feed.factor])

    def _inputs(self, received: torch.Tensor, number: int, rows: int) -> Any:
        if self._stage.index == 0:
            return self._state.to_device(self._feed.microbatches[number][0])
        layout = self._cut.layouts[self._stage.first_layer]
        return unpack(received, layout, rows, self._state.device)

    @property
    def _is_last(self) -> bool:
        return self._stage.index == self._cut.num_stages - 1


def capacity_after(state: TrainState, cut: Cut, stage: Stage, rows: int) -> int:
    """Return the elements of a stage's packed output for `rows` samples."""
    if stage.index == cut.num_stages - 1:
        return 1
    return cut.layouts[stage.end_layer].capacity(rows, state.dtype)


class StageSettings(Protocol):
    """The options of a strategy that cuts the model (`hetexp.strategy.pipeline.staged`)."""

    schedule: Schedule

    def num_microbatches(self, num_stages: int, num_ranks: int, num_samples: int) -> int:
        """Return the microbatches of a step of one pipeline."""
        ...


class Staging:
    """This rank's stages, connected with those of the other ranks; all ranks build it at the same time.

    Args:
        state: with the model cut and the communicator formed.
        store: shared by all ranks.
    """

    def __init__(self, state: TrainState, cut: Cut, store: dist.Store, settings: StageSettings) -> None:
        self.cut, self._settings = cut, settings
        self._state = state
        self.replica = cut.stages[0].replica
        samples = state.plan.replica_batch_sizes[self.replica]
        self.num_microbatches = settings.num_microbatches(cut.num_stages, len(cut.group), samples)
        self.rows = max(1, -(-samples // self.num_microbatches))
        """Most samples of a microbatch."""
        self.is_last = cut.stages[-1].index == cut.num_stages - 1
        """Whether this rank computes the loss."""
        self.times = StageTimes()
        self.feed = Feed()
        self._handed: dict[int, torch.Tensor] = {}
        """In an evaluation, the packed input of a stage whose stage before is on the same rank."""
        timeout = timedelta(seconds=state.config.comm.timeout_seconds)
        self.all_ranks = dist.new_group(backend="gloo", timeout=timeout)
        """All ranks, through the host."""
        replicas = range(len(state.plan.replica_batch_sizes))
        groups = sorted({tuple(_ranks_of(state, replica)) for replica in replicas})
        formed = {ranks: dist.new_group(list(ranks), backend="gloo", timeout=timeout) for ranks in groups}
        self.group = formed[cut.group]
        """The ranks of this pipeline, through the host."""
        self.gradients = SharedGradients.of_stages(state, cut, store)
        self._schedule = self._build()

    def run(self, microbatches: list[Any], factor: float) -> torch.Tensor:
        """Run forward and backward of all microbatches; the gradients are then those of this pipeline alone.

        Args:
            microbatches: `(inputs, targets)` each; at most `num_microbatches`.
            factor: of the loss, see `LossNormalizer`.

        Returns:
            The sum of the loss on the rank that computes it, 0 on all others.
        """
        feed, state = self.feed, self._state
        missing = self.num_microbatches - len(microbatches)
        feed.microbatches = [*microbatches, *[None] * missing]
        feed.sizes = [*(num_rows(inputs) for inputs, _ in microbatches), *[0] * missing]
        feed.factor = factor
        feed.loss_sum = torch.zeros((), dtype=state.dtype, device=state.device)
        numbers = torch.arange(self.num_microbatches, dtype=state.dtype)
        started = time.perf_counter()
        arguments = (numbers,) if self.cut.stages[0].index == 0 else ()
        self._schedule.step(*arguments, **({"target": numbers} if self.is_last else {}))
        state.backend.synchronize()
        self.times.end_step(time.perf_counter() - started, state.backend.seconds_between)
        feed.microbatches = []
        return feed.loss_sum

    def evaluate(self, inputs: Any, number: int, num_samples: int) -> Any:
        """Run a batch through the pipeline's stages without gradients.

        Every rank of the pipeline calls it for the same batches in the same order.

        Args:
            inputs: of the model, on the host; only the first stage reads them.

        Returns:
            The model's output on the rank of the last stage, `None` elsewhere.
        """
        output = None
        for stage, piece in zip(self.cut.stages, self.cut.pieces, strict=True):
            output = self._pass(stage, piece, inputs, number, num_samples)
        return output

    def _pass(self, stage: Stage, piece: Piece, inputs: Any, number: int, num_samples: int) -> Any:
        state, cut = self._state, self.cut
        if stage.index == 0:
            payload = state.to_device(inputs)
        else:
            layout = cut.layouts[stage.first_layer]
            packed = self._handed.pop(stage.index, None)
            if packed is None:
                packed = torch.empty(layout.capacity(num_samples, state.dtype), dtype=state.dtype)
                dist.recv(packed, self._rank_of(stage.index - 1), group=self.group)
            payload = unpack(packed, layout, num_samples, state.device)
        with state.autocast():
            output = piece(payload)
        if stage.index == cut.num_stages - 1:
            return output
        layout = cut.layouts[stage.end_layer]
        capacity = layout.capacity(num_samples, state.dtype)
        packed = pack(output, number, layout, capacity, state.dtype, anchor=torch.zeros(()))
        after = self._rank_of(stage.index + 1)
        if after == state.rank:
            self._handed[stage.index + 1] = packed
        else:
            dist.send(packed, after, group=self.group)
        return None

    def sum_once(self, local_bytes: int) -> int:
        """Return the sum over all ranks, counting parameters of several ranks once; all ranks call it.

        Args:
            local_bytes: of this rank's parameters, about the same for each element.
        """
        held = sum(p.numel() for p in self._state.model.parameters())
        counted = sum(p.numel() for p in self.gradients.counted)
        part = local_bytes * counted / held if held else 0.0
        return round(float(self._state.communicator.all_reduce(torch.tensor([part], dtype=torch.float64))))

    def sent_bytes(self) -> int:
        """Return the bytes that this rank's stages send in a step, forward and backward."""
        itemsize = self._state.dtype.itemsize
        sent = 0
        for stage in self.cut.stages:
            if stage.index < self.cut.num_stages - 1:
                sent += self.cut.layouts[stage.end_layer].capacity(self.rows, self._state.dtype)
            if stage.index:
                sent += self.cut.layouts[stage.first_layer].capacity(self.rows, self._state.dtype)
        return sent * itemsize * self.num_microbatches

    def _rank_of(self, stage_index: int) -> int:
        group = self.cut.group
        return group[self._settings.schedule.rank_of(stage_index, len(group))]

    def _build(self) -> Any:
        from torch.distributed.pipelining import PipelineStage, schedules

        state, cut = self._state, self.cut
        pipeline = (s for held in state.plan.stages for s in held if s.replica == self.replica)
        before = {stage.end_layer: capacity_after(state, cut, stage, self.rows) for stage in pipeline}
        stages = []
        for stage, piece in zip(cut.stages, cut.pieces, strict=True):
            module = StageModule(state, cut, stage, piece, self.feed, self.rows)
            takes, gives = before.get(stage.first_layer, 1), capacity_after(state, cut, stage, self.rows)
            pipeline_stage = PipelineStage(
                module,
                stage.index,
                cut.num_stages,
                HOST,
                input_args=_shape(state, takes, stage.index > 0),
                output_args=_shape(state, gives, True),
                group=self.group,
            )
            leave_out_first_messages(pipeline_stage)
            self.times.watch(pipeline_stage, stage.index, self.feed, state.backend.mark)
            stages.append(pipeline_stage)
        schedule = schedules.get_schedule_class(self._settings.schedule.name)
        several = issubclass(schedule, schedules.PipelineScheduleMulti)
        return schedule(
            stages if several else stages[0],
            self.num_microbatches,
            loss_fn=lambda output, _: output.sum(),
            scale_grads=False,
        )


class StageTimes:
    """The times of this rank's passes, stage by stage, and of whole steps."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        """From the first microbatch to the last gradient, of each step."""
        self.busy_seconds: list[float] = []
        """The part of each step in which this rank computed or moved tensors between device and host."""
        self.passes: dict[tuple[int, str], list[float]] = {}
        """Stage and kind of pass (`forward`, `backward`, or `weights` if a schedule splits backward passes)
        → seconds of each microbatch."""
        self._marks: list[tuple[int, str, int, Any, Any]] = []

    def watch(self, stage: Any, index: int, feed: Feed, mark: Callable[[], Any]) -> None:
        """Measure the passes of one of torch's stages."""
        for name, kind in _PASSES.items():
            setattr(stage, name, self._measured(getattr(stage, name), index, kind, feed, mark))

    def _measured(
        self, function: Callable[..., Any], index: int, kind: str, feed: Feed, mark: Callable[[], Any]
    ) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            number = args[0] if args else next(iter(kwargs.values()))
            start = mark()
            result = function(*args, **kwargs)
            self._marks.append((index, kind, feed.sizes[number], start, mark()))
            return result

        return measured

    def end_step(self, seconds: float, between: Callable[[Any, Any], float]) -> None:
        """Read the marks of a step that the device has done."""
        busy = 0.0
        for index, kind, size, start, end in self._marks:
            spent = between(start, end)
            busy += spent
            if size:
                self.passes.setdefault((index, kind), []).append(spent)
        self._marks.clear()
        self.step_seconds.append(seconds)
        self.busy_seconds.append(busy)

    def median(self, index: int, kind: str) -> float | None:
        """Return the median seconds of a pass of a stage, `None` without one."""
        seconds = self.passes.get((index, kind))
        return statistics.median(seconds) if seconds else None

    def forget(self) -> None:
        """Forget all times: they were of no training."""
        self.step_seconds, self.busy_seconds, self.passes = [], [], {}


_PASSES = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weights",
}


def _shape(state: TrainState, capacity: int, requires_grad: bool) -> torch.Tensor:
    return torch.empty(capacity, dtype=state.dtype, device="meta", requires_grad=requires_grad)


def _ranks_of(state: TrainState, replica: int) -> list[int]:
    return [rank for rank, held in enumerate(state.plan.stages) if held[0].replica == replica]
