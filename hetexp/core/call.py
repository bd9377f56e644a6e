"""The convention by which a model is called with the inputs of a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with a batch's inputs; a dict becomes keyword arguments, as for Hugging Face models."""
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)
