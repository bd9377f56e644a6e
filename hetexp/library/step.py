"""One optimizer step of a script: it combines the batches, calls and backward passes of the script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from hetexp.comm.communicator import Communicator
from hetexp.core.errors import UsageError, must_be
from hetexp.data.loader import LocalBatch
from hetexp.hardware.emulation.pacing import tensors
from hetexp.library.front import Call, keeping_statistics
from hetexp.library.gather import gathered
from hetexp.torch_private import scale_all_, tree_map_only
from hetexp.training.loss import as_count
from hetexp.training.measuring.timer import StepTimer
from hetexp.training.nonfinite.loss_scale import widened
from hetexp.training.normalizer import LossNormalizer
from hetexp.training.state import TrainState

Count = float | torch.Tensor
Terms = Sequence[tuple[torch.Tensor, Count]]
"""Losses, each a mean over a count of its own."""
Reduction = Literal["mean", "sum"]


class ScriptStep:
    """A step under way: its local batch, one microbatch after another.

    The counts of the later microbatches are unknown at the first backward pass. So backward runs on sums of
    losses, and the exchanged gradient is multiplied by the normaliser's factor at the end.

    A rank without samples gets a stand-in sample, so that the script's loop runs as on any other rank: the
    model learns nothing from it, the loss is ignored, and gradients of zero take part in the exchange. So
    does a rank with fewer microbatches than others if all ranks must run equally many passes.
    """

    def __init__(
        self, state: TrainState, normalizer: LossNormalizer, meter: StepTimer, batch: LocalBatch
    ) -> None:
        self._state, self._normalizer, self._meter = state, normalizer, meter
        self.batch = batch
        self._rows = state.pass_sizes(batch.local_samples)
        self._num_passes = 1
        self.count_passes()
        self._number = -1
        self._called = self._backward_done = self._has_gradient = False
        self._start: Any = None
        self._outputs: list[Any] = []
        self._gathered: list[torch.Tensor] = []
        self.loss_sum = torch.zeros((), dtype=state.dtype, device=state.device)
        self.count: float = 0
        """Elements that this rank's loss is the mean of, so far."""
        self.global_count: float = 0
        self._factor: float | None = None
        """The normaliser's factor, if it is known before backward."""

    @property
    def rows(self) -> int:
        """Samples of the microbatch; 0 for a stand-in, which does not count."""
        return self._rows[self._number] if self._number < len(self._rows) else 0

    @property
    def is_last(self) -> bool:
        return self._number == self._num_passes - 1

    @property
    def is_over(self) -> bool:
        """Whether the parameters hold the gradient of the whole batch."""
        return self.is_last and self._backward_done

    def count_passes(self) -> None:
        """Set this rank's number of passes, once the strategy is attached to the group."""
        self._num_passes = max(1, len(self._rows), self._state.num_passes(self.batch.counts))

    def next_microbatch(self, stand_in: Callable[[], Any]) -> Any:
        """Begin the next microbatch and return it, or a stand-in if this rank has none."""
        self._number += 1
        self._called = self._backward_done = False
        self._start = None
        self._outputs.clear()
        self._gathered.clear()
        return self.batch.microbatches[self._number] if self.rows else stand_in()

    @property
    def has_backward(self) -> bool:
        """Whether `backward` was called for the microbatch."""
        return self._backward_done

    def check_backward_done(self) -> None:
        """Check that `backward` was called for the microbatch.

        Raises:
            UsageError: it was not.
        """
        if not self._backward_done:
            raise UsageError(
                "Each batch of run.batches() must have its run.backward(loss) before the next one comes, but "
                "one had none. The other devices wait for its gradient: do not `continue` before it."
            )

    def check_inputs(self, call: Call) -> None:
        """Raise a `UsageError` if the model gets a key of a batch that is a dict instead of a value."""
        batch = self.batch.microbatches[self._number] if self.rows else None
        if isinstance(batch, Mapping) and any(isinstance(value, str) and value in batch for value in call[0]):
            raise UsageError(
                f"run.model must get values of the batch, but gets a key: the batch is a dict with "
                f"{', '.join(batch)}. Write: for batch in run.batches(): output = run.model(**batch)."
            )

    def call(self, call: Call) -> Any:
        """Call the model in a training pass."""
        state = self._state
        self._called = True
        if self._start is None:
            self._start = state.backend.mark()
        with self._accumulating(), state.autocast():
            output = widened(state.module(call if self.rows else None))
        self._outputs.append(output)
        if self.rows:
            return output
        args, kwargs = call
        with keeping_statistics(state.model), state.autocast():
            output = widened(state.model(*args, **kwargs))
        # As on the other ranks, what is computed from them has gradients.
        return tree_map_only(torch.Tensor, _leaf, output)

    def gather(self, features: torch.Tensor, communicator: Communicator) -> torch.Tensor:
        """Return the features of the whole batch (`Run.gather`)."""
        self._check_gather(features)
        rows = features[: self.rows]  # of a stand-in none
        everything = gathered(rows, self.batch.counts, communicator, self._state.backend.waiting)
        if everything.requires_grad:
            self._gathered.append(everything)
        return everything

    @property
    def own_rows(self) -> slice:
        """This rank's rows in the whole batch."""
        start = sum(self.batch.counts[: self._state.rank])
        return slice(start, start + self.batch.local_samples)

    def _check_gather(self, features: Any) -> None:
        if self._passes_of_all_ranks() > 1:
            raise UsageError(
                "run.gather must see the whole batch at once, but a device takes its part in several "
                "microbatches. Set accumulate=1, no microbatch_size, or a smaller global_batch_size."
            )
        if not isinstance(features, torch.Tensor) or features.ndim == 0:
            kind = "a number" if isinstance(features, torch.Tensor) else type(features).__name__
            raise UsageError(f"run.gather must get a tensor with a row for each sample, but got {kind}.")
        if self.rows and len(features) != self.rows:
            raise UsageError(
                f"run.gather must get a row for each of the {self.rows} samples of this batch, but got "
                f"{len(features)}."
            )

    def backward(self, loss: torch.Tensor | Terms, count: Count | None, reduction: Reduction) -> None:
        """Run backward from the microbatch's loss; after the last one, exchange and scale the gradient."""
        if not isinstance(loss, torch.Tensor) and isinstance(loss, Sequence):
            self._backward_terms(loss, count, reduction)
            return
        self._check_call()
        self._check_loss(loss, reduction)
        given = self.rows if count is None else as_count(count)
        if given is None:
            raise UsageError(must_be("count", "a finite number from 0 on", count))
        if self.rows:  # a stand-in does not count as this device's work
            self._meter.span(self._start, self._state.backend.mark())
        counted = given if self.rows else 0
        self.count += counted
        if self.is_last:
            self._normalizer.start(self.count)
        if counted:
            total, weight = widened(loss).sum(), counted if reduction == "mean" else 1
            self.loss_sum += (total.detach() * weight).to(self.loss_sum)
            if self._num_passes == 1 and self._state.communicator.world_size == 1:
                # No count is missing: the loss takes the factor, for which all gradients would be read.
                factor, self.global_count = self._normalizer.factor()
                weight, self._factor = weight * factor, 1.0
            self._outputs.clear()  # backward does not need them, and logits may be a step's largest tensors
            self._backward(total * weight)
        else:
            self._backward_zeros()
        self._end_backward()

    def _backward_terms(self, terms: Terms, count: Count | None, reduction: Reduction) -> None:
        """Run backward from Σ S_k × N / N_k, whose gradient ÷ N is that of the sum of the means.

        S_k is a loss's sum over this rank's elements, N_k its count and N the samples of the whole batch.
        """
        self._check_call()
        counts = self._counts_of(terms, count, reduction)
        if self.rows:
            self._meter.span(self._start, self._state.backend.mark())
        local = counts if self.rows else [0.0] * len(counts)
        self.count = self.rows
        self._normalizer.start(self.count, local)
        self._factor, self.global_count = self._normalizer.factor()
        samples, all_counts = self._normalizer.term_counts
        sums = [
            widened(loss).sum() * (own * samples / of_all)
            for (loss, _), own, of_all in zip(terms, local, all_counts, strict=True)
            if own  # else it may be NaN, as the mean over nothing is
        ]
        if sums:
            total = torch.stack(sums).sum()
            self.loss_sum += total.detach().to(self.loss_sum)
            # The layers of a loss that does not count here take part in the exchange, too.
            self._backward(torch.stack([total, *self._zeros()]).sum() if len(sums) < len(terms) else total)
        else:
            self._backward_zeros()
        self._end_backward()

    def _end_backward(self) -> None:
        self._outputs.clear()
        self._gathered.clear()
        self._backward_done = True
        if self.is_last:
            self._state.strategy.check_exchanged(self._state.module)
            self._scale()

    def _backward(self, total: torch.Tensor) -> None:
        with self._accumulating():
            self._meter.backward(total)
        self._has_gradient = True

    def _backward_zeros(self) -> None:
        """Run backward with zeros, since the mean over no samples is NaN, and so are its gradients.

        The zeros go through the model, in which ranks may wait for each other. They start from its finite
        outputs: a loss that the model itself computes is NaN here.
        """
        if zeros := self._zeros():
            self._backward(torch.stack(zeros).sum())
        elif self.is_last:
            trained = [p for p in self._state.model.parameters() if p.requires_grad]
            self._state.strategy.abort_exchange(self._state.module, trained, 0.0)

    def _zeros(self) -> list[torch.Tensor]:
        """Return zeros of the model's finite outputs and of all that was gathered."""
        finite = [t for t in tensors(self._outputs) if t.requires_grad and bool(t.isfinite().all())]
        # All of what was gathered, as the other ranks wait for it; its gradient here is 0, whatever it holds.
        return [(t * 0.0).sum() for t in (*finite, *self._gathered)]

    def _scale(self) -> None:
        """Multiply the exchanged gradient by W / N, so that it is that of the mean over the whole batch."""
        factor = self._factor
        if factor is None:
            factor, self.global_count = self._normalizer.factor()
        if factor == 1.0:
            return
        gradients = [p.grad for p in self._state.parameters if p.grad is not None]
        if dense := [g for g in gradients if not g.is_sparse]:
            scale_all_(dense, factor)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(factor)

    def _accumulating(self) -> AbstractContextManager[None]:
        return nullcontext() if self.is_last else self._state.strategy.accumulate(self._state.module)

    def _counts_of(self, terms: Terms, count: Count | None, reduction: str) -> list[float]:
        """Return the count of each loss, as the caller has given it.

        Raises:
            UsageError: the losses or their counts cannot be used.
        """
        pairs = all(isinstance(term, (tuple, list)) and len(term) == 2 for term in terms)
        if not terms or not pairs or count is not None or reduction != "mean":
            raise UsageError(
                "run.backward must get several losses as pairs, each a mean with its own count: "
                "run.backward([(loss_a, count_a), (loss_b, count_b)])."
            )
        if self._passes_of_all_ranks() > 1:
            raise UsageError(
                "run.backward must see the whole batch at once if it gets several losses, but a device takes "
                "its part in several microbatches. Set accumulate=1, no microbatch_size, or a smaller "
                "global_batch_size."
            )
        counts = []
        for loss, given in terms:
            number = as_count(given)
            if number is None:
                raise UsageError(must_be("count", "a finite number from 0 on", given))
            if number:
                self._check_loss(loss, reduction)
            counts.append(number)
        return counts

    def _passes_of_all_ranks(self) -> int:
        """Return the most microbatches that a rank takes its part of the batch in."""
        state, counts = self._state, self.batch.counts
        passes = (len(state.pass_sizes(count, rank)) for rank, count in enumerate(counts))
        return max(passes, default=1)

    def _check_call(self) -> None:
        if self._backward_done:
            raise UsageError("run.backward must be called once for each batch, but is called again.")
        if not self._called:
            raise UsageError(
                "run.backward must get a loss of what run.model(…) returned for this batch, but run.model "
                "was not called: gradients of the model itself are not exchanged."
            )
        if self._has_gradient and all(p.grad is None for p in self._state.parameters):
            raise UsageError(
                "The gradient of a step's first microbatches must be kept, but was cleared: call "
                "optimizer.zero_grad() only if run.step_due is true."
            )

    def _check_loss(self, loss: torch.Tensor, reduction: str) -> None:
        if reduction not in ("mean", "sum"):
            raise UsageError(must_be("reduction", "mean or sum", reduction))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(
                f"run.backward must get the loss as a tensor of one element, but its shape is {shape}. Give "
                "loss.mean(), or loss.sum() with reduction='sum'."
            )
        if self.rows and not loss.requires_grad:
            raise UsageError("run.backward must get a loss that depends on what run.model(…) returned.")


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
