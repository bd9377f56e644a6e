"""Merges models that were trained independently to one, and compares it with them on the evaluation data."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from hetexp.checkpoint.folder import write_packed
from hetexp.checkpoint.manifest import folder_name
from hetexp.checkpoint.merge import (
    Parent,
    adapter_names,
    check_parents,
    greedy_soup,
    lora_scalings,
    merge_tensors,
    read_parent,
    strangers,
    weights_of,
)
from hetexp.checkpoint.model_state import match_model, pack_model
from hetexp.checkpoint.optimizer_state import tensor_names
from hetexp.core.call import call_model
from hetexp.core.errors import CheckpointError
from hetexp.core.split import apportion, normalise
from hetexp.data.base import stream_of
from hetexp.data.loader import chop, cut
from hetexp.data.sampler import GlobalSampler, Position
from hetexp.data.streams.stream import Stream, evaluation_batches
from hetexp.model.hooks import NO_HOOKS
from hetexp.torch_private import BatchNormBase
from hetexp.training.evaluate import evaluate_locally
from hetexp.training.model_hooks import conclude
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

RECALIBRATED_SAMPLES = 8192
"""Most training samples for BatchNorm's statistics."""


@dataclass(frozen=True)
class MergeOptions:
    """How to merge models."""

    weights: tuple[float, ...] | None = None
    """One a parent; `None`: by the samples of each."""
    soup: Literal["greedy"] | None = None
    batch_norm: Literal["recalibrate", "average"] = "recalibrate"
    lora_scaling: float | None = None
    """Of all adapters, if the model's layers do not have it."""
    force: bool = False
    """Whether to merge models that began from different weights."""


class MergeSettings(Protocol):
    """The options of `Independent`; see there for each."""

    merge: bool
    soup: Literal["greedy"] | None
    batch_norm: Literal["recalibrate", "average"]


@dataclass
class Merged:
    """One model made of several."""

    tensors: dict[str, torch.Tensor]
    report: dict[str, Any]
    """As `summary.json` has it under `merge`."""
    evaluation: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingData:
    """Training samples of a merged model's parent."""

    key: str
    """Equal for parents that were trained on the same samples."""
    samples: Dataset[Any]
    order: Sequence[int]
    """Indices of the first epoch's samples."""


def merge(
    parents: Sequence[Parent],
    options: MergeOptions,
    state: TrainState | None,
    evaluations: Sequence[dict[str, float]] = (),
    data: Sequence[TrainingData] = (),
) -> Merged:
    """Merge models, and evaluate the result if there is evaluation data.

    Args:
        state: with a model of the parents' kind, which then holds the merged one; `None`: nothing is
            evaluated, and running statistics are averaged.
        evaluations: of the parents; empty: they are evaluated here.
        data: of each parent; empty: all were trained on the data of `state`.

    Raises:
        CheckpointError: the parents are models of different kinds, began from different weights (without
            `force`), or the options need evaluation data that is missing.
    """
    check_parents(parents)
    foreign = strangers(parents)
    if foreign is not None and not options.force:
        raise CheckpointError(f"{foreign} `--force` merges them all the same, and reports the result.")
    weights = weights_of(parents, options.weights)
    trials = _Trials(parents, weights, options, state, data)
    evaluations = list(evaluations)
    if not evaluations and trials.evaluates:
        evaluations = [trials.evaluation([index]) for index in range(len(parents))]
    chosen = list(range(len(parents)))
    if options.soup == "greedy":
        if not trials.evaluates:
            raise CheckpointError("`--soup greedy` needs evaluation data, but the runs have none.")
        losses = [evaluation["loss"] for evaluation in evaluations]
        chosen = greedy_soup(losses, lambda some: trials.evaluation(some)["loss"])
    tensors = trials.tensors(chosen)
    evaluation = evaluate_locally(state) if state is not None and trials.evaluates else {}
    parent_losses = [parent.get("loss") for parent in evaluations] or [None] * len(parents)
    known = [loss for loss in parent_losses if loss is not None]
    worse = evaluation["loss"] > min(known) if evaluation and known else None
    report = {
        "method": "greedy soup" if options.soup else "mean",
        "weights": trials.parts_of(chosen),
        "parents": [
            _described(parent) | {"loss": loss} for parent, loss in zip(parents, parent_losses, strict=True)
        ],
        "merged_loss": evaluation.get("loss"),
        "worse_than_best_parent": worse,
        "batch_norm": trials.batch_norm,
        "batch_norm_samples": trials.batch_norm_samples,
        "other_start": foreign,
    }
    return Merged(tensors, report, evaluation)


def _described(parent: Parent) -> dict[str, Any]:
    return {
        "device": parent.name,
        "run_id": parent.state["extra"]["run_id"],
        "checkpoint": str(parent.folder),
        "step": parent.state["step"],
        "samples": parent.samples,
        "share": parent.part.get("share"),
        "seed": parent.state["extra"]["config"]["trainer"]["seed"],
    }


