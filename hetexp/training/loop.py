"""The training loop. A step reads top to bottom in `guarded_step` (`hetexp/training/step.py`)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from hetexp.balancing.scheduler import idle_seconds, imbalance
from hetexp.comm.connections.disposal import release_later
from hetexp.comm.step_message import StepMessage
from hetexp.core import start_up
from hetexp.core.device import GIB
from hetexp.data.loader import LocalBatch
from hetexp.data.prefetch import InWaits
from hetexp.hardware.backend import Backend
from hetexp.hardware.energy import EnergyMeter
from hetexp.optimizer.schedule import ClassSchedule
from hetexp.training.engine import StepResult
from hetexp.training.loss import LabelError
from hetexp.training.measuring.timer import StepTimer, Totals
from hetexp.training.measuring.warmup_calibration import settle_time_scale
from hetexp.training.nonfinite.loss_scale import NonFiniteError
from hetexp.training.nonfinite.search import explain
from hetexp.training.nonfinite.wrong_index import explained, named
from hetexp.training.recovery.carried import Carried
from hetexp.training.replicas import ReplicaCheck
from hetexp.training.saving.save import add_evaluation, finish_saving, save, save_before
from hetexp.training.state import Progress, TrainState
from hetexp.training.streams import begun_together, check_same_stream, heed_end

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """The results of a training, for the summary; losses and evaluation are the same on every rank."""

    progress: Progress
    totals: Totals
    train_loss: float | None = None
    evaluation: dict[str, float] | None = None
    checkpoint: str | None = None
    stopped_early: bool = False
    energy: EnergyMeter | None = None


class Recovery(Protocol):
    """The interface by which a training goes on with other members (`hetexp.training.recovery`)."""

    def notices(self) -> tuple[int, int]:
        """Return the newest epoch and the newest request, as far as this rank knows."""
        ...

    def due(self, noticed: tuple[int, int]) -> bool:
        """Return whether the members change at the end of this step."""
        ...

    def serve(self, training: Training, noticed: tuple[int, int]) -> None:
        """Answer the requests; all ranks call it at the end of the same step."""
        ...

    def rejoin(self, training: Training, error: Exception | None = None) -> None:
        """Leave the group and join that of the newest epoch.

        Args:
            error: broke off the step; `None`: all members end the step together.

        Raises:
            Exception: the error, if it has nothing to do with a lost member.
        """
        ...


def train(
    state: TrainState,
    progress: Progress,
    recovery: Recovery | None = None,
    ready: bool = True,
    conclude: Callable[[Outcome], None] | None = None,
) -> Outcome:
    """Train from `progress` to the last step, evaluating, logging and saving on the way.

    Args:
        recovery: goes on with other members if one is lost; `None`: a lost rank ends the run.
        ready: whether this rank has the training's state; otherwise it joins others that have it.
        conclude: called by all ranks at the end, and again if one of them is lost meanwhile.
    """
    training = Training(state, progress, recovery, ready)
    if recovery is not None and not ready:
        recovery.rejoin(training)
    while True:
        try:
            if training.steps():
                outcome = training.finish()
                if conclude is not None:
                    conclude(outcome)
                return outcome
            error = None
        except Exception as raised:
            error = explained(raised, state, training.progress.step, training.batch)
            if error is not raised:
                raise error from raised
            if recovery is None:
                raise
        assert recovery is not None
        # The error's frames hold the step's objects, and with them the group that was left.
        recovery.rejoin(training, error)
        held = [error]
        del error
        release_later(held)


class Training:
    """One rank's training, from step to step.

    Attributes:
        good: progress right after the last step; an evaluation then changes `progress` alone.
        ready: whether this rank has the training's state; a newcomer gets it from another rank.
        carried: limits and speeds of the devices, for the group's next members.
        step_ended: whether all that follows that step (a log line, an evaluation, a checkpoint) is done.
    """

    def __init__(
        self, state: TrainState, progress: Progress, recovery: Recovery | None = None, ready: bool = True
    ) -> None:
        self.state, self.progress, self.recovery = state, progress, recovery
        self.ready = ready
        self.carried = Carried.of(state)
        self.window = MetricsWindow(state)
        self.outcome = Outcome(progress, self.window.totals, energy=self.window.energy)
        self.evaluated_at = self.saved_at = self.logged_at = -1
        self.loss_at: tuple[int, float | None] = (-1, None)
        """The step and the loss of a log line, if the ranks knew it before the weights changed."""
        self.lines: set[tuple[str, int]] = set()
        """Lines that `metrics.jsonl` has already, if the end of a step is done again."""
        self._saved_seconds = time.perf_counter()
        """Start of the last checkpoint, or of the training."""
        self.first_step = progress.step
        self.good = replace(progress)
        self.step_ended = True
        self.batch: LocalBatch | None = None
        """The last batch that has begun."""
        self.stops = False
        """Whether the user has asked for the training to end."""
        self._replicas = ReplicaCheck(state)
        self._loads_in_waits = state.engine.reads_in_waits and not state.backend.computes_on_cpu

    def steps(self) -> bool:
        """Take the steps that are left; return false if the members change before the last one."""
        state, progress, window = self.state, self.progress, self.window
        message = StepMessage(state.communicator)
        message.notices = self._notices
        normalizer = state.normalizer(message)
        state.model.train()
        window.restart()
        if not self.step_ended:
            self._end_step(True)
        left = 0 if self.outcome.stopped_early or self.stops else state.total_steps - progress.step
        batches = state.engine.batches(
            progress.position, left, progress.step, state.config.trainer.num_workers
        )
        if state.walks_stream:
            batches = begun_together(state, batches)
        before: LocalBatch | None = None
        state.random_states = lambda: window.ahead and window.ahead.states_before
        for batch in window.loaded(batches):
            self.batch = batch
            state.while_waiting = window.load_ahead if self._may_load_ahead(progress.step + 1) else None
            message.seconds, message.drawn = state.balancer.local_seconds(window.meter), batch.drawn
            if batch.last:
                heed_end(state, progress.step, batch)
            if state.survives and self._log_due(progress.step + 1):
                message.window = window.loss
            try:
                with window.undone_on_error():
                    result = state.engine.step(progress.step, batch, normalizer, window.meter)
            except (LabelError, IndexError) as error:
                raise named(error, state, batch) from None
            if before is not None and message.all_seconds:
                rebalance(state, progress.step, before, message.all_seconds)
            before = batch
            if message.all_drawn:
                check_same_stream(state.plan, message.all_drawn)
            self._advance(batch, result, message)
            if result.unrecoverable and state.config.trainer.non_finite != "continue":
                text = report_non_finite(state, progress, batch, result, window)
                if state.config.trainer.non_finite == "stop":
                    fix = save_before(state, self._before, self.first_step, self.saved_at)
                    raise NonFiniteError(f"{text} {fix}")
            self._end_step(result.synchronised)
            epoch, request, due = message.noticed
            if self.recovery is not None:
                noticed = epoch, request
                self.recovery.serve(self, noticed)
                if self.recovery.due(noticed) and progress.step < state.total_steps:
                    window.stop()
                    return False
            if self.outcome.stopped_early or self.stops:
                break
            if not result.met:  # then ranks learn with a log line that a checkpoint is due
                due = window.save_due and result.can_save
            if due and progress.step < state.total_steps:
                window.stop()
                self.save(timed=True)
                window.restart()
        return True

    def _notices(self) -> tuple[int, int, int]:
        """Return the newest epoch and request, and whether a checkpoint is due, for the step's message."""
        epoch, request = self.recovery.notices() if self.recovery is not None else (0, 0)
        return epoch, request, self._save_due()

    def _save_due(self) -> bool:
        """Return whether `trainer.checkpoint_minutes` have passed by this rank's clock."""
        trainer = self.state.config.trainer
        if not trainer.checkpoint_minutes or trainer.fast_dev_run:
            return False
        return time.perf_counter() - self._saved_seconds >= 60 * trainer.checkpoint_minutes

    def _advance(self, batch: LocalBatch, result: StepResult, message: StepMessage) -> None:
        """Count a step that is done, and note where the run stands."""
        progress = self.progress
        self._before = replace(progress)
        progress.step += 1
        progress.samples += batch.global_samples
        progress.position = batch.position
        if progress.step == self.first_step + 1:
            start_up.ended("rank 0: first step")
        progress.skipped_steps += result.skipped
        if progress.position.epoch != self._before.position.epoch:
            epoch_over(self.state, progress)
        self.window.add(result, batch)
        if message.window is not None:
            self.loss_at, message.window = (progress.step, message.window_loss), None
        self.good, self.step_ended = replace(progress), False

    def _log_due(self, step: int) -> bool:
        return step % self.state.config.trainer.log_every == 0 or step == self.state.total_steps

    def _may_load_ahead(self, step: int) -> bool:
        """Return whether this rank loads the next samples while a step waits for its device.

        No evaluation or checkpoint may follow the step: it would draw or keep other random numbers.
        """
        trainer = self.state.config.trainer
        every = (trainer.eval_every, trainer.checkpoint_every)
        follows = step == self.state.total_steps or any(count and step % count == 0 for count in every)
        return self._loads_in_waits and not follows

    def _end_step(self, synchronised: bool) -> None:
        """Compare the replicas, write a line, evaluate and save, each if it is due.

        If a rank is lost meanwhile, those that are left do all of it again.
        """
        state, progress, window, outcome = self.state, self.progress, self.window, self.outcome
        trainer = state.config.trainer
        if self._replicas.due(progress.step, synchronised):
            window.stop()
            self._replicas.compare(progress.step)
            window.restart()
        if progress.step % trainer.log_every == 0:
            self._log()
        if trainer.eval_every and progress.step % trainer.eval_every == 0:
            window.stop()
            if progress.step == state.total_steps and not trainer.fast_dev_run:
                self.save(wait=True)  # an error in the last evaluation loses no training
            self._evaluate()
            outcome.stopped_early = should_stop(state, progress, outcome.evaluation or {})
            evaluation_over(state, progress, outcome.evaluation or {})
            if trainer.early_stopping.patience is not None:
                self.saved_at = -1  # what early stopping keeps has changed
            window.restart()
        if trainer.checkpoint_every and progress.step % trainer.checkpoint_every == 0:
            window.stop()
            self.save(wait=progress.step == state.total_steps)
            window.restart()
        self.step_ended = True

    def _log(self) -> None:
        step = self.progress.step
        loss = {"loss": self.loss_at[1]} if self.loss_at[0] == step else {}
        self.window.save_due |= self._save_due()
        self.outcome.train_loss = self.window.log(self.progress, quiet=("train", step) in self.lines, **loss)
        self.logged_at = step

    def _evaluate(self) -> None:
        step = self.progress.step
        result = evaluate_and_log(self.state, self.progress, ("eval", step) in self.lines)
        self.outcome.evaluation, self.evaluated_at = result, step
        if self.saved_at == step:
            add_evaluation(self.state, step, result)

    def save(self, wait: bool = False, timed: bool = False) -> str | None:
        """Save a checkpoint unless this step has one; return its path on rank 0. All ranks call it.

        Args:
            wait: until the checkpoint is on the disk.
            timed: whether only the clock asks for it, so that it makes room for newer ones.
        """
        step, outcome = self.progress.step, self.outcome
        if self.saved_at != step:
            self._saved_seconds, self.window.save_due = time.perf_counter(), False
            scores = outcome.evaluation if self.evaluated_at == step else None
            outcome.checkpoint = save(self.state, self.progress, scores, wait, timed)
            self.saved_at = step
        return outcome.checkpoint

    def finish(self) -> Outcome:
        """Save, evaluate and end the strategy after the last step; all ranks call it."""
        state, progress, outcome = self.state, self.progress, self.outcome
        state.doing = "ending"
        trainer = state.config.trainer
        if self.logged_at != progress.step > self.first_step:
            self._log()
        self.window.energy.stop()
        if self.stops:
            finish_saving(state)
            return outcome
        if not trainer.fast_dev_run:
            self.save(wait=True)  # before the evaluation, an error in which loses no training then
        if self.evaluated_at != progress.step:
            self._evaluate()
        finish_saving(state)
        if not trainer.fast_dev_run:
            last = state.engine.finish(progress.step)
            outcome.checkpoint, outcome.evaluation = last or (outcome.checkpoint, outcome.evaluation)
        return outcome


