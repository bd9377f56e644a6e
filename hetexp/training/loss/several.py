"""A sum of several losses with factors, each a mean over a count of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetexp.training.loss.base import Loss, count_of, num_rows, summed
from hetexp.training.loss.parts import Key, part


@dataclass(frozen=True)
class Term:
    """One loss of a sum."""

    loss: Loss
    factor: float
    output: Key | None
    """The part of the model's output that the loss gets; `None`: all of it."""
    target: Key | None

    def total(self, output: Any, targets: Any) -> torch.Tensor:
        """Return the sum over these elements, without the factor."""
        if self.output is not None:
            output = part(output, self.output, "loss.terms")
        return summed(self.loss, output, self.of(targets))

    def count(self, targets: Any) -> float:
        return count_of(self.loss, self.of(targets))

    def of(self, targets: Any) -> Any:
        """Return the part of the targets that the loss gets."""
        return targets if self.target is None else part(targets, self.target, "loss.terms")


class WeightedSum(Loss):
    """Σ factor × mean, with the mean of each term over its own elements in the whole batch.

    The sum over some samples is Σ factor × S_k × N / N_k: S_k is the term's sum over them, N_k its count in
    the whole batch, and N the batch's samples. Divided by N, it adds up to the sum of the means.

    Args:
        terms: each term by name.
    """

    takes_half = True

    def __init__(self, terms: Mapping[str, Term]) -> None:
        self._terms = list(terms.values())
        self.num_terms = len(self._terms)
        self._global: tuple[float, Sequence[float]] = (0, ())
        self._num_samples: int | None = None
        """Of a microbatch; `None`: as many as the targets have rows."""

    @classmethod
    def of(
        cls, terms: Mapping[str, Mapping[str, Any]], build: Callable[[str, Mapping[str, Any]], Loss]
    ) -> WeightedSum:
        """Return the sum that `loss.terms` describes.

        Args:
            build: returns the loss of a name and arguments.
        """

        def term(loss: str, factor: float = 1.0, output: Any = None, target: Any = None, **more: Any) -> Term:
            return Term(build(loss, more), factor, output, target)

        return cls({name: term(**given) for name, given in terms.items()})

    def for_samples(self, num_samples: int | None) -> WeightedSum:
        if not num_samples:
            return self
        loss = copy.copy(self)
        loss._num_samples = num_samples
        loss._terms = [replace(term, loss=term.loss.for_samples(num_samples)) for term in self._terms]
        return loss

    def count(self, targets: Any) -> int:
        return self._num_samples or num_rows(targets)

    def counts(self, targets: Any) -> torch.Tensor:
        return torch.ones(self.count(targets), dtype=torch.int64)

    def term_counts(self, targets: Any) -> list[float]:
        return [term.count(targets) for term in self._terms]

    def set_global_counts(self, count: float, term_counts: Sequence[float]) -> None:
        self._global = count, term_counts

    def total(self, output: Any, targets: Any) -> torch.Tensor:
        totals = [term.total(output, targets) for term in self._terms]
        if totals[0].is_meta:  # only memory is estimated
            return torch.stack([total.to(totals[0].dtype) for total in totals]).sum()
        count, counts = self._global
        if not count:
            count, counts = self.count(targets), self.term_counts(targets)
        factors = [
            term.factor * count / of_term if of_term else 0.0
            for term, of_term in zip(self._terms, counts, strict=True)
        ]
        device = totals[0].device
        parts = [total.to(device) * factor for total, factor in zip(totals, factors, strict=True)]
        return torch.stack([value.to(parts[0].dtype) for value in parts]).sum()

    def check(self, output: Any, targets: Any) -> None:
        for term in self._terms:
            picked = output if term.output is None else part(output, term.output, "loss.terms")
            term.loss.check(picked, term.of(targets))

    def sums(self, output: Any, targets: Any) -> list[float]:
        return [float(term.total(output, targets).detach()) for term in self._terms]

    def mean(self, sums: Sequence[float], count: float, term_counts: Sequence[float]) -> float:
        if not any(term_counts):
            return math.nan
        means = [total / number if number else 0.0 for total, number in zip(sums, term_counts, strict=True)]
        return sum(term.factor * mean for term, mean in zip(self._terms, means, strict=True))


def single_losses(loss: Loss) -> list[Loss]:
    """Return the losses of a sum's terms, or the loss itself if it is no sum."""
    if not isinstance(loss, WeightedSum):
        return [loss]
    return [single for term in loss._terms for single in single_losses(term.loss)]
