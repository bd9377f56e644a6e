"""Estimates the memory that a run's ranks need, from its configuration and plan; no device is touched."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, logged, must_be
from hetexp.data.base import build_data, indexed, same_shape
from hetexp.data.loader import cut
from hetexp.data.sampler import GlobalSampler
from hetexp.data.samples import Collate, read
from hetexp.hardware.memory.estimate import (
    MemoryEstimate,
    Workload,
    estimate_memory,
    largest_microbatch,
    readable,
)
from hetexp.hardware.memory.rules import MemoryRules, rules_for
from hetexp.model.base import build_model, to_precision
from hetexp.model.first_call import call_once
from hetexp.optimizer.build import build_optimizer
from hetexp.plan.strategy import Strategy
from hetexp.torch_private import tree_map_only
from hetexp.training.loss import build_loss, summed
from hetexp.training.recovery.oom_recovery import part_of
from hetexp.training.seeding import seeded
from hetexp.training.streams import refuse_stream

LARGE_BYTES = 2 * 2**30
"""Larger models are counted on the meta device if possible, even for emulated devices: a plan alone should
not need the model's memory, nor the minutes in which its weights are drawn."""
PEEKED = 32
"""Samples that are read for the length of a padded one."""
_Rank = tuple[DeviceSpec, int, str, int | None]
"""Device, local batch size, precision, most samples of a pass."""