def driven_backends(state: TrainState) -> list[Backend]:
    """Return the backends of all devices that this rank drives."""
    backend, devices = state.backend, state.plan.devices_of(state.rank)
    return [backend if backend.spec == spec else type(backend)(spec) for spec in devices]


def rebalance(state: TrainState, step: int, before: LocalBatch, seconds: Sequence[float]) -> None:
    """Decide whether the coming batches get another split over the ranks; all ranks decide alike.

    Args:
        step: number of the step that is just over.
        before: batch of the step before that.
        seconds: each rank's work in the step before.
    """
    decision = state.balancer.observe(step - 1, before.global_samples, seconds, step)
    if state.rank == 0:
        state.balancer.record(decision)


class MetricsWindow:
    """This rank's measurements since the last log line; `log` makes one line of all ranks'."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.meter = StepTimer(state.backend)
        self.totals = Totals()
        self.energy = EnergyMeter(driven_backends(state), state.plan.all_devices)
        self._loss_sum: torch.Tensor | float = 0.0
        self.num_steps = 0
        self._local_count = 0.0
        self._samples = 0
        self._seconds = self._resumed_at = 0.0
        self._last: StepResult | None = None
        self.warned = False
        """Whether a warning of a skipped step was logged."""
        self.save_due = False
        """Whether a checkpoint is due by this rank's clock; after `log`, by the first rank's."""
        self.ahead: InWaits[LocalBatch] | None = None
        """The batches of a loop that is under way."""

    def restart(self) -> None:
        """Start the clock: steps follow."""
        self.energy.start()
        self.state.doing = "steps"
        self.state.backend.resume()
        self._resumed_at = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock, and count no energy until `restart`: what follows is not training."""
        self.state.doing = "between steps"
        self.pause()
        self.energy.stop()

    def pause(self) -> None:
        """Wait for the device, and count the time until then."""
        self.state.backend.pause()
        with self.state.communicator.waiting():
            self.state.backend.synchronize()
        now = time.perf_counter()
        self._seconds += now - self._resumed_at
        self._resumed_at = now

    def loaded(self, batches: Generator[LocalBatch, None, None]) -> Iterator[LocalBatch]:
        """Yield the batches, and count the time that a step waits for each; close them at the end."""
        with closing(batches):
            self.ahead = InWaits(batches)
            while True:
                started = time.perf_counter()
                batch = self.ahead.next()
                if batch is None:
                    return
                self.totals.data_seconds += time.perf_counter() - started
                yield batch

    def load_ahead(self) -> None:
        """Load the next batch of the loop now, while the device computes."""
        assert self.ahead is not None
        started = time.perf_counter()
        self.ahead.take()
        self.totals.ahead_seconds += time.perf_counter() - started

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Forget the times of a step that breaks off: it is done again."""
        bookmark = self.meter.bookmark()
        try:
            yield
        except BaseException:
            self.meter.back_to(bookmark)
            self.energy.stop()
            raise

    @property
    def loss(self) -> tuple[torch.Tensor | float, float]:
        """Sum and count of this rank's loss so far."""
        return self._loss_sum, self._local_count

    def add(self, result: StepResult, batch: LocalBatch) -> None:
        """Add the result of a step."""
        self._loss_sum = self._loss_sum + result.loss_sum
        self._local_count += result.local_count
        self._samples += batch.global_samples
        self.num_steps += 1
        self._last = result

    def log(self, progress: Progress, quiet: bool = False, **shared: float | None) -> float | None:
        """Exchange sums with the other ranks, write one line on rank 0 and start again.

        Args:
            quiet: write no line; the file has it already.
            shared: the `loss`, if the ranks have computed it before.

        Returns:
            The mean loss over the window, `None` if nothing counted; the same on every rank.
        """
        self.pause()
        self.energy.keep_up()
        compute, waited, local_samples = self.meter.take()
        world = self.state.communicator.world_size
        # Each rank fills its row of one table.
        table = torch.zeros((world, 6), dtype=torch.float64)
        peak = self.state.backend.peak_memory_bytes()
        memory = math.nan if peak is None else peak / GIB
        row = [float(self._loss_sum), self._local_count, compute, local_samples, memory, self.save_due]
        table[self.state.rank] = torch.tensor(row, dtype=torch.float64)
        table = self.state.communicator.all_reduce(table)
        losses, counts, computes, samples, memories, due = table.T.tolist()
        self.save_due = bool(due[0])
        # A lost rank takes its sum and its count since the last line with it: the mean is then over the other
        # ranks. If every step is logged, nothing is lost (`share_loss`).
        count = sum(counts)
        loss = shared["loss"] if "loss" in shared else sum(losses) / count if count else None
        metrics = self._line(progress, loss, computes, samples)
        for device, gib in zip(self.state.timed_devices, memories, strict=False):
            if not math.isnan(gib):
                metrics[f"device/{device.id}/peak_memory_gib"] = gib
        metrics |= self.state.engine.device_metrics(losses, counts)
        for logger in () if quiet else self.state.loggers:
            logger.log(metrics, progress.step)
        totals = self.totals
        totals.train_seconds += self._seconds
        totals.compute_seconds += compute
        totals.wait_seconds += waited
        totals.local_samples += local_samples
        totals.global_samples += self._samples
        totals.steps += self.num_steps
        totals.start = totals.start or replace(totals)
        settle_time_scale(self.state, progress.step)
        self._loss_sum, self._seconds, self._local_count, self._samples, self.num_steps = 0.0, 0.0, 0.0, 0, 0
        return loss

    def _line(
        self, progress: Progress, loss: float | None, compute: list[float], samples: list[float]
    ) -> dict[str, float | int | None]:
        line: dict[str, float | int | None] = {"train/loss": loss}
        if self._last is not None:
            line["train/learning_rate"] = self._last.learning_rate
        line |= {"train/epoch": progress.position.epoch, "train/samples": progress.samples}
        if not self.num_steps:  # this rank has joined since, or has ended the step before
            return line
        line["samples_per_second"] = self._samples / self._seconds
        line["step_seconds"] = self._seconds / self.num_steps
        if self.state.time_scale is not None:
            line["time_scale"] = self.state.time_scale
        predicted = (self.state.plan.calibration or {}).get("predicted_step_seconds")
        if predicted is not None:
            line["predicted_step_seconds"] = predicted * (self.state.time_scale or 1.0)
        if len(compute) > 1:
            line["imbalance"] = imbalance(compute, [round(count) for count in samples])
        if self._last is not None and self._last.grad_norm is not None:
            line["train/grad_norm"] = float(self._last.grad_norm)
        weights = self.state.balancer.weights
        for device, weight in zip(self.state.plan.all_devices, weights, strict=True):
            line[f"balancing/weight/{device.id}"] = weight
        if self.state.balancer.follows:
            line["balancing/splits"] = self.state.balancer.num_changes
        if self.state.loss_scale is not None:
            line["train/loss_scale"] = self.state.loss_scale.value
        if self.state.loss_scale is not None or self.state.config.trainer.non_finite == "skip":
            line["train/skipped_steps"] = progress.skipped_steps
        idle = idle_seconds(compute)
        shares = self.state.engine.shares(samples, self._samples)
        per_device = zip(self.state.timed_devices, compute, samples, shares, idle, strict=False)
        for device, seconds, count, share, waited in per_device:
            line[f"device/{device.id}/share"] = share
            line[f"device/{device.id}/samples_per_second"] = count / seconds if count else None
            if len(compute) > 1:
                line[f"device/{device.id}/idle_seconds"] = waited / self.num_steps
        for device, limit in zip(self.state.timed_devices, self.state.microbatch_limits, strict=False):
            if limit is not None:
                line[f"device/{device.id}/microbatch_size"] = limit
        return line


