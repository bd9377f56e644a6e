"""A pipeline's pieces as the plan tells them: which rank computes which layers of which replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One rank's piece of a pipeline."""

    replica: int
    """Number of the pipeline that it belongs to; a plain pipeline has one, number 0."""
    index: int
    """Place in that pipeline, from 0."""
    first_layer: int
    end_layer: int
    """Layers `[first_layer, end_layer)`; what comes before all layers belongs to the first stage, what comes
    after them to the last."""


@dataclass(frozen=True)
class Layer:
    """What one layer of a model costs. What comes before all layers counts with the first, what comes after
    them with the last.
    """

    name: str
    work: float
    """Fraction of the model's operations of a step; all layers' sum to 1."""
    weight_bytes: int
    """Of all its parameters; a tied one counts in each layer that holds it."""
    trained_bytes: int
    """Of those parameters that are trained: what gradients and each moment of the optimizer take as well."""
    buffer_bytes: int
    activation_bytes: int
    """What backward keeps of one sample."""
    output_bytes: int
    """What it hands to the next layer, of one sample; 0 for the last."""
    state_bytes: int = 0
    """What the optimizer keeps of its parameters from step to step."""