class RunMemory:
    """Estimates of every rank of a run.

    The data set is built as the ranks build it, its first sample stands for all, and the model is built on
    the meta device if possible. No error of the user's own classes is raised here: `reason` has its first
    line, and the ranks report it in full.

    Args:
        devices: one a rank, as `local_batch_sizes` and `precisions` are.
        local_batch_sizes: each rank's samples of a full global batch.
        precisions: each rank's (`float32`, `bfloat16`, …).
    """

    def __init__(
        self,
        config: Config,
        devices: Sequence[DeviceSpec],
        local_batch_sizes: Sequence[int],
        precisions: Sequence[str],
        strategy: Strategy,
    ) -> None:
        self._config, self._strategy = config, strategy
        whole = [None] * len(devices)
        self._ranks: list[_Rank] = list(zip(devices, local_batch_sizes, precisions, whole, strict=True))
        self.reason: str | None = None
        """Why there is no estimate at all."""
        self.refusals: list[str] = []
        """Why the ranks would refuse the first samples."""
        self.steps_per_epoch: int | None = None
        """Steps of a pass over the data; `None`: not known."""
        try:
            with seeded(config.trainer.seed):
                data = build_data(config.data, config.loss.ignored())
                try:
                    refuse_stream(strategy, config, data.train)
                    head = indexed(same_shape(data.train), PEEKED)
                    self.sample, self._two = _first_sample(head, data.collate)
                except ConfigError as error:
                    self.refusals = error.problems
                    raise
            self.data_facts = data.facts
            self.steps_per_epoch = _steps_per_epoch(config, data.train)
            inputs, targets = self.sample
            recompute = config.trainer.activation_checkpointing
            model = build_on_meta(config.model, data.facts, recompute, inputs)
            self.model = to_precision(model, torch.float64 if "float64" in precisions else torch.float32)
            loss = build_loss(config.trainer.loss, config.loss.arguments())
            self._loss = loss.for_samples(1)  # memory does not depend on the count
            self._cache = _estimates_of(self._signature())
        except Exception as error:  # the user's own classes run any code
            self.reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

    def model_with_values(self, activation_checkpointing: bool = False) -> nn.Module:
        """Return the model on the CPU, built again if it is on the meta device."""
        weight = next(self.model.parameters(), None)
        if weight is None or not weight.is_meta:
            return self.model
        with torch.random.fork_rng(devices=[]):
            model = _build(self._config.model, self.data_facts, activation_checkpointing, self.sample[0])
        return to_precision(model, weight.dtype.to_real())

    @property
    def large(self) -> bool:
        """Whether the model is too large to be built for a plan alone."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters()) > LARGE_BYTES

    def local_loss(self, output: Any, targets: Any) -> torch.Tensor:
        """Return a batch's loss, as a rank takes it."""
        return self._workload("float32", accumulates=False).loss(output, targets)

    def of(
        self,
        devices: Sequence[DeviceSpec],
        local_batch_sizes: Sequence[int],
        precisions: Sequence[str],
        microbatch_sizes: Sequence[int | None] = (),
    ) -> RunMemory:
        """Return the estimates of other ranks of the same run; data and model are not built again.

        Args:
            microbatch_sizes: most samples of a pass of each rank, unless the configuration sets it.
        """
        other = copy.copy(self)
        other.__dict__.pop("estimates", None)
        sizes = microbatch_sizes or [None] * len(devices)
        other._ranks = list(zip(devices, local_batch_sizes, precisions, sizes, strict=True))
        return other

    @cached_property
    def estimates(self) -> list[MemoryEstimate | None]:
        """Each rank's memory; `None` if `reason` says why it is unknown."""
        return [self._estimate(*rank) for rank in self._ranks]

    def problems(self) -> list[str]:
        """Return a sentence for each device whose memory is known and too small, with a size that fits."""
        pairs = zip(self._ranks, self.estimates, strict=True)
        return [
            self._problem(device, precision, estimate)
            for (device, _, precision, _), estimate in pairs
            if estimate is not None
            and device.memory_bytes is not None
            and estimate.total_bytes > device.memory_bytes
        ]

    def caps(self, batch_size: int | None = None) -> list[int | None]:
        """Return the most samples of a step that each device's memory allows, `None` for no limit.

        There is no limit if the memory or the need is unknown, or if passes may be arbitrarily small. A
        device that cannot hold one sample has the cap 0.

        Args:
            batch_size: global batch; `None`: the run's.
        """
        trainer = self._config.trainer
        total = batch_size or trainer.global_batch_size
        if trainer.microbatch_size is not None:
            return [None] * len(self._ranks)
        if trainer.accumulate == 1 and self._strategy.varies_passes():
            most = [total] * len(self._ranks)
            return [0 if size == 0 else None for size in self.largest_passes(most)]
        most_of_pass = -(-total // trainer.accumulate)
        sizes = [
            self._largest(device, precision, most_of_pass, trainer.accumulate > 1)
            for device, _, precision, _ in self._ranks
        ]
        return [None if size is None else size * trainer.accumulate for size in sizes]

    def largest_passes(self, num_samples: Sequence[int]) -> list[int | None]:
        """Return the size of the largest pass that fits on each device, to be one of several.

        `None` if all samples fit in one pass, if memory or need are unknown, or if the user chose the
        microbatches. 0 if not even one sample fits.

        Args:
            num_samples: of each rank.
        """
        trainer = self._config.trainer
        chosen = trainer.microbatch_size is not None or trainer.accumulate > 1
        if chosen or not self._strategy.varies_passes():
            return [None] * len(self._ranks)
        sizes: list[int | None] = []
        for (device, _, precision, _), samples in zip(self._ranks, num_samples, strict=True):
            whole = self._largest(device, precision, samples, accumulates=False)
            if whole is None:  # all of them, or unknown
                sizes.append(None)
                continue
            with_room = self._largest(device, precision, samples, accumulates=True, headroom=True)
            size = with_room or self._largest(device, precision, samples, accumulates=True)
            sizes.append(size if size is not None else samples)
        return sizes

    def _largest(
        self, device: DeviceSpec, precision: str, most: int, accumulates: bool, headroom: bool = False
    ) -> int | None:
        """Return the largest pass below `most` samples that fits, `None` if `most` fits or it is unknown."""
        if device.memory_bytes is None or self.reason is not None or most == 0:
            return None
        rules = rules_for(device).with_headroom() if headroom else rules_for(device)
        workload = self._workload(precision, accumulates, rules.foreach)
        try:
            largest = largest_microbatch(workload, device.memory_bytes, rules, most, self._measured)
        except ValueError:  # the model cannot be measured
            return None
        return None if largest == most else largest or 0

    def _estimate(
        self, device: DeviceSpec, local_batch_size: int, precision: str, microbatch_size: int | None
    ) -> MemoryEstimate | None:
        if self.reason is not None:
            return None
        trainer = self._config.trainer
        sizes = cut(local_batch_size, trainer.accumulate, trainer.microbatch_size or microbatch_size)
        rules = rules_for(device)
        workload = self._workload(precision, len(sizes) > 1, rules.foreach)
        return self._measured(workload, sizes[0] if sizes else 0, rules)

    def _measured(self, workload: Workload, size: int, rules: MemoryRules) -> MemoryEstimate:
        """Return the estimate of one of this run's workloads, from the cache if it was made before."""
        key = (workload.precision, workload.accumulates, size, rules)
        if key not in self._cache:  # devices of one kind need the same, and searches ask again and again
            self._cache[key] = estimate_memory(workload, size, rules)
        return self._cache[key]

    def _signature(self) -> tuple[Any, ...]:
        """Return all that estimates depend on beside a workload's precision and size, and the device."""
        config, strategy = self._config, self._strategy
        optimizer = {key: value for key, value in config.optimizer.items() if key != "lr"}
        options = (config.model, config.data, optimizer, config.trainer.activation_checkpointing, config.loss)
        tensors = [(name, t.shape, t.dtype) for name, t in self.model.state_dict().items()]
        sample = tree_map_only(torch.Tensor, lambda t: (t.shape, t.dtype), (self.sample, self._two))
        classes = (type(strategy), type(self._loss), *(type(module) for module in self.model.modules()))
        return str((options, tensors, sample, vars(strategy))), classes

    def _workload(self, precision: str, accumulates: bool, fuses: bool = False) -> Workload:
        return Workload(
            model=self.model,
            build_optimizer=lambda model: build_optimizer(self._config.optimizer, model, fuses),
            # As in `hetexp.training.state.TrainState.local_loss`.
            loss=lambda output, targets: summed(self._loss, output, targets),
            sample=self.sample,
            two=self._two,
            precision=precision,
            accumulates=accumulates,
            keeps_gradients=self._strategy.keeps_gradients(),
            bucket_bytes=self._strategy.bucket_bytes,
        )

    def _problem(self, device: DeviceSpec, precision: str, estimate: MemoryEstimate) -> str:
        assert device.memory_bytes is not None
        has = readable(device.memory_bytes)
        # A smaller microbatch is one of several: their gradients are added up.
        rules, size = rules_for(device), estimate.microbatch_size
        workload = self._workload(precision, accumulates=True, fuses=rules.foreach)
        largest = None
        if estimate.measured and size > 1:
            try:
                has_bytes, most, estimate_of = device.memory_bytes, size - 1, self._measured
                largest = largest_microbatch(
                    workload, has_bytes, rules.with_headroom(), most, estimate_of
                ) or largest_microbatch(workload, has_bytes, rules, most, estimate_of)
            except ValueError:  # fewer samples cannot be measured: this size is still too large
                return _too_many(self._config, f"less than {size} on {device}", estimate, has, "")
        if largest is None:
            single = estimate if size <= 1 else self._measured(workload, 1, rules)
            needs = (single if single.measured else estimate).explain()
            return (
                f"`model` must fit on {device}, which has {has}, but needs {needs} instead. Choose a smaller "
                "model, an optimizer with less state, or a device with more memory."
            )
        fix = f"Write trainer.microbatch_size={largest}"
        fix += " and trainer.accumulate=1." if self._config.trainer.accumulate > 1 else "."
        return _too_many(self._config, f"at most {largest} on {device}", estimate, has, fix)


def _first_sample(dataset: Dataset[Any], collate: Collate) -> tuple[tuple[Any, Any], tuple[Any, Any] | None]:
    """Return the batch of the first sample, and that of two such samples if batches have no rows.

    Padded samples have the length of the longest of the first `PEEKED`.
    """
    total = len(dataset)  # type: ignore[arg-type]  # map-style, as build_data checked
    samples = read(dataset, range(min(2 if collate.one_shape is not False else PEEKED, total)))
    batch = collate(samples)  # also to learn whether they are a batch at all
    if collate.has_rows:
        return part_of(batch, 0, 1), None
    return collate(samples[:1]), collate(samples[:1] * 2)


def _steps_per_epoch(config: Config, data: Any) -> int | None:
    if not hasattr(type(data), "__len__"):
        return None
    trainer = config.trainer
    batches = trainer.global_batch_size, trainer.seed, trainer.drop_last, trainer.overfit_batches
    return GlobalSampler(len(data), *batches).steps_per_epoch


@lru_cache(maxsize=64)
def _estimates_of(signature: tuple[Any, ...]) -> dict[Any, MemoryEstimate]:
    """Return this process's estimates for runs of one signature, to be read and added to."""
    return {}


def _too_many(config: Config, accepted: str, estimate: MemoryEstimate, has: str, fix: str) -> str:
    needs = f"A step needs {estimate.explain()} and the device has {has}. {fix}".strip()
    return must_be("trainer.microbatch_size", accepted, config.trainer.microbatch_size, needs)


def build_on_meta(
    node: Any, facts: Any, activation_checkpointing: bool = False, inputs: Any = None
) -> nn.Module:
    """Build a model as `hetexp.training.starting` does, on the meta device if its constructor allows it.

    Args:
        inputs: of a small batch, for the first call of a model with lazy layers; `None`: they stay lazy.
    """
    # Its constructor may read values; if it is simply wrong, it raises again.
    with logged("the model is built with values for the estimate"), torch.device("meta"):
        return _build(node, facts, activation_checkpointing, inputs)
    with torch.random.fork_rng(devices=[]):
        return _build(node, facts, activation_checkpointing, inputs)


def _build(node: Any, facts: Any, activation_checkpointing: bool, inputs: Any) -> nn.Module:
    model = build_model(node, facts, activation_checkpointing)
    if inputs is not None:
        call_once(model, inputs)
    return model
