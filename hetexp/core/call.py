"""How a model is called: the one convention between data sets and models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with a batch's inputs; a dict becomes keyword arguments, as Hugging Face models want."""
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)
