"""A debug check that all ranks still hold one model; it copies weights and gradients to the host.

Each rank reduces every tensor to three numbers, in float64 on the host whatever its device: its projection on
a fixed random vector of ±1, its squared norm and its largest magnitude. The projection of a difference is
about as large as the difference's norm, whatever its direction (Johnson and Lindenstrauss 1984). So a few
numbers a tensor show how far apart two replicas are.

Replicas on unlike devices apply the same gradient with different rounding. A difference counts from
`TOLERANCE` times the tensor's norm on: a million random roundings add up to less.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from hetexp.core.errors import HetexpError
from hetexp.torch_private import BatchNormBase
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Largest difference of two replicas that rounding explains, relative to the tensor's norm, by the type of
the weights. An exchanged gradient is the same to the bit, but for the factor by which it is clipped."""
SPREAD = 4.0
"""A projection is seldom more than this many times the norm of the difference."""
CHUNK = 2**20
"""Elements copied to the host at once."""
FIX = (
    "Something changes the model on one rank only, or keeps gradients from being exchanged: a hook, an "
    "optimizer with random numbers, a part of the model that the strategy does not see."
)


class ReplicaError(HetexpError):
    """Ranks that should hold the same weights do not."""


@dataclass(frozen=True)
class _Difference:
    kind: str
    name: str
    size: float
    """Relative to the tensor's norm."""
    ranks: tuple[int, ...]
    """The ranks that hold the tensor."""
    values: list[list[float]]
    """Each of these ranks' projection, squared norm and largest magnitude."""


def differences_of(
    state: TrainState, replicated: Iterable[tuple[str, str, torch.Tensor, tuple[int, ...]]]
) -> list[_Difference]:
    """Return the tensors that differ by more than rounding; the same on every rank, and all call it.

    Args:
        replicated: kind, name, the rank's tensor, and the ranks that hold it (`Engine.replicated`).
    """
    kinds, rows = [], []
    for number, (kind, name, tensor, ranks) in enumerate(replicated):
        kinds.append((kind, name, ranks))
        rows.append(fingerprint(tensor, number))
    table = torch.zeros((state.communicator.world_size, len(rows), 3), dtype=torch.float64)
    table[state.rank] = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    by_tensor = state.communicator.all_reduce(table).transpose(0, 1).tolist()
    tolerance = TOLERANCE[state.dtype]
    differences = []
    for (kind, name, ranks), all_values in zip(kinds, by_tensor, strict=True):
        values = [all_values[rank] for rank in ranks]
        size = max(_distance(values[0], other) for other in values)
        if size > tolerance:
            differences.append(_Difference(kind, name, size, ranks, values))
    return differences


def warn_of_own_buffers(state: TrainState) -> None:
    """Warn of buffers that a pass has changed by each rank's own samples; all ranks call it in a step.

    BatchNorm's are left out: they are synchronised, or named elsewhere. The ranks began the step with equal
    buffers.
    """
    if state.communicator.world_size == 1 or not state.has_buffers:
        return
    ranks = tuple(range(state.communicator.world_size))
    own = {
        f"{path}.{name}".removeprefix(".")
        for path, module in state.model.named_modules()
        if isinstance(module, BatchNormBase)
        for name in module._buffers
    }
    buffers = [("buffer", n, b, ranks) for n, b in state.model.named_buffers() if n not in own]
    found = differences_of(state, buffers) if buffers else []
    if not found or state.rank != 0:
        return
    named = ", ".join(difference.name for difference in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    log.warning(
        "The model changes %s%s in training by each rank's own samples or number of passes: rank 0's values "
        "are kept, and other devices or shares give others. hetexp.model.hooks.ModelHooks computes values "
        "from all ranks' samples (docs/how-to/your-own.md).",
        named,
        more,
    )


class ReplicaCheck:
    """Compares the replicas of all ranks; every rank calls it at the same steps."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._every = state.config.trainer.check_sync_every
        self._due = False
        self._warned = False

    def due(self, step: int, synchronised: bool) -> bool:
        """Return whether to compare the replicas now: every `check_sync_every` steps, or at the next sync."""
        several = self._state.communicator.world_size > 1
        self._due |= self._every > 0 and step % self._every == 0 and several
        return self._due and synchronised

    def compare(self, step: int) -> None:
        """Compare weights, buffers, and the gradients of a joint step.

        Buffers only cause one warning: those that each rank computes from its own samples differ unless the
        strategy synchronises them.

        Raises:
            ReplicaError: weights or gradients differ by more than rounding; the same on every rank.
        """
        self._due = False
        differences = self._differences()
        fatal = [difference for difference in differences if difference.kind != "buffer"]
        if fatal:
            raise ReplicaError(f"{self._words(step, fatal)} {FIX}")
        if differences and not self._warned:
            self._warned = True
            if self._state.rank == 0:
                log.warning("%s Rank 0's is saved.", self._words(step, differences))

    def _differences(self) -> list[_Difference]:
        return differences_of(self._state, self._state.engine.replicated())

    def _words(self, step: int, differences: list[_Difference]) -> str:
        worst = max(differences, key=lambda difference: difference.size)
        devices = self._state.plan.devices
        values = "; ".join(
            f"rank {rank}, {devices[rank]}: norm {math.sqrt(square):.12g}, largest {largest:.12g}"
            for rank, (_, square, largest) in zip(worst.ranks, worst.values, strict=True)
        )
        others = len(differences) - 1
        more = f" {others} other tensor{'s differ' if others > 1 else ' differs'}, too." if others else ""
        return (
            f"After step {step} the ranks no longer hold one model: the {worst.kind} of {worst.name} differs "
            f"by about {worst.size:.2g} of its norm, of which rounding explains "
            f"{TOLERANCE[self._state.dtype]:g} ({values}).{more}"
        )


def fingerprint(tensor: torch.Tensor, number: int) -> tuple[float, float, float]:
    """Return a tensor's projection on a fixed vector of ±1, its squared norm and its largest magnitude.

    Args:
        number: chooses the vector; the same on every rank.
    """
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
    projection = square = largest = 0.0
    for chunk_number, chunk in enumerate(flat.split(CHUNK)):
        values = chunk.to("cpu").to(torch.float64)
        if not len(values):
            continue
        projection += float(values @ _signs(number, chunk_number, len(values)))
        square += float(values @ values)
        largest = max(largest, float(values.abs().amax()))
        if not math.isfinite(square):
            largest = math.inf  # a maximum forgets NaN
    return projection, square, largest


def _signs(number: int, chunk: int, count: int) -> torch.Tensor:
    """Return [count] numbers of 1 and -1; NumPy keeps this generator's raw stream for good."""
    source = np.random.Philox(np.random.SeedSequence([number, chunk]))
    words = np.atleast_1d(source.random_raw(-(-count // 64))).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8))[:count]
    return torch.from_numpy(bits).to(torch.float64) * 2.0 - 1.0


def _distance(first: list[float], second: list[float]) -> float:
    """Return the estimated distance of two tensors, relative to the larger norm."""
    finite = [all(map(math.isfinite, values)) for values in (first, second)]
    if not all(finite):
        return 0.0 if finite[0] == finite[1] else math.inf
    norm = math.sqrt(max(first[1], second[1]))
    distance = max(abs(first[0] - second[0]) / SPREAD, abs(first[2] - second[2]))
    return distance / norm if norm else 0.0
