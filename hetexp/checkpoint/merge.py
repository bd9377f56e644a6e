"""Merges checkpoints of one model: weighted means, low-rank adapters as products, soups.

The mean of weights is a model only if training began from the same weights (Wortsman et al. 2022). Products
of means are not means of products: low-rank adapters are merged by the product that each adds to its base.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetexp.checkpoint.folder import read_packed
from hetexp.core.errors import CheckpointError
from hetexp.core.split import normalise

Tensors = Mapping[str, Tensor]

_LORA_A = re.compile(r"(?P<layer>.+)\.lora_A(?P<adapter>\..+)?")
_UNMERGED = re.compile(r"\.lora_(embedding_[AB]|magnitude_vector)")


@dataclass(frozen=True)
class Parent:
    """A checkpoint that takes part in a merge."""

    folder: Path
    tensors: dict[str, Tensor]
    """The model's tensors, tied ones once."""
    tied: dict[str, str]
    """Names that are left out, each with the name that stands for it."""
    state: dict[str, Any]
    """`state.json`."""
    optimizer: dict[str, Tensor]

    @property
    def part(self) -> dict[str, Any]:
        """This rank's part of the data, if devices trained apart; else empty."""
        return dict(self.state["extra"].get("part") or {})

    @property
    def samples(self) -> int:
        """Samples that it was trained on."""
        return int(self.part.get("samples", self.state["extra"]["progress"]["samples"]))

    @property
    def name(self) -> str:
        """The device that trained it, or the run."""
        return str(self.part.get("device") or self.state["extra"]["run_id"])

    @property
    def start(self) -> tuple[Any, ...]:
        """Origin of the weights that its training began with: the seed, or a checkpoint."""
        config = self.state["extra"]["config"]
        if config.get("resume") is not None:
            return ("resume", config["resume"])
        return ("seed", config["trainer"]["seed"], str(config["model"]))


def read_parent(folder: Path) -> Parent:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or not of hetexp.
    """
    tensors, tied, state, optimizer = read_packed(folder)
    return Parent(folder, tensors, tied, state, optimizer)


def check_parents(parents: Sequence[Parent]) -> None:
    """Check that checkpoints are of one architecture.

    Raises:
        CheckpointError: names, shapes or types of tensors differ; the message names the first few.
    """
    first = parents[0]
    for other in parents[1:]:
        differing = [name for name in first.tensors if name not in other.tensors]
        differing += [name for name in other.tensors if name not in first.tensors]
        differing += [
            f"{name} ({_kind(first.tensors[name])} and {_kind(other.tensors[name])})"
            for name in first.tensors.keys() & other.tensors.keys()
            if _kind(first.tensors[name]) != _kind(other.tensors[name])
        ]
        if differing or first.tied != other.tied:
            difference = ", ".join(sorted(differing)[:3]) or "which tensors are tied"
            raise CheckpointError(
                f"`RUN` must be checkpoints of one model, but {first.folder} and {other.folder} differ: "
                f"{difference}."
            )


def strangers(parents: Sequence[Parent]) -> str | None:
    """Return a sentence on a parent that began from other weights than the first, `None` if there is none."""
    others = [parent for parent in parents if parent.start != parents[0].start]
    if not others:
        return None
    first = parents[0]
    return (
        f"{others[0].folder} began from other weights ({_described(others[0].start)}) than {first.folder} "
        f"({_described(first.start)}): the mean of networks that never were one is no network of either."
    )


def weights_of(parents: Sequence[Parent], wanted: Sequence[float] | None = None) -> tuple[float, ...]:
    """Return each parent's weight in the mean.

    Args:
        wanted: the user's weights; `None`: the samples that each parent was trained on.

    Raises:
        CheckpointError: the number of weights is not that of the parents, or no weight is above zero.
    """
    if wanted is not None and len(wanted) != len(parents):
        raise CheckpointError(
            f"`--weights` must be {len(parents)} numbers, one for each of the checkpoints, but are "
            f"{len(wanted)} instead."
        )
    try:
        return normalise(list(wanted) if wanted is not None else [float(p.samples) for p in parents])
    except ValueError as error:
        raise CheckpointError(f"`--weights` cannot be used: {error}.") from error


def merge_tensors(
    models: Sequence[Tensors],
    weights: Sequence[float],
    scalings: Mapping[str, float] | None = None,
) -> dict[str, Tensor]:
    """Return the weighted mean of models, by name.

    Floating-point tensors are averaged in float64; a value on which all models agree stays equal to the bit.
    Integer and boolean tensors are those of the model with the largest weight (the first of several).

    Low-rank adapters (`….lora_A…`, `….lora_B…`, as peft names them) are merged as products, exactly. If their
    base weight is among the tensors, the sum of wᵢ · scaling · Bᵢ Aᵢ is added to it, and the adapter restarts
    with B = 0. Otherwise ranks are stacked, A = [A₁; A₂; …] and B = [w₁ B₁, w₂ B₂, …]: the adapter's rank is
    the sum of the ranks, and `lora_alpha` must grow with it.

    Args:
        models: tensors of models of one architecture.
        weights: weight of each model; they sum to 1.
        scalings: factor of each adapter's product, by the name of its A (`lora_scalings`).

    Raises:
        CheckpointError: an adapter's scaling is not known, or its kind has no product.
    """
    heaviest = max(range(len(models)), key=lambda i: (weights[i], -i))
    merged: dict[str, Tensor] = {}
    for name, kept in models[heaviest].items():
        if _UNMERGED.search(name):
            raise CheckpointError(f"'{name}' cannot be merged: only linear lora_A and lora_B have a product.")
        values = [model[name] for model in models]
        merged[name] = _mean(values, weights) if kept.is_floating_point() or kept.is_complex() else kept
    for name, other, base in _adapters(models[heaviest]):
        pairs = [(model[name], model[other]) for model in models]
        if base is None:
            merged[name] = torch.cat([a for a, _ in pairs])
            merged[other] = torch.cat([w * b for w, (_, b) in zip(weights, pairs, strict=True)], dim=1)
            continue
        scaling = (scalings or {}).get(name)
        if scaling is None:
            raise CheckpointError(
                f"The scaling of '{name}' must be known to merge it into '{base}', but its layer has no "
                "`scaling`. hetexp merge --lora-scaling gives it."
            )
        added = sum(
            (w * (b.double() @ a.double()) for w, (a, b) in zip(weights, pairs, strict=True)),
            torch.zeros((), dtype=torch.float64),
        )
        merged[base] = _add_product(merged[base], scaling * added, base)
        merged[name], merged[other] = models[heaviest][name], torch.zeros_like(merged[other])
    return merged


def lora_scalings(model: nn.Module) -> dict[str, float]:
    """Return the factor of each adapter's product in a model, by the name of its A.

    It is the layer's attribute `scaling`: a number, or as in peft's layers a number for each adapter by name.
    """
    scalings = {}
    for path, module in model.named_modules():
        scaling = getattr(module, "scaling", None)
        if scaling is None or not hasattr(module, "lora_A"):
            continue
        for name in module.state_dict():
            matched = _LORA_A.fullmatch(f"layer.{name}")
            if matched is not None and matched["layer"] == "layer":
                adapter = (matched["adapter"] or "").strip(".").partition(".")[0]
                value = scaling[adapter] if isinstance(scaling, Mapping) else scaling
                scalings[f"{path}.{name}" if path else name] = float(value)
    return scalings


def adapter_names(tensors: Tensors) -> list[str]:
    """Return the names of all adapters' A."""
    return [name for name, _, _ in _adapters(tensors)]


