"""A deprecated path of `hetexp.Strategy`, which is in `hetexp/plan/strategy.py`."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    from hetexp.plan import strategy

    if name != "Strategy":
        raise AttributeError(f"module 'hetexp.strategy.base' has no attribute '{name}'")
    warnings.warn("hetexp.strategy.base.Strategy is hetexp.Strategy now.", FutureWarning, stacklevel=2)
    return strategy.Strategy
