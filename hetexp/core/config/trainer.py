"""The training itself, whatever the devices (config group `trainer`)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from hetexp.core.errors import must_be
from hetexp.core.precision import long_name
from hetexp.core.section import Section

WITHOUT_ACCURACY = ("mse", "mae", "huber", "reconstruction", "model", "sum")
"""Losses that do not say which predictions are right."""
DEFAULT_EPOCHS = 4
"""Passes over the data of a run that has no limit."""


class EarlyStoppingConfig(Section):
    """When all ranks stop together before the last step."""

    patience: PositiveInt | None = None
    """Evaluations without improvement, after which all ranks stop at the same step; `null`: never stop
    early."""
    metric: Literal["loss", "accuracy"] = "loss"
    """Metric of the evaluation that must improve."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest change that counts as an improvement."""


class TrainerConfig(Section):
    """The training itself, the same on any devices."""

    batch_size_per_device: PositiveInt | None = None
    """Samples of a device, instead of `global_batch_size`, which is then this × the number of chosen devices.
    The policy of `balancing` still decides how devices share the global batch."""
    global_batch_size: PositiveInt
    """Samples of one optimizer step, over all devices. This number never changes with the hardware."""
    max_steps: PositiveInt | None = None
    """Number of optimizer steps; the run ends when it reaches this or `max_epochs`."""
    max_epochs: PositiveInt | None = None
    """Number of passes over the data; `null`: no limit, or 4 if `max_steps` is null as well. The run ends
    when it reaches this or `max_steps`."""
    accumulate: PositiveInt = 1
    """Microbatches that each device splits its part of the batch into."""
    microbatch_size: PositiveInt | None = None
    """Most samples of one forward pass, instead of `accumulate`. The number of microbatches then differs
    between devices."""
    clip_norm: PositiveFloat | None = None
    """Largest norm of the whole batch's gradient; `null`: no clipping."""
    activation_checkpointing: bool = False
    """Whether to recompute layers' activations in backward instead of keeping them."""
    compile: bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        False
    )
    """Whether `torch.compile` compiles the model, or its mode."""
    channels_last: bool = False
    """Whether images `[batch, channels, height, width]` lie with their channels last on the device, in which
    cards convolve quicker in half precision."""
    precision: Annotated[
        Literal["auto", "auto_common", "float32", "bfloat16", "float16", "float64"],
        BeforeValidator(long_name),
    ] = "float32"
    """Precision of the computation. `auto` takes the best one of each device, `auto_common` the best one that
    all devices have. fp32, bf16, fp16 and fp64 are short names."""
    non_finite: Literal["stop", "skip", "continue"] = "stop"
    """Reaction to a gradient that is not finite. `stop` ends the run before its weights are harmed. `skip`
    leaves the step out on all devices. `continue` does not check."""
    loss: str = "cross_entropy"
    """Loss: `cross_entropy`, `bce`, `mse`, `mae`, `huber`, `reconstruction`, `model` (the model returns it),
    `sum` (of several), or the dotted path of a class. Such a class derives from `hetexp.training.loss.Loss`.
    The section `loss` holds its arguments."""
    schedule: Literal["constant", "linear", "cosine"] | dict[str, Any] = "constant"
    """Schedule of the learning rate over the whole run, after `warmup_steps`. A mapping names a class of
    `torch.optim.lr_scheduler` by `_target_`, with its arguments. Its length (`T_max`, `total_steps`) is that
    of the run unless it is given."""
    schedule_every: Literal["step", "epoch", "evaluation"] | None = None
    """Unit in which a `schedule` class counts; `null`: `step`, or `evaluation` if it follows a metric, as
    ReduceLROnPlateau does. The metric is that of `early_stopping`."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate grows from 0, before the schedule begins."""
    lr_batch_size: PositiveInt | None = None
    """Global batch that the learning rates are meant for; `null`: for any. Another batch scales the rates of
    the section `optimizer` by `lr_scaling`."""
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    """How learning rates follow the global batch, with `lr_batch_size`."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations; 0: only at the end."""
    checkpoint_every: NonNegativeInt = 0
    """Steps between checkpoints; 0: only by `checkpoint_minutes` and at the end."""
    checkpoint_minutes: NonNegativeFloat = 10
    """Longest time without a checkpoint, by rank 0's clock; 0: no checkpoint by time."""
    checkpoint_in_background: bool = True
    """Whether to write checkpoints from a copy in host memory while the training goes on. `false` needs no
    memory for a copy, and the training waits."""
    keep_last: NonNegativeInt = 0
    """Number of newest checkpoints to keep; 0: all, but only two of those by `checkpoint_minutes`."""
    keep_best: NonNegativeInt = 1
    """Number of best checkpoints to keep as well, by `early_stopping.metric`. Only checkpoints whose step was
    evaluated count."""
    on_save_error: Literal["warn", "stop"] = "warn"
    """Reaction to a checkpoint that cannot be written, such as on a full disk. `warn` reports it and tries
    the next one. The last checkpoint must always succeed."""
    on_request: dict[str, str] = {}
    """Functions that answer `hetexp control RUN NAME`: `{NAME: my_module.my_function}`. They take an
    `hetexp.training.recovery.rank_commands.Asked`."""
    log_every: PositiveInt = 10
    """Steps between log lines."""
    check_sync_every: NonNegativeInt = 0
    """Steps between checks that all devices hold the same model; 0: no checks."""
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    drop_last: bool = False
    """Whether to leave out the last, smaller batch of an epoch."""
    num_workers: NonNegativeInt = 0
    """Data loader processes of each device; 0: a thread loads the next step's samples if it can."""
    prefetch_factor: PositiveInt = 2
    """Microbatches that each data loader process loads ahead."""
    fast_dev_run: Annotated[
        NonNegativeInt, BeforeValidator(lambda v: int(v) if isinstance(v, bool) else v)
    ] = 0
    """Number of batches to train and evaluate in a trial run without checkpoints (`true`: 1); 0: a full
    run."""
    overfit_batches: NonNegativeInt = 0
    """Number of global batches to use, in the same order every epoch; 0: all."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the initial weights, of random data and of the order of samples, on any devices. On the same
    devices it also decides dropout and random samples."""

    @property
    def epochs(self) -> int | None:
        """The number of passes over the data that ends the run, `None` for no limit."""
        return DEFAULT_EPOCHS if self.max_epochs is None and self.max_steps is None else self.max_epochs

    @property
    def lr_factor(self) -> float:
        """Factor of the learning rates for this global batch (`lr_batch_size`)."""
        ratio = self.global_batch_size / (self.lr_batch_size or self.global_batch_size)
        return math.sqrt(ratio) if self.lr_scaling == "sqrt" else ratio

    @field_validator("global_batch_size", mode="before")
    @classmethod
    def _of_one_device(cls, value: Any, info: ValidationInfo) -> Any:
        """Stand for one device until the devices are known."""
        return info.data.get("batch_size_per_device") if value is None else value