def greedy_soup(losses: Sequence[float], loss_of: Callable[[Sequence[int]], float]) -> list[int]:
    """Return the models whose mean is best, chosen greedily (Wortsman et al. 2022, recipe 1).

    From the best model to the worst, each is added if the loss of the mean does not rise.

    Args:
        losses: loss of each model alone, on the evaluation data.
        loss_of: returns the loss of the mean of some models, given their numbers.
    """
    order = sorted(range(len(losses)), key=lambda i: (losses[i], i))
    chosen, best = order[:1], losses[order[0]]
    for index in order[1:]:
        loss = loss_of([*chosen, index])
        if loss <= best:
            chosen, best = [*chosen, index], loss
    return chosen


def _adapters(tensors: Tensors) -> list[tuple[str, str, str | None]]:
    """Return the names of each adapter's A, B and base weight, `None` if that is not in `tensors`."""
    adapters = []
    for name in tensors:
        matched = _LORA_A.fullmatch(name)
        if matched is None:
            continue
        other = f"{matched['layer']}.lora_B{matched['adapter'] or ''}"
        if other not in tensors:
            raise CheckpointError(f"'{name}' must have its pair to be merged, but '{other}' is missing.")
        bases = [f"{matched['layer']}.base_layer.weight", f"{matched['layer']}.weight"]
        adapters.append((name, other, next((base for base in bases if base in tensors), None)))
    return adapters


def _add_product(base: Tensor, product: Tensor, name: str) -> Tensor:
    if product.shape != base.shape:
        product = product.T  # a layer that keeps its weight as [in, out]
    if product.shape != base.shape:
        raise CheckpointError(
            f"'{name}' must have the shape of its adapter's product {list(product.shape)}, but has "
            f"{list(base.shape)}."
        )
    return (base.double() + product).to(base.dtype)


def _mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    first = values[0]
    same = torch.ones_like(first, dtype=torch.bool)
    wide = torch.complex128 if first.is_complex() else torch.float64
    total = torch.zeros_like(first, dtype=wide)
    for value, weight in zip(values, weights, strict=True):
        same &= value == first
        total += weight * value.to(wide)
    return torch.where(same, first, total.to(first.dtype))


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _described(start: tuple[Any, ...]) -> str:
    return f"resumed from {start[1]}" if start[0] == "resume" else f"trainer.seed={start[1]}"
