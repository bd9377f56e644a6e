"""The error of a label that is no class, or of a token without embedding, with its place in the data."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hetexp.core.errors import ConfigError

log = logging.getLogger(__name__)


class LabelError(ConfigError):
    """A label is no class of the model's output.

    Args:
        wanted: returns the labels of a microbatch's targets; `None`: only the model knows them.
        num_classes: of the output.
        ignored: label that does not count.
        label: the wrong one.
        sample: its place in the data, if that is known.
    """

    def __init__(
        self,
        wanted: Callable[[Any], torch.Tensor] | None,
        num_classes: int,
        ignored: int,
        label: int,
        sample: int | None = None,
    ) -> None:
        self._wanted, self._num_classes, self._ignored, self._label = wanted, num_classes, ignored, label
        super().__init__(
            f"`data` labels must be from 0 to {num_classes - 1}, as the model's output has {num_classes} "
            f"classes, or {ignored} if they do not count, but {_which(sample)} is {label} instead."
        )

    def of(self, sample: int) -> LabelError:
        """Return the error with the sample's place in the data."""
        return LabelError(self._wanted, self._num_classes, self._ignored, self._label, sample)

    def in_samples(self, microbatches: Sequence[Any], indices: Sequence[Sequence[int]]) -> LabelError:
        """Return the error with the place of the first wrong label in these microbatches, if one has it."""
        if self._wanted is None:
            return self
        for (_, targets), places in zip(microbatches, indices, strict=False):
            labels = self._wanted(targets)
            wrong = wrong_labels(labels, self._num_classes, self._ignored)
            rows = wrong.reshape(len(labels), -1).any(1).nonzero()
            if len(rows) and int(rows[0]) < len(places):
                label = int(labels[wrong][0])
                place = places[int(rows[0])]
                return LabelError(self._wanted, self._num_classes, self._ignored, label, place)
        return self


class TokenError(ConfigError):
    """A token, or another index, has no embedding in the model."""

    def __init__(self, num_embeddings: int, token: int, sample: int | None = None) -> None:
        self._num_embeddings, self._token = num_embeddings, token
        super().__init__(
            f"`data` tokens must be from 0 to {num_embeddings - 1}, as the model embeds {num_embeddings} of "
            f"them, but {_which(sample)} is {token} instead."
        )

    def of(self, sample: int) -> TokenError:
        """Return the error with the sample's place in the data."""
        return TokenError(self._num_embeddings, self._token, sample)


class IndicesChecked(TorchFunctionMode):
    """Checks the labels and tokens that a model's own code hands to torch, before a kernel reads them.

    A kernel of a card fails without a word about them, and no later call on the card succeeds. The check
    waits for the device: it is for trials, not for steps.

    Raises:
        LabelError: `cross_entropy` or `nll_loss` gets a label that is no class.
        TokenError: `embedding` gets an index beyond its weights.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        check = None if torch.compiler.is_compiling() else _CHECKS.get(func)
        if check is not None:
            with suppress(TypeError):  # of arguments that the function itself refuses
                check(inspect.signature(func).bind(*args, **given).arguments)
        return func(*args, **given)


def placed(
    error: LabelError | TokenError, samples: Iterable[int], run: Callable[[int], Any]
) -> LabelError | TokenError:
    """Return the error with the place of the first sample that has it alone.

    Args:
        samples: places in the data.
        run: calls the model with one of them.
    """
    for sample in samples:
        try:
            with IndicesChecked():
                run(sample)
        except (LabelError, TokenError) as found:
            return found.of(sample)
        except Exception as refused:  # the model's code refuses a single sample
            log.debug("a sample alone was not checked: %r", refused)
    return error


def wrong_labels(labels: torch.Tensor, num_classes: int, ignored: int) -> torch.Tensor:
    """Return which labels are no class, in the labels' shape."""
    return ((labels < 0) | (labels >= num_classes)) & (labels != ignored)


def _check_labels(given: Mapping[str, Any]) -> None:
    scores, labels, ignored = given["input"], given["target"], given.get("ignore_index", -100)
    if labels.is_floating_point() or labels.is_meta:  # probabilities, or only memory is estimated
        return
    num_classes = scores.shape[1 if scores.ndim > 1 else 0]
    wrong = wrong_labels(labels, num_classes, ignored)
    if bool(wrong.any()):
        raise LabelError(None, num_classes, ignored, int(labels[wrong][0]))


def _check_tokens(given: Mapping[str, Any]) -> None:
    tokens, num_embeddings = given["input"], len(given["weight"])
    if tokens.is_floating_point() or tokens.is_meta:
        return
    wrong = (tokens < 0) | (tokens >= num_embeddings)
    if bool(wrong.any()):
        raise TokenError(num_embeddings, int(tokens[wrong][0]))


_CHECKS: dict[Callable[..., Any], Callable[[Mapping[str, Any]], None]] = {
    functional.cross_entropy: _check_labels,
    functional.nll_loss: _check_labels,
    functional.embedding: _check_tokens,
}


def _which(sample: int | None) -> str:
    return "one" if sample is None else f"that of training sample {sample}"
