"""Switches a model's dropout off, so that what it computes depends on its inputs and weights alone."""

from __future__ import annotations

from torch import nn


def without_dropout(model: nn.Module) -> list[str]:
    """Set every chance to drop something to 0, in place.

    That is `p` of torch's own dropout modules, and any number from 0 to 1 that a module keeps under a name
    with `drop` in it, as torch's attention and recurrent layers do, and most models that call a function for
    it. A chance that is written into a `forward`, or kept in an object beside the modules, is not found.

    Returns:
        What was above 0, by name: `blocks.0.dropout.p 0.1`.
    """
    switched_off = []
    for name, module in model.named_modules():
        # A class of its own beside torch's modules may be a dropout, too: `StochasticDepth`, `DropPath`.
        drops = "drop" in type(module).__name__.lower()
        for key, value in list(vars(module).items()):
            named = "drop" in key.lower() or (drops and key in ("p", "prob"))
            if named and type(value) is float and 0.0 < value <= 1.0:
                setattr(module, key, 0.0)
                switched_off.append(f"{name}.{key} {value:g}".lstrip("."))
    return switched_off
