"""The result of `hetexp.setup`: the user's own training loop on unequal devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from hetexp.comm.rendezvous import all_gather_json
from hetexp.comm.step_message import StepMessage
from hetexp.core.errors import ConfigError, UsageError
from hetexp.core.files import write_json
from hetexp.data.base import as_data, indexed, stream_of
from hetexp.data.loader import LocalBatch, local_batches
from hetexp.data.sampler import GlobalSampler, Position
from hetexp.library.attach import attach, find_time_scale
from hetexp.library.batches import (
    Collate,
    check_dataset,
    epochs_left,
    on_device,
    part_batches,
    stream_part_batches,
)
from hetexp.library.front import Call, Called, Front, keeping_modes
from hetexp.library.step import Reduction, ScriptStep, Terms
from hetexp.library.whole_batch import WholeBatch
from hetexp.training.engine import StepResult
from hetexp.training.loop import MetricsWindow, Outcome, rebalance
from hetexp.training.measuring.result import report
from hetexp.training.nonfinite.loss_scale import widened, with_values
from hetexp.training.replicas import warn_of_own_buffers
from hetexp.training.saving import resuming
from hetexp.training.saving import save as saving
from hetexp.training.state import Progress, TrainState
from hetexp.training.streams import begun_together, check_same_stream

Number = float | int | torch.Tensor


class Run(WholeBatch):
    """One rank's part of a script's training; every rank of `hetexp launch` has one and does the same.

    Args:
        state: with a model that is wrapped and not attached to its device yet.
        called: the module that the strategy has wrapped.
        store: for small exchanges of the ranks.
        collate: makes a batch of a list of samples.
    """

    def __init__(self, state: TrainState, called: Called, store: dist.Store, collate: Collate) -> None:
        self._state, self._called, self._store, self._collate = state, called, store, collate
        self.model = Front(state.model, self._call)
        """Call it in place of the model: it is data parallel, with the same parameters and methods."""
        self._progress = Progress()
        self._window = MetricsWindow(state)
        self._outcome = Outcome(self._progress, self._window.totals, energy=self._window.energy)
        self._message = StepMessage(state.communicator)
        self._normalizer = state.normalizer(self._message)
        self._step: ScriptStep | None = None
        self._result: StepResult | None = None
        self._before: LocalBatch | None = None
        self._attached = self._rehearsing = self._clock_runs = self._log_due = self._finished = False
        self._evaluations = 0
        self._weight = 1.0
        """The count of this rank's loss in the last step."""
        self._started = time.perf_counter()
        state.optimizer.register_step_pre_hook(lambda *_: self._check_step())

    # ------------------------------------------------------------ where and who

    @property
    def rank(self) -> int:
        return self._state.rank

    @property
    def world_size(self) -> int:
        return self._state.communicator.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and whose output is on the screen."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return self._state.device

    @property
    def step(self) -> int:
        """Number of optimizer steps done, those before a resume included."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """Number of complete passes over the data."""
        return self._progress.position.epoch

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self._state.plan.run_dir)

    def print(self, *values: Any) -> None:
        """Print on rank 0 only."""
        if self.is_main:
            print(*values, flush=True)

    # ------------------------------------------------------------ training

    @property
    def step_due(self) -> bool:
        """Whether the parameters hold the gradient of the whole batch, so that the optimizer may step.

        Always so after `backward` unless steps are accumulated from several microbatches.
        """
        return self._step is not None and self._step.is_over

    def batches(self) -> Iterator[Any]:
        """Yield this rank's part of each batch of the epoch, collated, on the device.

        The next call continues with the next epoch, or in this one after a `break`. The seed alone determines
        the samples of a step, whatever the devices. A part is one microbatch, or as many as `accumulate` or
        `microbatch_size` ask for. Every rank has the same number of steps: a rank without samples gets a
        sample that does not count.

        Raises:
            UsageError: `backward` was not called for a batch.
        """
        step = self._progress.step
        for sampler, start, steps in epochs_left(self._state.sampler, self._progress.position):
            self._run_clock()
            try:
                for batch in self._window.loaded(self._loaded(sampler, start, steps)):
                    yield from self._microbatches(batch)
                self._write_line()
            finally:
                self._stop_clock()
            if self._progress.step > step:
                return

    def _loaded(
        self, sampler: GlobalSampler, start: Position, steps: int
    ) -> Generator[LocalBatch, None, None]:
        """Yield this rank's part of the next batches of an epoch, on the host."""
        state, trainer = self._state, self._state.config.trainer
        loaded = local_batches(
            state.train_data,
            sampler,
            start,
            steps,
            state.balancer.split,
            state.rank,
            trainer.accumulate,
            state.microbatch_size,
            trainer.num_workers,
            self._progress.step,
            self._collate,
            prefetch_factor=trainer.prefetch_factor,
            page_locked=state.backend.copies_page_locked,
        )
        return begun_together(state, loaded) if state.walks_stream else loaded

    def _microbatches(self, batch: LocalBatch) -> Iterator[Any]:
        state = self._state
        self._write_line()
        state.backend.begin_step(self._progress.step)
        state.hook.begin_step()
        self._message.seconds = state.balancer.local_seconds(self._window.meter)
        self._message.drawn = batch.drawn
        step = self._step = ScriptStep(state, self._normalizer, self._window.meter, batch)
        while not step.is_over:
            yield on_device(step.next_microbatch(self._stand_in), state.device)
            step.check_backward_done()

    def _stand_in(self) -> Any:
        """Return a batch of one sample, on the host, for a rank without samples."""
        return self._collate([indexed(self._state.train_data, 1)[0]])

    def backward(
        self, loss: torch.Tensor | Terms, count: Number | None = None, *, reduction: Reduction = "mean"
    ) -> None:
        """Run `loss.backward()` so that the step's gradient is that of the mean over the whole batch.

        This is exact, however unequal the parts. With the last microbatch the ranks' gradients are added up
        and divided by the global count before this method returns. Code that reads or clips gradients
        afterwards gets the gradient of the whole batch.

        Args:
            loss: of the last batch, computed from the output of `model`; or a list of pairs `(loss, count)`,
                whose means over the whole batch are added up, each over its own count.
            count: number of elements that the loss is the mean of (unmasked tokens, for instance), or the sum
                of their weights; by default the batch's samples. If it is 0, the loss is ignored.
            reduction: `sum` for a loss that is the sum over the elements.

        Raises:
            UsageError: there is no batch, or its loss or count cannot be used.
        """
        if self._step is None:
            raise UsageError("run.backward must be called within a loop over run.batches().")
        self._step.backward(loss, count, reduction)
        if self._step.is_over:
            self._state.backend.begin_update()
            self._account(self._step)

    def clip_norm(self, max_norm: float) -> torch.Tensor:
        """Clip the gradient of the whole batch, log its norm before, and return that norm.

        `torch.nn.utils.clip_grad_norm_` on the parameters does the same without the log.
        """
        if not self.step_due:
            raise UsageError("run.clip_norm must follow the last run.backward of a step (run.step_due).")
        parameters = [p for p in self._state.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(with_values([p.grad for p in parameters if p.grad is not None]))
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        assert self._result is not None
        self._result.grad_norm = norm
        return norm

    def _call(self, call: Call) -> Any:
        if self._step is None or self._step.is_over or not torch.is_grad_enabled():
            with self._state.autocast():
                return widened(self._called(call))
        self._step.check_inputs(call)
        if not self._attached:
            self._attach(call, self._step)
        return self._step.call(call)

    def _attach(self, call: Call, step: ScriptStep) -> None:
        self._attached = True
        attach(self._state, self._called, call)
        step.count_passes()
        self._rehearsing = True
        find_time_scale(self._state, call, has_samples=step.rows > 0)
        self._rehearsing = False
        self._window.restart()  # the time until here was no training

    def _account(self, step: ScriptStep) -> None:
        """Count a step whose gradient is complete; the script itself steps the optimizer."""
        state, progress, batch = self._state, self._progress, step.batch
        if self._message.all_drawn:
            check_same_stream(state.plan, self._message.all_drawn)
        if self._before is None:
            warn_of_own_buffers(state)
        rate = float(state.optimizer.param_groups[0]["lr"])
        self._result = StepResult(step.loss_sum, step.global_count, None, rate, local_count=step.count)
        self._window.meter.samples += batch.local_samples
        if self._before is not None:
            rebalance(state, progress.step, self._before, self._message.all_seconds)
        self._before, self._weight = batch, float(step.count)
        progress.step += 1
        progress.samples += batch.global_samples
        progress.position = batch.position
        state.schedule.last_epoch = progress.step
        self._window.add(self._result, batch)
        self._log_due = progress.step % state.config.trainer.log_every == 0

    def _check_step(self) -> None:
        if self._rehearsing or (self._step is not None and self._step.is_over):
            return
        if self._step is None or not self._step.has_backward:
            raise UsageError(
                "optimizer.step() must follow run.backward(loss) for a batch of run.batches(), but did not. "
                "loss.backward() alone exchanges and scales no gradient. Write: for inputs, targets in "
                "run.batches(): loss = criterion(run.model(inputs), targets); run.backward(loss)."
            )
        raise UsageError(
            "optimizer.step() must follow the last microbatch of a step, but more of them come. Write "
            "`if run.step_due:` before optimizer.step() and optimizer.zero_grad()."
        )

    # ------------------------------------------------------------ what is reported

    def log(self, values: Mapping[str, Number] | None = None, **named: Number) -> dict[str, float]:
        """Log means over the ranks, weighted by each rank's count in the last step.

        Every rank calls it, with the same names. The mean loss is always logged, as `train/loss`.

        Returns:
            The means, the same on every rank.
        """
        local = {**(values or {}), **named}
        weight = self._weight
        # A rank on which nothing counts may hold NaN, and NaN × 0 is NaN.
        sums = [float(value) * weight if weight else 0.0 for value in local.values()]
        *sums, total = self._state.communicator.all_reduce(
            torch.tensor([*sums, weight], dtype=torch.float64)
        ).tolist()
        means = {name: s / total if total else float("nan") for name, s in zip(local, sums, strict=True)}
        for logger in self._state.loggers:
            logger.log(means, self.step)
        return means

    def evaluate(
        self, function: Callable[[Any], Mapping[str, Number]], dataset: Dataset[Any] | None = None
    ) -> dict[str, float]:
        """Evaluate the model, each rank on its own part of the data; no sample counts twice.

        Args:
            function: gets a batch as from `batches`, and returns sums over its samples by name. If one of the
                names is `count`, the means are taken over it instead of the samples.
            dataset: used instead of the `eval_dataset` of `setup`.

        Returns:
            The means, and `samples`; the same on every rank, and logged as `eval/<name>`.
        """
        state = self._state
        data = dataset if dataset is not None else state.eval_data
        if data is None:
            raise UsageError("run.evaluate must have data, but hetexp.setup got no eval_dataset.")
        readable = as_data(data)
        if readable is None:
            raise ConfigError(check_dataset("dataset", data))
        sums: dict[str, float] = {"samples": 0.0}
        with self._clock_stopped():
            most = max(state.pass_sizes(state.plan.local_batch_sizes[state.rank]), default=1)
            with keeping_modes(self.model), torch.no_grad():
                self.model.eval()
                for batch, rows in self._evaluated(readable, most):
                    for name, value in function(on_device(batch, state.device)).items():
                        sums[name] = sums.get(name, 0.0) + float(value)
                    sums["samples"] += rows
                    state.communicator.alive()
            state.communicator.meet()
            result = self._means(sums)
        self._outcome.evaluation = result
        for logger in state.loggers:
            logger.log({f"eval/{name}": value for name, value in result.items()}, self.step)
        return result

    def _evaluated(self, data: Dataset[Any], most: int) -> Iterator[tuple[Any, int]]:
        """Yield this rank's part of evaluation data in batches of at most `most` samples, with the sizes."""
        state, trainer, stream = self._state, self._state.config.trainer, stream_of(data)
        if stream is not None:
            sizes, split = (trainer.global_batch_size, trainer.seed), state.balancer.now
            return stream_part_batches(stream, *sizes, split, state.rank, most, self._collate)
        bounds = state.balancer.now(len(data)).bounds(state.rank)  # type: ignore[arg-type]
        return part_batches(data, bounds, most, trainer.num_workers, self._collate)

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        """Add up every rank's sums, in rank order, and divide them."""
        self._evaluations += 1
        topic, limit = f"evaluation/{self._evaluations}", self._state.config.comm.timeout_seconds
        rows = all_gather_json(self._store, topic, self.rank, self.world_size, sums, limit)
        names = dict.fromkeys(name for row in rows for name in row)
        totals = {name: sum(row.get(name, 0.0) for row in rows) for name in names}
        samples = totals.pop("samples")
        count = totals.pop("count", samples)
        means = {name: total / count if count else float("nan") for name, total in totals.items()}
        return means | {"samples": samples}

    # ------------------------------------------------------------ what is kept

    def save(self) -> str | None:
        """Write a checkpoint of model, optimizer and position in the data; return its path on rank 0.

        Every rank calls it, after the optimizer's step; rank 0 writes, the others wait.
        """
        with self._clock_stopped():
            path = saving.save(self._state, self._progress, wait=True)
        self._outcome.checkpoint = path
        return path

    def resume(self, path: str | Path | None = None) -> bool:
        """Resume from a checkpoint, and return whether one was named.

        Args:
            path: of a checkpoint, or of a run, whose newest checkpoint is used. By default the path of
                `resume=` of `hetexp launch`, from which `setup` has resumed already.

        Raises:
            ConfigError, CheckpointError: the checkpoint is missing, incomplete or of another model.
        """
        state = self._state
        if path is not None:
            state.config = state.config.model_copy(update={"resume": str(path)})
        if state.config.resume is None:
            return False
        self._progress = self._outcome.progress = resuming.resume(state, configured=False)
        self._step = self._before = None
        return True

    def finish(self) -> dict[str, Any]:
        """End the run: write the summary and close the trackers; `hetexp launch` does it after the script."""
        state = self._state
        if self._finished:
            raise UsageError("run.finish must be called once, but is called again.")
        self._finished = True
        self._stop_clock()
        if self._window.num_steps:
            self._window.restart()  # logging is no training
            self._outcome.train_loss = self._window.log(self._progress)
        seconds = time.perf_counter() - self._started
        summary = report(state, self._store, self._outcome, seconds)
        trainer = state.config.trainer
        summary |= {"global_batch": trainer.global_batch_size, "seed": trainer.seed}
        self.close(0, summary)
        if self.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "summary.json", summary)
        state.communicator.close()
        return summary

    def close(self, exit_code: int, summary: dict[str, Any] | None = None) -> None:
        """Close the trackers of a run that ends; safe to call twice."""
        loggers, self._state.loggers = self._state.loggers, ()
        for logger in loggers:
            logger.finish(summary or {}, exit_code)

    # ------------------------------------------------------------ the clock

    def _write_line(self) -> None:
        """Log the steps since the last line if a line is due; all ranks call it at the same step."""
        if self._log_due:
            self._log_due = False
            self._outcome.train_loss = self._window.log(self._progress)

    def _run_clock(self) -> None:
        self._window.restart()
        self._clock_runs = True

    def _stop_clock(self) -> None:
        if self._clock_runs:
            self._window.stop()
            self._clock_runs = False

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        """Do not count the time of the block as training."""
        runs = self._clock_runs
        self._stop_clock()
        yield
        if runs:
            self._run_clock()
