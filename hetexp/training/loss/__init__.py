"""Losses: `Loss` is the base class of your own, and `trainer.loss` names one of those here."""

from hetexp.training.loss.base import (
    HALF,
    IGNORED,
    CrossEntropy,
    Loss,
    NoLossError,
    as_count,
    batch_counts,
    count_of,
    num_rows,
    summed,
    total_loss,
)
from hetexp.training.loss.build import build_loss, check_loss
from hetexp.training.loss.elements import (
    BinaryCrossEntropy,
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    Reconstruction,
)
from hetexp.training.loss.labels import IndicesChecked, LabelError, TokenError, placed
from hetexp.training.loss.model_loss import ModelLoss
from hetexp.training.loss.several import WeightedSum, single_losses

# fmt: off
__all__ = [
    "HALF", "IGNORED", "BinaryCrossEntropy", "CrossEntropy", "Huber", "IndicesChecked", "LabelError", "Loss",
    "MeanAbsoluteError", "MeanSquaredError", "ModelLoss", "NoLossError", "Reconstruction", "TokenError",
    "WeightedSum", "as_count", "batch_counts", "build_loss", "check_loss", "count_of", "num_rows", "placed",
    "single_losses", "summed", "total_loss",
]
# fmt: on
