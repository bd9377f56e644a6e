"""What ranks that walk a stream each agree on: where it begins, that it is the same, and where it ends."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from hetexp.core.config import Config
from hetexp.core.errors import ConfigError, HandshakeError, logged, must_be
from hetexp.core.instantiate import locate
from hetexp.core.plan import Plan
from hetexp.data.base import build_data, stream_of
from hetexp.data.loader import LocalBatch
from hetexp.data.sampler import GlobalSampler
from hetexp.data.streams.stream import EPOCHS, StreamSampler
from hetexp.model.hooks import ModelHooks
from hetexp.plan.strategy import Strategy
from hetexp.training.seeding import seeded
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest relative difference of a sample's numbers: machines round differently."""


def sampler_of(strategy: Strategy, plan: Plan, config: Config, train: Dataset[Any]) -> GlobalSampler:
    """Return the sampler of each global batch: the strategy's own, or that of a stream.

    Raises:
        ConfigError: the strategy or the run needs samples that can be counted or indexed.
    """
    stream, trainer = stream_of(train), config.trainer
    if stream is None:
        return strategy.sampler(plan, config, len(train))  # type: ignore[arg-type]  # map-style, as build_data checked
    refuse_stream(strategy, config, train)
    sizes = trainer.global_batch_size, trainer.seed, trainer.drop_last, trainer.overfit_batches
    return StreamSampler(stream, *sizes, max_epochs=trainer.epochs)


def refuse_stream(strategy: Strategy, config: Config, train: Dataset[Any]) -> None:
    """Refuse training data that are a stream where the run needs samples that can be counted.

    Raises:
        ConfigError: see `stream_problems`.
    """
    stream = stream_of(train)
    if stream is not None and (problems := stream_problems(strategy, config, stream.length)):
        raise ConfigError(problems)


def check_stream(strategy: Strategy, config: Config) -> list[str]:
    """Return what speaks against the training data if class or function shows that they are a stream."""
    built = locate(config.data["_target_"])
    is_class = isinstance(built, type) and issubclass(built, IterableDataset)
    if not is_class and not inspect.isgeneratorfunction(built):
        return []
    return stream_problems(strategy, config, 1 if is_class and hasattr(built, "__len__") else None)


def check_built_stream(strategy: Strategy, config: Config) -> list[str]:
    """Return what speaks against the training data if building them shows that they are a stream.

    They are built only if the run may refuse them. Any error of theirs is left to the ranks.
    """
    built = locate(config.data["_target_"])
    shown = isinstance(built, type) and (issubclass(built, IterableDataset) or hasattr(built, "__getitem__"))
    is_ours = str(getattr(built, "__module__", "")).partition(".")[0] == "hetexp"  # which has no streams
    if shown or is_ours or not stream_problems(strategy, config, None):
        return []
    with logged("the data's length is left to the ranks"), seeded(config.trainer.seed):
        stream = stream_of(build_data(config.data).train)
        return [] if stream is None else stream_problems(strategy, config, stream.length)
    return []


def stream_problems(strategy: Strategy, config: Config, length: int | None) -> list[str]:
    """Return what speaks against a stream as training data, one sentence each.

    Args:
        length: samples of an epoch; `None`: not known.
    """
    problems, trainer = [], config.trainer
    if type(strategy).sampler is not Strategy.sampler:
        accepted = "one whose ranks share each batch, where `data` is a stream"
        fix = "It deals out all samples before the first step, and those of a stream cannot be counted."
        problems.append(must_be("strategy", accepted, strategy.name, fix))
    if length is None and trainer.max_steps is None and not trainer.fast_dev_run:
        accepted = "a number of steps where `data` is a stream of unknown length"
        fix = "The learning rate's schedule and the progress need the number of steps."
        problems.append(must_be("trainer.max_steps", accepted, trainer.max_steps, fix))
    return problems


def check_hooks(model: nn.Module, train: Dataset[Any]) -> None:
    """Refuse a model that scores some samples of a stream, which cannot be indexed.

    Raises:
        ConfigError: the model defines `probe_size`.
    """
    probes = isinstance(model, ModelHooks) and type(model).probe_size is not ModelHooks.probe_size
    if probes and stream_of(train) is not None:
        raise ConfigError(
            "`data` must be a map-style data set for a model that scores training samples (`probe_size`), "
            "but is a stream, whose samples cannot be drawn again."
        )


def begun_together(
    state: TrainState, batches: Generator[LocalBatch, None, None]
) -> Generator[LocalBatch, None, None]:
    """Yield the batches; all ranks wait until each has its first one, for which it may have to walk long."""
    with closing(batches):
        doing, state.doing = state.doing, "walking to its position in the data"
        with state.communicator.working():
            first = next(batches, None)
        state.communicator.meet()
        state.doing = doing
        if first is not None:
            yield first
            yield from batches


def heed_end(state: TrainState, step: int, batch: LocalBatch) -> None:
    """Make the step the run's last one if the data end with its batch; the same on every rank.

    Args:
        step: number of steps done before it.
    """
    if batch.last and step + 1 < state.total_steps:
        if state.rank == 0:
            log.warning(
                "The training data end after %d epochs: step %d is the last one, not step %d.",
                batch.position.epoch,
                step + 1,
                state.total_steps,
            )
        state.total_steps = step + 1


def check_drawn(state: TrainState, drawn: tuple[float, ...]) -> None:
    """Compare what the ranks have drawn, as `check_same_stream`; all ranks call it."""
    table = torch.zeros(state.communicator.world_size, len(drawn), dtype=torch.float64)
    table[state.rank] = torch.tensor(drawn, dtype=torch.float64)
    check_same_stream(state.plan, state.communicator.all_reduce(table).tolist())


def check_same_stream(plan: Plan, rows: Sequence[Sequence[float]]) -> None:
    """Compare the numbers of the samples that each rank has drawn (`StreamSampler.drawn`).

    Raises:
        HandshakeError: they differ; on every rank.
    """
    place, sample = rows[0]
    for rank, (other_place, other) in enumerate(rows):
        fix = (
            "Each rank walks the whole stream and takes its own part: it must not be divided by rank, and a "
            "generator of its own needs a seed."
        )
        who = f"rank {rank} ({plan.devices[rank].id})"
        if other_place != place:
            raise HandshakeError(
                f"`data` must be the same stream on every rank, but is at {_words(other_place)} on {who} and "
                f"at {_words(place)} on rank 0 after the same step. {fix}"
            )
        if not math.isclose(sample, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            raise HandshakeError(
                f"`data` must be the same stream on every rank, but {who} has another sample than rank 0 in "
                f"the batch before {_words(place)}. {fix}"
            )


def _words(place: float) -> str:
    epoch, offset = divmod(place, EPOCHS)
    return f"sample {offset:.0f} of epoch {epoch:.0f}"
