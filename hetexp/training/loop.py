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
from hetexp.comm.connections.disposal import let_go
from hetexp.comm.step_message import StepMessage
from hetexp.core.device import GIB
from hetexp.data.loader import LocalBatch
from hetexp.hardware.backend import Backend
from hetexp.hardware.energy import EnergyMeter
from hetexp.training.engine import StepResult
from hetexp.training.measuring.timer import StepTimer, Totals
from hetexp.training.nonfinite.loss_scale import NonFiniteError
from hetexp.training.nonfinite.search import explain
from hetexp.training.recovery.carried import Carried
from hetexp.training.replicas import ReplicaCheck
from hetexp.training.saving.save import add_evaluation, finish_saving, save, save_before
from hetexp.training.state import Progress, TrainState

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """What a finished training hands to the summary; losses and evaluation are the same on every rank."""

    progress: Progress
    totals: Totals
    train_loss: float | None = None
    evaluation: dict[str, float] | None = None
    checkpoint: str | None = None
    stopped_early: bool = False
    energy: EnergyMeter | None = None


class Survivor(Protocol):
    """What lets a training go on with other members (`hetexp.training.recovery.rank_recovery`)."""

    def notices(self) -> tuple[int, int]:
        """Return the newest epoch and the newest request, as far as this rank knows."""
        ...

    def due(self, noticed: tuple[int, int]) -> bool:
        """Tell whether the members change at the end of this step."""
        ...

    def serve(self, training: Training, noticed: tuple[int, int]) -> None:
        """Do what was asked for; all ranks call it at the end of the same step."""
        ...

    def form_anew(self, training: Training, error: Exception | None = None) -> None:
        """Leave the group for that of the newest epoch.

        Args:
            error: what broke off the step; `None`: all members end one together.

        Raises:
            Exception: the error, where it has nothing to do with a lost member.
        """
        ...


def train(
    state: TrainState,
    progress: Progress,
    survivor: Survivor | None = None,
    ready: bool = True,
    conclude: Callable[[Outcome], None] | None = None,
) -> Outcome:
    """Train from `progress` to the last step, evaluating, logging and saving on the way.

    Args:
        survivor: goes on with other members where one is lost; `None`: that ends the run.
        ready: whether this rank has the training's state; else it joins others that have it.
        conclude: what the ranks do together at the end; again where one is lost meanwhile.
    """
    training = Training(state, progress, survivor, ready)
    if survivor is not None and not ready:
        survivor.form_anew(training)
    while True:
        try:
            if training.steps():
                outcome = training.finish()
                if conclude is not None:
                    conclude(outcome)
                return outcome
            error = None
        except Exception as raised:
            if survivor is None:
                raise
            error = raised
        assert survivor is not None
        # What the step held lives on in the error, and with it the group that is left.
        survivor.form_anew(training, error)
        held = [error]
        del error
        let_go(held)