def report_non_finite(
    state: TrainState, progress: Progress, batch: LocalBatch, result: StepResult, window: MetricsWindow
) -> str:
    """Find the samples whose gradient is not finite, and warn of them once; all ranks call it.

    The weights are still those of the step before.

    Returns:
        The message; empty if one was logged before, since `skip` only counts later steps.
    """
    stop = state.config.trainer.non_finite == "stop"
    if window.warned and not stop:
        return ""
    window.warned = True
    window.stop()
    text = explain(state, progress.step, batch, result.loss_sum, result.losses, result.factor)
    if stop:
        window.log(progress)  # the curve then shows the loss that ends the run
    elif state.rank == 0:
        log.warning("%s The step was left out on all ranks; later ones are counted only.", text)
    window.restart()
    return text


def evaluate_and_log(state: TrainState, progress: Progress, quiet: bool = False) -> dict[str, float]:
    """Evaluate on all ranks and log on rank 0.

    Args:
        quiet: write no line; the file has it already.
    """
    result, line = state.engine.evaluate()
    if state.rank == 0 and not math.isfinite(result.get("loss", 0.0)):
        log.warning("The loss of the evaluation at step %d is %g.", progress.step, result["loss"])
    for logger in () if quiet or not line else state.loggers:  # no line without evaluation data
        logger.log(line, progress.step)
    return result


