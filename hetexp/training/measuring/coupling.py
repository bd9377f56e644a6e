"""Finds out whether a loss is a sum over samples, as every split of a batch needs it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from hetexp.core.call import call_model
from hetexp.core.config import Config
from hetexp.core.errors import logged
from hetexp.data.base import build_data, indexed, same_shape
from hetexp.data.collate import Pad
from hetexp.data.page_locked import on_device
from hetexp.hardware.emulation.pacing import tensors
from hetexp.model.base import build_model
from hetexp.model.dropout import without_dropout
from hetexp.training.loss import Loss, batch_counts, build_loss, summed
from hetexp.training.measuring.trial_pass import normalise_alone
from hetexp.training.seeding import seeded

SAMPLES = 6
CUT = 4
"""Samples of the first of the two parts."""
PADDED = (
    "Samples are padded to the longest of a batch: a model that does not leave out padded elements, by a "
    "mask (data.collate.mask), couples them."
)
ALLOWED = 1e-9
"""Largest relative difference that rounding may make in float64."""


def coupling(config: Config) -> str | None:
    """Return a sentence if the loss of some samples depends on other samples of the batch.

    It compares the loss of a few training samples with the sum over two parts of them, in float64 on the CPU,
    without dropout, and with BatchNorm's running statistics: those layers couple samples, but exactly.

    Returns:
        `None` also if it cannot be found out.
    """
    with logged("whether the loss is a sum over samples is not found out", logging.INFO):
        with seeded(config.trainer.seed):
            data = build_data(config.data, config.loss.ignored())
            model = build_model(config.model, data.facts).double().train()
            train = indexed(same_shape(data.train), SAMPLES)
            bounds = ((0, SAMPLES), (0, CUT), (CUT, SAMPLES))
            batches = [tuple(data.collate.load(train, range(*ends))) for ends in bounds]
        loss = build_loss(config.trainer.loss, config.loss.arguments())
        found = _coupling(model, loss, on_device(batches, torch.device("cpu"), torch.float64))
        return f"{found} {PADDED}" if found and isinstance(data.collate.function, Pad) else found
    return None


def _coupling(model: nn.Module, loss: Loss, batches: list[tuple[Any, Any]]) -> str | None:
    without_dropout(model)
    normalise_alone(model)
    loss.set_global_counts(*batch_counts(loss, [batches[0][1]], [SAMPLES]))
    sizes = (SAMPLES, CUT, SAMPLES - CUT)
    (whole, output), *of_parts = [
        _loss(model, loss.for_samples(size), *batch) for batch, size in zip(batches, sizes, strict=True)
    ]
    parts, outputs = zip(*of_parts, strict=True)
    if abs(sum(parts) - whole) <= ALLOWED * max(abs(whole), *map(abs, parts)):
        return None
    alike = _same(output, outputs)
    what = "the loss couples samples, or is no sum over them" if alike else "the model couples samples"
    return (
        f"{what}. For {SAMPLES} samples `trainer.loss` adds up to {whole:.6g}, for the same in parts of "
        f"{CUT} and {SAMPLES - CUT} to {parts[0]:.6g} + {parts[1]:.6g}. A device sees its part only. "
        "Let `total` return a sum and `count` the number of its elements. For a contrastive loss use "
        "`run.gather` in a loop of your own (docs/how-to/library.md)."
    )


def _loss(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> tuple[float, Any]:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = call_model(model, inputs)
        return float(summed(loss, output, targets)), output


def _same(whole: Any, parts: Any) -> bool:
    """Return whether the outputs of the parts are the parts of the output."""
    for found, *cut in zip(tensors(whole), *map(tensors, parts), strict=True):
        if found.ndim and len(found) == SAMPLES:
            joined = torch.cat(cut)
            if joined.shape != found.shape or not torch.allclose(joined, found, rtol=ALLOWED, atol=1e-12):
                return False
    return True