class _Trials:
    """Makes means of some of the parents, and evaluates them."""

    def __init__(
        self,
        parents: Sequence[Parent],
        weights: Sequence[float],
        options: MergeOptions,
        state: TrainState | None,
        data: Sequence[TrainingData],
    ) -> None:
        self._parents, self._weights, self._options, self._state = parents, weights, options, state
        self._data = data or ([_data_of(state)] * len(parents) if state is not None else [])
        self.evaluates = state is not None and state.eval_data is not None
        self.batch_norm: str | None = None
        """How running statistics were merged, `None` if the model has none."""
        self.batch_norm_samples: list[int] | None = None
        """Samples of each parent's data that they were measured on, `None` if they were not. If parents have
        the same data, the first one has the number."""
        self._scalings = lora_scalings(state.model) if state is not None else {}
        if options.lora_scaling is not None:
            self._scalings = dict.fromkeys(adapter_names(parents[0].tensors), options.lora_scaling)

    def parts_of(self, chosen: Sequence[int]) -> list[float]:
        """Return each parent's weight in the mean of some of them; 0 for the others."""
        total = sum(self._weights[index] for index in chosen)
        return [
            self._weights[index] / total if index in chosen and total else 0.0
            for index in range(len(self._weights))
        ]

    def tensors(self, chosen: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the merged model's tensors; the model of `state` then holds them."""
        weights = self.parts_of(chosen)
        if len(chosen) == 1:  # a parent itself, its adapters and statistics as they are
            merged = dict(self._parents[chosen[0]].tensors)
        else:
            models = [self._parents[index].tensors for index in chosen]
            merged = merge_tensors(models, [weights[index] for index in chosen], self._scalings)
        if self._state is None:
            self.batch_norm = "averaged" if any("running_mean" in name for name in merged) else None
            return merged
        if any(merged[name].shape != self._parents[0].tensors[name].shape for name in merged):
            self.evaluates = False  # stacked adapters fit no model of the parents' kind
            return merged
        self._state.model.load_state_dict(match_model(merged, self._state.model), strict=True)
        if self._state.hooks is not NO_HOOKS and len(chosen) > 1:
            conclude(self._state, None)
            merged = {name: value.detach().cpu() for name, value in pack_model(self._state.model)[0].items()}
        if not _norms(self._state.model):
            return merged
        self.batch_norm, self.batch_norm_samples = "averaged", None
        if self._options.batch_norm == "recalibrate" and len(chosen) > 1:
            counts = recalibrate(self._state, list(zip(weights, self._data, strict=True)))
            keys = [data.key for data in self._data]
            self.batch_norm_samples = [
                counts.get(key, 0) if keys.index(key) == place else 0 for place, key in enumerate(keys)
            ]
            self.batch_norm = "recalibrated"
        return {name: value.detach().cpu() for name, value in pack_model(self._state.model)[0].items()}

    def evaluation(self, chosen: Sequence[int]) -> dict[str, float]:
        """Return the evaluation of the mean of some of the parents."""
        assert self._state is not None
        self.tensors(chosen)
        return evaluate_locally(self._state)


def recalibrate(state: TrainState, weighted: Sequence[tuple[float, TrainingData]] = ()) -> dict[str, int]:
    """Measure the running statistics of all BatchNorm layers again, on training data with present weights.

    They become means over batches of the training's size, each with samples of all data in proportion to
    their weights; all other layers are in evaluation mode.

    Args:
        weighted: data and the weight of each; empty: the data of `state`. Their order changes nothing.

    Returns:
        Number of samples of each data, by key.
    """
    norms = _norms(state.model)
    before = [norm.momentum for norm in norms]
    state.model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over the batches
        norm.train()
    largest = max([2, *state.pass_sizes(state.plan.local_batch_sizes[state.rank])])
    batches, counts = _calibration_batches(state, weighted, largest)
    with torch.no_grad():
        for inputs, _ in batches:
            with state.autocast():
                call_model(state.model, state.to_device(inputs))
            state.communicator.alive()
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    state.model.train()
    return counts


def _calibration_batches(
    state: TrainState, weighted: Sequence[tuple[float, TrainingData]], largest: int
) -> tuple[Iterator[Any], dict[str, int]]:
    """Return even batches of training samples, of a stream the first ones, and each data's number of them."""
    stream = stream_of(state.train_data)
    if stream is not None and not weighted:
        return _of_stream(state, stream, largest), {}
    samples, order, counts = _mixed(weighted or [(1.0, _data_of(state))])
    batches = list(chop(order, cut(len(order), 1, largest)))
    return iter(DataLoader(samples, batch_sampler=batches, collate_fn=state.collate)), counts


def _of_stream(state: TrainState, stream: Stream, largest: int) -> Iterator[Any]:
    size, seed = state.config.trainer.global_batch_size, state.config.trainer.seed
    for indices in evaluation_batches(stream, size, seed, -(-RECALIBRATED_SAMPLES // size)):
        for places in chop(indices.tolist(), cut(len(indices), 1, largest)):
            yield state.collate(stream.__getitems__(places))


def _mixed(weighted: Sequence[tuple[float, TrainingData]]) -> tuple[Dataset[Any], list[int], dict[str, int]]:
    """Return samples of several data in an even mixture, indices into them, and each one's number by key."""
    weights: dict[str, float] = {}
    by_key: dict[str, TrainingData] = {}
    for weight, data in weighted:
        if weight > 0:
            weights[data.key] = weights.get(data.key, 0.0) + weight
            by_key.setdefault(data.key, data)
    keys = sorted(by_key)
    parts, shares = [by_key[key] for key in keys], normalise([weights[key] for key in keys])
    most = [int(len(part.order) / share) for part, share in zip(parts, shares, strict=True)]
    counts = apportion(min(RECALIBRATED_SAMPLES, *most), shares).counts
    starts = [0, *accumulate(len(part.samples) for part in parts)]  # type: ignore[arg-type]
    # Even: the k-th of a part's n samples stands at (k + 1/2) / n of the whole.
    places = sorted(((k + 0.5) / count, place, k) for place, count in enumerate(counts) for k in range(count))
    order = [starts[place] + parts[place].order[k] for _, place, k in places]
    samples = parts[0].samples if len(parts) == 1 else ConcatDataset([part.samples for part in parts])
    return samples, order, dict(zip(keys, counts, strict=True))


def _data_of(state: TrainState) -> TrainingData:
    return TrainingData("", state.train_data, first_epoch(state.sampler))


def first_epoch(sampler: GlobalSampler) -> list[int]:
    """Return the indices of the first epoch's samples, in their random order."""
    position = Position()
    order: list[int] = []
    while position.epoch == 0:
        indices, position = sampler.batch(position)
        order += indices.tolist()
    return order


def _norms(model: nn.Module) -> list[BatchNormBase]:
    norms = [module for module in model.modules() if isinstance(module, BatchNormBase)]
    return [norm for norm in norms if norm.running_mean is not None]


def write_merged(folder: Path, parents: Sequence[Parent], merged: Merged) -> Path:
    """Write a merged model as a checkpoint of the usual form, and return its folder.

    Its progress is that of the parent with the largest weight. The optimizer starts without moments, which
    would be of other weights. `state.json` names the parents.
    """
    weights = merged.report["weights"]
    heaviest = parents[max(range(len(parents)), key=lambda i: (weights[i], -i))]
    packed = heaviest.state["optimizer"] | {"state": {}}
    kept = tensor_names(packed)
    extra = dict(heaviest.state["extra"])
    extra.pop("part", None)
    extra["devices"] = [device for parent in parents for device in parent.state["extra"]["devices"]]
    extra["merged"] = merged.report
    described = heaviest.state | {"optimizer": packed, "extra": extra}
    optimizer = {name: tensor for name, tensor in heaviest.optimizer.items() if name in kept}
    return write_packed(folder, merged.tensors, heaviest.tied, optimizer, described)


def rank_folder(checkpoints: Path, rank: int) -> Path:
    """Return the folder of a rank's own checkpoints."""
    return checkpoints / f"rank_{rank}"


def merge_ranks(
    state: TrainState, step: int, settings: MergeSettings, evaluations: Sequence[dict[str, float]]
) -> tuple[tuple[str, dict[str, float]] | None, dict[str, Any]]:
    """Merge the models that the ranks have saved at a step.

    Args:
        evaluations: of each rank's model; empty if they were not evaluated.

    Returns:
        The merged checkpoint and its evaluation, `None` if they were not merged; and the summary's entry.
    """
    options = MergeOptions(soup=settings.soup, batch_norm=settings.batch_norm)
    name = folder_name(step)
    read = [read_parent(rank_folder(state.checkpoints, rank) / name) for rank in range(state.plan.world_size)]
    # A device without a share has trained nothing.
    trained = [rank for rank, parent in enumerate(read) if parent.samples]
    parents = [read[rank] for rank in trained]
    try:
        merged = merge(parents, options, state, [evaluations[rank] for rank in trained if evaluations])
    except CheckpointError as error:
        log.warning("The models were not merged, and stay as they are: %s", error)
        return None, {"error": f"{error}"}
    for logger in state.loggers:
        logger.log({f"merge/{key}": value for key, value in merged.evaluation.items()}, step)
    return (str(write_merged(state.checkpoints, parents, merged)), merged.evaluation), merged.report