def epoch_over(state: TrainState, progress: Progress) -> None:
    """Let a schedule that counts epochs set the rates of the next one."""
    schedule = state.schedule
    if isinstance(schedule, ClassSchedule) and schedule.every == "epoch":
        progress.schedule = schedule.unit_over()


def evaluation_over(state: TrainState, progress: Progress, evaluation: dict[str, float]) -> None:
    """Let a schedule that counts evaluations set the rates of the next steps.

    The ranks share the evaluation, so that all set the same. If a rank is lost, an evaluation is done again:
    the schedule then goes on from the state before.
    """
    schedule = state.schedule
    if not isinstance(schedule, ClassSchedule) or schedule.every != "evaluation":
        return
    metric = state.config.trainer.early_stopping.metric
    progress.schedule = schedule.unit_over(*((evaluation[metric],) if schedule.follows_metric else ()))


def should_stop(state: TrainState, progress: Progress, evaluation: dict[str, float]) -> bool:
    """Return whether to stop early; the ranks share the evaluation, so that all decide alike."""
    early = state.config.trainer.early_stopping
    if early.patience is None or early.metric not in evaluation:
        return False
    value = evaluation[early.metric] * (-1.0 if early.metric == "accuracy" else 1.0)
    if math.isnan(value):
        improved = False
    elif progress.best is None:
        improved = True
    else:
        improved = value < progress.best - early.min_delta
    if improved:
        progress.best, progress.bad_evaluations = value, 0
    else:
        progress.bad_evaluations += 1
    return progress.bad_evaluations >= early.patience