class Training:
    """How far a training is, from step to step.

    Attributes:
        good: where the run stood when the last step was done; `progress` is ahead of it by what an evaluation
            decides.
        ready: whether this rank has the training's state; a newcomer gets it from another one.
        carried: what is known of devices when their group changes.
        settled: whether all that follows that step (a log line, an evaluation, a checkpoint) is done.
    """

    def __init__(
        self, state: TrainState, progress: Progress, survivor: Survivor | None = None, ready: bool = True
    ) -> None:
        self.state, self.progress, self.survivor = state, progress, survivor
        self.ready = ready
        self.carried = Carried.of(state)
        self.window = MetricsWindow(state)
        self.outcome = Outcome(progress, self.window.totals, energy=self.window.energy)
        self.evaluated_at = self.saved_at = self.logged_at = -1
        self.loss_at: tuple[int, float | None] = (-1, None)
        """The loss of a log line, and after which step, where it was known before the weights changed."""
        self.lines: set[tuple[str, int]] = set()
        """Lines that are in `metrics.jsonl` already, where what follows a step is done again."""
        self._saved_seconds = time.perf_counter()
        """When the last checkpoint was begun, or the training."""
        self.first_step = progress.step
        self.good = replace(progress)
        self.settled = True
        self.stops = False
        """Whether somebody asked for the training to end."""
        self._replicas = ReplicaCheck(state)

    def steps(self) -> bool:
        """Take steps up to the last one; return whether that was it, or the members change first."""
        state, progress, window = self.state, self.progress, self.window
        message = StepMessage(state.communicator)
        message.notices = self._notices
        normalizer = state.normalizer(message)
        state.model.train()
        window.restart()
        if not self.settled:
            self._end_step(True)
        left = 0 if self.outcome.stopped_early or self.stops else state.total_steps - progress.step
        batches = state.engine.batches(
            progress.position, left, progress.step, state.config.trainer.num_workers
        )
        before: LocalBatch | None = None
        for batch in window.loaded(batches):
            message.seconds = state.balancer.own_seconds(window.meter)
            if state.survives and self._log_due(progress.step + 1):
                message.window = window.loss
            with window.undone_on_error():
                result = state.engine.step(progress.step, batch, normalizer, window.meter)
            if before is not None and message.all_seconds:
                rebalance(state, progress.step, before, message.all_seconds)
            before = batch
            self._advance(batch, result, message)
            if result.beyond_mending and state.config.trainer.non_finite != "continue":
                text = tell_non_finite(state, progress, batch, result, window)
                if state.config.trainer.non_finite == "stop":
                    good = self._before
                    raise NonFiniteError(f"{text} {save_before(state, good, self.first_step, self.saved_at)}")
            self._end_step(result.synchronised)
            *news, due = message.noticed
            if self.survivor is not None:
                noticed = news[0], news[1]
                self.survivor.serve(self, noticed)
                if self.survivor.due(noticed) and progress.step < state.total_steps:
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
        """Return what the first rank tells all as a step begins."""
        epoch, request = self.survivor.notices() if self.survivor is not None else (0, 0)
        return epoch, request, self._save_due()

    def _save_due(self) -> bool:
        """Tell whether the last checkpoint is so old, by this rank's clock, that another one is due."""
        trainer = self.state.config.trainer
        if not trainer.checkpoint_minutes or trainer.fast_dev_run:
            return False
        return time.perf_counter() - self._saved_seconds >= 60 * trainer.checkpoint_minutes

    def _advance(self, batch: LocalBatch, result: StepResult, message: StepMessage) -> None:
        """Count a step that is done."""
        progress = self.progress
        self._before = replace(progress)
        progress.step += 1
        progress.samples += batch.global_samples
        progress.position = batch.position
        progress.skipped_steps += result.skipped
        self.window.add(result, batch)
        if message.window is not None:
            self.loss_at, message.window = (progress.step, message.window_loss), None
        self.good, self.settled = replace(progress), False

    def _log_due(self, step: int) -> bool:
        return step % self.state.config.trainer.log_every == 0 or step == self.state.total_steps

    def _end_step(self, synchronised: bool) -> None:
        """Do what follows a step: compare the replicas, write a line, evaluate, save.

        Where a rank is lost meanwhile, all of it is done again by those that are left.
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
            if trainer.early_stopping.patience is not None:
                self.saved_at = -1  # what early stopping keeps has changed
            window.restart()
        if trainer.checkpoint_every and progress.step % trainer.checkpoint_every == 0:
            window.stop()
            self.save(wait=progress.step == state.total_steps)
            window.restart()
        self.settled = True

    def _log(self) -> None:
        step = self.progress.step
        known = {"loss": self.loss_at[1]} if self.loss_at[0] == step else {}
        self.window.save_due |= self._save_due()
        self.outcome.train_loss = self.window.log(self.progress, quiet=("train", step) in self.lines, **known)
        self.logged_at = step

    def _evaluate(self) -> None:
        step = self.progress.step
        result = evaluate_and_log(self.state, self.progress, ("eval", step) in self.lines)
        self.outcome.evaluation, self.evaluated_at = result, step
        if self.saved_at == step:
            add_evaluation(self.state, step, result)

    def save(self, wait: bool = False, timed: bool = False) -> str | None:
        """Save where the run stands, unless that is done; all ranks call it. Return the path on rank 0.

        Args:
            timed: only because of the time, so that the checkpoint makes room for newer ones.
        """
        step, outcome = self.progress.step, self.outcome
        if self.saved_at != step:
            self._saved_seconds, self.window.save_due = time.perf_counter(), False
            scores = outcome.evaluation if self.evaluated_at == step else None
            outcome.checkpoint = save(self.state, self.progress, scores, wait, timed)
            self.saved_at = step
        return outcome.checkpoint

    def finish(self) -> Outcome:
        """Do what follows the last step."""
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


def driven(state: TrainState) -> list[Backend]:
    """Return the backends of all devices that this rank drives."""
    own = state.backend
    return [own if own.spec == spec else type(own)(spec) for spec in state.plan.devices_of(state.rank)]


def rebalance(state: TrainState, step: int, before: LocalBatch, seconds: Sequence[float]) -> None:
    """Decide, all ranks alike, whether the batches to come are split again.

    Args:
        step: the one that is just over.
        before: what this rank did in the step before.
        seconds: what the step before took each rank.
    """
    decision = state.balancer.observe(step - 1, before.global_samples, seconds, step)
    if state.rank == 0:
        state.balancer.tell(decision)


class MetricsWindow:
    """What happened since the last log line, on this rank; `log` makes it one line of all ranks."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.meter = StepTimer(state.backend)
        self.totals = Totals()
        self.energy = EnergyMeter(driven(state), state.plan.all_devices)
        self._loss_sum: torch.Tensor | float = 0.0
        self.num_steps = 0
        self._local_count = 0.0
        self._samples = 0
        self._seconds = self._resumed_at = 0.0
        self._last: StepResult | None = None
        self.warned = False
        """Whether a step that was left out has been reported."""
        self.save_due = False
        """Whether a checkpoint is due by this rank's clock; after `log`, by the first rank's."""

    def restart(self) -> None:
        """Let the clock run: steps follow."""
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
        """Take the time until now, at which the device has finished."""
        self.state.backend.pause()
        self.state.backend.synchronize()
        now = time.perf_counter()
        self._seconds += now - self._resumed_at
        self._resumed_at = now

    def loaded(self, batches: Generator[LocalBatch, None, None]) -> Iterator[LocalBatch]:
        """Yield the batches, and count the time that they keep the step waiting; close them at the end."""
        with closing(batches):
            while True:
                started = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    return
                self.totals.data_seconds += time.perf_counter() - started
                yield batch

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Surround a step: where it breaks off, and is done again, its times are no speed of the device."""
        bookmark = self.meter.bookmark()
        try:
            yield
        except BaseException:
            self.meter.back_to(bookmark)
            self.energy.stop()
            raise

    @property
    def loss(self) -> tuple[torch.Tensor | float, float]:
        """Sum and count of the loss so far, this rank's own."""
        return self._loss_sum, self._local_count

    def add(self, result: StepResult, batch: LocalBatch) -> None:
        """Take a step in."""
        self._loss_sum = self._loss_sum + result.loss_sum
        self._local_count += result.local_count
        self._samples += batch.global_samples
        self.num_steps += 1
        self._last = result

    def log(self, progress: Progress, quiet: bool = False, **known: float | None) -> float | None:
        """Exchange sums with the other ranks, write one line on rank 0 and start again.

        Args:
            quiet: write no line; it is there already.
            known: the `loss`, where the ranks have found it before.

        Returns:
            The mean loss over the window, `None` where nothing counted; the same on every rank.
        """
        self.pause()
        self.energy.keep_up()
        compute, waited, local_samples = self.meter.take()
        world = self.state.communicator.world_size
        # One table for all, in which each rank fills its row.
        table = torch.zeros((world, 6), dtype=torch.float64)
        peak = self.state.backend.peak_memory_bytes()
        memory = math.nan if peak is None else peak / GIB
        mine = [float(self._loss_sum), self._local_count, compute, local_samples, memory, self.save_due]
        table[self.state.rank] = torch.tensor(mine, dtype=torch.float64)
        table = self.state.communicator.all_reduce(table)
        losses, counts, computes, samples, memories, due = table.T.tolist()
        self.save_due = bool(due[0])
        # What a rank that was lost had summed up since the last line is lost with it, and its count as well:
        # the mean is then over what the others have computed. A line a step loses nothing (`share_loss`).
        count = sum(counts)
        loss = known["loss"] if "loss" in known else sum(losses) / count if count else None
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
        self._loss_sum, self._seconds, self._local_count, self._samples, self.num_steps = 0.0, 0.0, 0.0, 0, 0
        return loss

    def _line(
        self, progress: Progress, loss: float | None, compute: list[float], samples: list[float]
    ) -> dict[str, float | int | None]:
        line: dict[str, float | int | None] = {"train/loss": loss}
        if self._last is not None:
            line["train/learning_rate"] = self._last.learning_rate
        line |= {"train/epoch": progress.position.epoch, "train/samples": progress.samples}
        if not self.num_steps:  # this rank has joined since, or done what follows the step already
            return line
        line["samples_per_second"] = self._samples / self._seconds
        line["step_seconds"] = self._seconds / self.num_steps
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


