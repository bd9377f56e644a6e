"""The stages of pipelines in a plan, and the costs of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline."""

    replica: int
    """Number of its pipeline, from 0."""
    index: int
    """Place in that pipeline, from 0."""
    first_layer: int
    end_layer: int
    """Layers `[first_layer, end_layer)`. Modules before all layers belong to the first stage, and modules
    after them to the last."""


@dataclass(frozen=True)
class Layer:
    """The costs of one layer of a model.

    Modules before all layers count with the first layer, and modules after them with the last.
    """

    name: str
    work: float
    """Fraction of the model's operations in a step; the layers' fractions sum to 1."""
    weight_bytes: int
    """Size of all its parameters; a tied parameter counts in each layer that holds it."""
    trained_bytes: int
    """Size of its trained parameters, and so of their gradients."""
    buffer_bytes: int
    activation_bytes: int
    """Activations of one sample that backward needs."""
    output_bytes: int
    """Output of one sample for the next layer; 0 for the last layer."""
    state_bytes: int = 0
    """Size of the optimizer's state of its parameters."""
