"""Names the label or the token out of range that broke off a step, in the place of torch's own words."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hetexp.core.call import call_model
from hetexp.core.errors import HetexpError
from hetexp.data.loader import LocalBatch
from hetexp.torch_private import tree_leaves
from hetexp.training.loss import IndicesChecked, LabelError, TokenError, placed
from hetexp.training.nonfinite.samples import MOST_NAMED
from hetexp.training.nonfinite.search import for_single_samples
from hetexp.training.recovery.oom_recovery import part_of
from hetexp.training.state import TrainState

log = logging.getLogger(__name__)

ASSERTION = "device-side assert"
"""Part of the error of CUDA and HIP after a kernel has failed an assertion."""


class DeviceAssertError(HetexpError):
    """A kernel of the device has failed an assertion, which says nothing about the cause."""


def named(error: LabelError | IndexError, state: TrainState, batch: LocalBatch) -> Exception:
    """Return an error that names the sample whose label or token broke off a step of this batch.

    If none is out of range, it is the error itself.
    """
    if isinstance(error, LabelError):
        return error.in_samples(batch.microbatches, batch.indices)
    return _wrong_index(state, batch) or error


def _wrong_index(state: TrainState, batch: LocalBatch) -> LabelError | TokenError | None:
    """Return the error of an index out of range in this rank's samples of a step that has failed.

    The model runs again over them, with no exchange; on a CPU, since a card does not go on after such an
    index.

    Returns:
        `None` if no index is out of range, or no rank has the whole model.
    """
    if not state.engine.computes_loss:
        return None
    with torch.no_grad(), for_single_samples(state), state.autocast():
        for microbatch, places in zip(batch.microbatches, batch.indices, strict=False):
            try:
                with IndicesChecked():
                    _run(state, microbatch)
            except (LabelError, TokenError) as error:
                parts = {place: (microbatch, n, n + 1) for n, place in enumerate(places)}
                return placed(error, places, lambda place: _run(state, part_of(*parts[place])))  # noqa: B023
            except Exception as error:  # that of the step, whatever it is: it is raised
                log.debug("no wrong index was looked for: %r", error)
                return None
    return None


def _run(state: TrainState, microbatch: Any) -> None:
    call_model(state.model, state.to_device(microbatch[0]))


def explained(error: Exception, state: TrainState, step: int, batch: LocalBatch | None) -> Exception:
    """Return the error, or a sentence in place of a card's failed assertion.

    Args:
        step: number of steps done.
        batch: of this rank, the last one that it has begun.
    """
    if not isinstance(error, RuntimeError) or ASSERTION not in str(error):
        return error
    when = f"in step {step + 1} or just before it" if state.doing == "steps" else f"after step {step}"
    return DeviceAssertError(
        f"A kernel of the device has failed an assertion ({ASSERTION}) {when}.{_samples(batch)} The probable "
        "cause is an index out of range: a label that is no class of the model, or a token without "
        "embedding. The same run on a CPU (hardware=cpu) names it, and with the environment variable "
        "CUDA_LAUNCH_BLOCKING=1 the log shows the line."
    )


def _samples(batch: LocalBatch | None) -> str:
    """Return a sentence about the samples of the batch and their labels, read on the host."""
    places = [place for part in batch.indices for place in part] if batch is not None else []
    if batch is None or not places:
        return ""
    more = f" and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
    listed = ", ".join(map(str, places[:MOST_NAMED]))
    leaves = (leaf for _, targets in batch.microbatches for leaf in tree_leaves(targets))
    labels = [t for t in leaves if isinstance(t, torch.Tensor) and _is_label(t)]
    least, most = (
        min((int(t.min()) for t in labels), default=0),
        max((int(t.max()) for t in labels), default=0),
    )
    of_labels = f", with labels from {least} to {most}" if labels else ""
    return f" The rank had training samples {listed}{more}{of_labels}."


def _is_label(tensor: torch.Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return whole and tensor.device.type == "cpu" and tensor.numel() > 0