def tell_non_finite(
    state: TrainState, progress: Progress, batch: LocalBatch, result: StepResult, window: MetricsWindow
) -> str:
    """Return which samples on which ranks keep a gradient from being finite, and warn of it once.

    All ranks come here at the same step, so that they may ask each other. The weights are still those of
    the step before.

    Returns:
        Nothing if it was reported before: under `skip` later steps are only counted.
    """
    stop = state.config.trainer.non_finite == "stop"
    if window.warned and not stop:
        return ""
    window.warned = True
    window.stop()
    text = explain(state, progress.step, batch, result.loss_sum, result.losses, result.factor)
    if stop:
        window.log(progress)  # the loss that ends the run is seen in its curve
    elif state.rank == 0:
        log.warning("%s The step was left out on all ranks; later ones are counted only.", text)
    window.restart()
    return text


def evaluate_and_log(state: TrainState, progress: Progress, quiet: bool = False) -> dict[str, float]:
    """Evaluate on all ranks and log on rank 0.

    Args:
        quiet: write no line; it is there already.
    """
    result, line = state.engine.evaluate()
    if state.rank == 0 and not math.isfinite(result.get("loss", 0.0)):
        log.warning("The loss of the evaluation at step %d is %g.", progress.step, result["loss"])
    for logger in () if quiet else state.loggers:
        logger.log(line, progress.step)
    return result


def should_stop(state: TrainState, progress: Progress, evaluation: dict[str, float]) -> bool:
    """Decide on early stopping from values that all ranks share, so that all decide the same."""
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