def trainer_problems(trainer: TrainerConfig) -> list[str]:
    """Return the clashes between the keys of a section whose values are each right."""
    problems = []

    def clash(key: str, accepted: str, value: object, fix: str = "") -> None:
        problems.append(must_be(f"trainer.{key}", accepted, value, fix))

    if trainer.microbatch_size is not None and trainer.accumulate > 1:
        fix = "Both cut the local batch: keep one of them."
        clash("accumulate", "1 where `trainer.microbatch_size` is set", trainer.accumulate, fix)
    if trainer.prefetch_factor != 2 and trainer.num_workers == 0:
        fix = "It is what each process loads ahead: set `trainer.num_workers` as well."
        accepted = "2, its default, where `trainer.num_workers` is 0"
        clash("prefetch_factor", accepted, trainer.prefetch_factor, fix)
    if trainer.max_steps is not None and trainer.warmup_steps > trainer.max_steps:
        clash("warmup_steps", f"at most `trainer.max_steps` ({trainer.max_steps})", trainer.warmup_steps)
    if isinstance(trainer.schedule, str) and trainer.schedule_every is not None:
        fix = "The shipped schedules are curves over all steps."
        clash("schedule_every", "null where `trainer.schedule` is no class", trainer.schedule_every, fix)
    if trainer.lr_batch_size is None and trainer.lr_scaling != "linear":
        clash("lr_scaling", "linear, its default, where `trainer.lr_batch_size` is null", trainer.lr_scaling)
    if trainer.early_stopping.patience is not None and trainer.eval_every == 0:
        clash("eval_every", "above 0 where `trainer.early_stopping.patience` is set", 0)
    if trainer.early_stopping.metric == "accuracy" and trainer.loss in WITHOUT_ACCURACY:
        clash("early_stopping.metric", f"loss where `trainer.loss` is {trainer.loss}", "accuracy")
    return problems


def how_it_ends(trainer: TrainerConfig, steps_per_epoch: int | None = None) -> str:
    """Return a sentence about what ends a run.

    Args:
        steps_per_epoch: `None`: not known, so that the limits are named without saying which comes first.
    """
    if trainer.fast_dev_run:
        return f"Ends after {_number(trainer.fast_dev_run, 'step')} (trainer.fast_dev_run)."
    steps, epochs = trainer.max_steps, trainer.epochs
    ends = f"Ends after {_number(steps, 'step')}" if steps is not None else ""
    if epochs is not None:
        passes = _number(epochs, "epoch")
        total = None if steps_per_epoch is None else epochs * steps_per_epoch
        counted = passes if total is None else f"{passes} = {_number(total, 'step')}"
        if steps is None:
            ends = f"Ends after {counted}"
        elif total is None:
            ends += f" (trainer.max_steps) or {passes} (trainer.max_epochs), whichever comes first"
        elif total < steps:
            ends = f"Ends after {counted}, before trainer.max_steps={steps}"
        elif total > steps:
            ends += f", before trainer.max_epochs={epochs} ({_number(total, 'step')})"
    patience = trainer.early_stopping.patience
    if patience is not None:
        times = _number(patience, "evaluation")
        ends += f", or earlier after {times} without improvement (trainer.early_stopping.patience)"
    return f"{ends}."


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
