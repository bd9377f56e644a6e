"""Trial passes over a few samples that leave the model as it was.

Before the ranks train, one of them tries the first samples for all: what does not fit is one sentence.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hetexp.core.call import call_model
from hetexp.core.errors import ConfigError, HetexpError, logged, must_be
from hetexp.core.plan import Plan
from hetexp.data.base import indexed, same_shape
from hetexp.data.collate import Pad
from hetexp.data.samples import Collate, describe, read
from hetexp.hardware.emulation.pacing import tensors
from hetexp.hardware.memory.out_of_memory import is_out_of_memory
from hetexp.model.base import WithAuxiliary
from hetexp.model.first_call import as_before
from hetexp.training.loss import (
    IndicesChecked,
    LabelError,
    Loss,
    ModelLoss,
    TokenError,
    count_of,
    placed,
    single_losses,
    summed,
)

ROUNDING = 1e-5
"""Largest relative difference of a loss with and without padding that is taken for rounding."""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Let the block use the model in training mode; restore its buffers, modes and the CPU's generator."""
    with as_before(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
        model.train()
        yield


def normalise_alone(model: nn.Module) -> None:
    """Let batch norms use their running statistics, so that a sample's result does not depend on others."""
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.eval()


def try_out(model: nn.Module, inputs: Any) -> list[Tensor | None]:
    """Run forward and backward once; the model's own hooks do not run, and no gradient is kept.

    Returns:
        The gradients of the trained parameters, `None` for unused ones.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    output = call_model(model.forward, inputs)
    sums = [t.sum() for t in tensors(output) if t.requires_grad]
    if not sums:
        return [None] * len(trained)
    total = torch.stack([s.real if s.is_complex() else s for s in sums]).sum()
    return list(torch.autograd.grad(total, trained, allow_unused=True))


def used_parameters(model: nn.Module, inputs: Any) -> list[nn.Parameter]:
    """Return the trained parameters that a pass over these inputs gives a gradient."""
    with undisturbed(model):
        gradients = try_out(model, inputs)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p for p, gradient in zip(trained, gradients, strict=True) if gradient is not None]


def first_batch(dataset: Dataset[Any], collate: Collate, plan: Plan) -> tuple[Any, Any]:
    """Return the batch of the first two samples, or of the only one.

    Raises:
        ConfigError: the samples cannot be read or are no batch, or a device of the plan needs samples of one
            shape.
    """
    indices = range(min(2, len(dataset)))  # type: ignore[arg-type]  # map-style, as build_data checked
    with _named("`data` must give its first samples, but fails"):
        samples = read(dataset, indices)
    with _named(f"`data.collate` must make a batch of the first samples {describe(samples)}, but fails"):
        pair = collate(samples)
    batch = pair if collate.has_rows else collate.with_indices(pair, indices, dataset)
    if plan.stages or plan.paced:
        problem = _shape_problem(collate, dataset, batch, "a pipeline" if plan.stages else "emulated devices")
        if problem:
            raise ConfigError(problem)
    return batch


def first_samples(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return data whose first two samples have indices, in the shape of all others if they can.

    Raises:
        ConfigError: a stream fails before it has given them.
    """
    with _named("`data` must give its first samples, but fails"):
        return indexed(same_shape(dataset), 2)


@contextmanager
def _named(problem: str) -> Iterator[None]:
    """Make a sentence of an error of the user's own code.

    Raises:
        ConfigError: the problem, the error's class and first line, and where it was raised.
    """
    try:
        yield
    except HetexpError:
        raise
    except Exception as error:
        raise ConfigError(f"{problem}: {_reason(error)}") from error


def _shape_problem(collate: Collate, dataset: Dataset[Any], batch: tuple[Any, Any], who: str) -> str:
    """Return why a run that needs samples of one shape cannot have these."""
    if collate.one_shape:
        return ""
    if isinstance(collate.function, Pad):
        return must_be("data.collate.length", f"given for {who}: all batches must have one shape", None)
    name = getattr(collate.function, "__name__", type(collate.function).__name__)
    rows, last = _first(batch), min(2, len(dataset)) - 1  # type: ignore[arg-type]
    shapes = [_first(collate.load(dataset, [place])).shape for place in (0, last)]
    if collate.is_own and len(rows) == last + 1 and all(s == (1, *rows.shape[1:]) for s in shapes):
        return ""
    accepted = f"null, pad with a length, or a function whose batches have a row a sample, for {who}"
    return must_be("data.collate", accepted, name)


def _first(batch: tuple[Any, Any]) -> Tensor:
    """Return the first tensor of the inputs, an empty one if there is none."""
    return next((tensor for tensor in tensors(batch[0]) if tensor.dim()), torch.empty(0))


@dataclass(frozen=True)
class Tried:
    """What the trial has shown, which all ranks take over."""

    seen_dims: list[int | None] = field(default_factory=list)
    """`Loss.seen_dim` after it, of each term."""
    remarks: list[str] = field(default_factory=list)
    """Sentences for the user."""
    on_copy: bool = True
    """Whether the model itself has not noticed."""


@dataclass(frozen=True)
class Trial:
    """One forward pass and one loss of the first samples, before the ranks train.

    The rank that tries must go on as all others do, which know nothing of it. So a copy of the model is
    tried if it can be copied.
    """

    model: nn.Module
    loss: Loss
    """Only for the trial: a loss of the user's own may count its calls."""
    collate: Collate
    move: Callable[[Any], Any]
    """Moves inputs or targets to the model's device."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Returns the context of passes."""

    def run(self, dataset: Dataset[Any], batch: tuple[Any, Any]) -> Tried:
        """Try a batch of the first samples of a data set; running out of memory is no problem of theirs.

        Raises:
            ConfigError: the model does not take the inputs, or the loss cannot be computed of its output.
        """
        inputs, targets = batch
        model, remarks = _twin(self.model), []
        samples = range(min(2, len(dataset)))  # type: ignore[arg-type]  # map-style, as `indexed` is
        try:
            with undisturbed(model):
                if len(_first(batch)) < 2:
                    model.eval()  # normalising over a batch refuses a single sample
                with self.autocast():
                    try:
                        output = self._output(model, inputs)
                    except (LabelError, TokenError) as error:
                        raise self._placed(error, model, dataset, samples) from None
                    self._lost(output, targets, len(samples))
                if isinstance(self.collate.function, Pad):
                    remarks = self._check_padding(model, read(dataset, samples))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        seen_dims = [loss.seen_dim for loss in single_losses(self.loss)]
        return Tried(seen_dims, remarks, on_copy=model is not self.model)

    def _output(self, model: nn.Module, inputs: Any) -> Any:
        try:
            with IndicesChecked():
                return call_model(model, self.move(inputs))
        except HetexpError:
            raise
        except Exception as error:  # the user's own model runs any code
            if is_out_of_memory(error):
                raise
            raise ConfigError(self._refused(inputs, error)) from error

    def _placed(
        self, error: LabelError | TokenError, model: nn.Module, dataset: Dataset[Any], samples: range
    ) -> Exception:
        """Return the error of an index that is out of range, with the place of its sample."""
        normalise_alone(model)
        load = self.collate.load
        return placed(error, samples, lambda sample: call_model(model, self.move(load(dataset, [sample])[0])))

    def _refused(self, inputs: Any, error: Exception) -> str:
        """Return why the model does not take the inputs."""
        kind, shown = type(self.model), describe(inputs)
        signature = inspect.signature(self.model.forward)
        arguments = ", ".join(map(str, signature.parameters.values()))
        call = f"{kind.__module__}.{kind.__qualname__}.forward({arguments})"
        try:
            signature.bind(**inputs) if isinstance(inputs, dict) else signature.bind(inputs)
        except TypeError as unbound:
            if isinstance(inputs, dict) and not self.collate.has_keys:
                return f"{_no_targets(inputs)} All of them go to {call}: {unbound}."
            fix = "A list gives parts of a sample by name, a single name the part alone."
            accepted = f"such that {call} takes what it gives"
            return f"`data.inputs` must be {accepted}, but it gives {shown}: {unbound}. {fix}"
        fails = f"{call} fails with {shown}"
        return f"`model` must take the inputs of the data, but {fails}: {_reason(error)}"

    def _lost(self, output: Any, targets: Any, num_samples: int) -> None:
        plain = output.output if isinstance(output, WithAuxiliary) else output
        unnamed = isinstance(targets, Mapping) and self.collate.targets is None
        unnamed = unnamed and not isinstance(self.loss, ModelLoss)  # which gets the whole sample
        loss = self.loss.for_samples(num_samples)
        try:
            count_of(loss, targets)
            self.loss.check(plain, targets)  # before a card reads them, whose own check ends the process
            summed(loss, output, self._moved(targets))
        except LabelError as error:
            raise error.in_samples([(None, targets)], [[0, 1]]) from None
        except Exception as error:  # the user's own loss runs any code
            if is_out_of_memory(error) or (isinstance(error, HetexpError) and not unnamed):
                raise
            if unnamed:
                raise ConfigError(_no_targets(targets)) from error
            shown = f"outputs {describe(plain)} and targets {describe(targets)}"
            name = type(self.loss).__qualname__
            sentence = f"`trainer.loss` {name} cannot be computed of {shown}: {_reason(error)}"
            raise ConfigError(sentence) from error

    def _moved(self, targets: Any) -> Any:
        return targets if self.loss.targets_on_host else self.move(targets)

    def _check_padding(self, model: nn.Module, samples: list[Any]) -> list[str]:
        """Return a remark if a sample's loss depends on the padding beside it, as devices share a batch."""
        model.eval()  # without dropout and without statistics over the batch
        losses = []
        with torch.no_grad():
            for batch in (samples, *([sample] for sample in samples)):
                inputs, targets = self.collate(batch)
                output = call_model(model, self.move(inputs))
                loss = self.loss.for_samples(len(batch))
                losses.append(float(summed(loss, output, self._moved(targets))))
        together, *alone = losses
        if abs(together - sum(alone)) <= ROUNDING * max(abs(together), sum(map(abs, alone))):
            return []
        return [
            f"padding changes the loss: that of the first {len(samples)} samples is {together:.6g} in one "
            f"batch and {sum(alone):.6g} alone. So it depends on how devices share a batch. The model must "
            "leave out padded elements (data.collate.mask), and the loss padded targets."
        ]


def _twin(model: nn.Module) -> nn.Module:
    """Return a copy with the same parameters and buffers, so that a trial leaves a model's counters alone.

    A model that cannot be copied is returned itself.
    """
    shared = [*model.parameters(), *model.buffers()]
    with logged("the model itself is tried, as it cannot be copied"):  # locks, files, tensors of a graph
        return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    return model


def _no_targets(sample: Mapping[str, Any]) -> str:
    accepted = f"the name of the part of a sample that the loss gets ({', '.join(map(str, sample))})"
    return must_be("data.targets", accepted, None)


def _reason(error: Exception) -> str:
    """Return an error's class and first line, and the line of the user's code that raised it."""
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(".: ")
    own = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    own = [f for f in own if Path(__file__).parents[2] not in Path(f.filename).parents]
    return f"{text} ({Path(own[-1].filename).name}, line {own[-1].lineno})." if own else f"{text}."
