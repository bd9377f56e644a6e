"""Switches a model's dropout off, so that its output depends on its inputs and weights only."""

from __future__ import annotations

from torch import nn


def without_dropout(model: nn.Module) -> list[str]:
    """Set every dropout probability to 0, in place.

    That is `p` of torch's dropout modules, and any number from 0 to 1 in an attribute with `drop` in its
    name, as of torch's attention and recurrent layers. A probability within a `forward`, or in an object
    beside the modules, is not found.

    Returns:
        Name and value of each probability that was above 0: `blocks.0.dropout.p 0.1`.
    """
    switched_off = []
    for name, module in model.named_modules():
        # Other classes than torch's may be a dropout, too: `DropPath`.
        drops = "drop" in type(module).__name__.lower()
        for key, value in list(vars(module).items()):
            named = "drop" in key.lower() or (drops and key in ("p", "prob"))
            if named and type(value) is float and 0.0 < value <= 1.0:
                setattr(module, key, 0.0)
                switched_off.append(f"{name}.{key} {value:g}".lstrip("."))
    return switched_off
