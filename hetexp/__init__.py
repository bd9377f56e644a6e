"""hetexp: train one PyTorch model on unequal devices. Importing it never imports torch.

`hetexp/__init__.pyi` tells type checkers what each public name is.
"""

from typing import Any

__version__ = "0.1.0"
_PUBLIC = {
    "Backend": "hetexp.hardware.backend",
    "LocalSGD": "hetexp.strategy.local_sgd",
    "Logger": "hetexp.logger.base",
    "Loss": "hetexp.training.loss",
    "ModelHooks": "hetexp.model.hooks",
    "Policy": "hetexp.balancing.base",
    "Run": "hetexp.library.run",
    "Strategy": "hetexp.plan.strategy",
    "Synchronous": "hetexp.strategy.synchronous",
    "on_request": "hetexp.training.recovery.rank_commands",
    "setup": "hetexp.library.setup",
}
"""Each public name and the module that defines it. Most bring torch, so they are imported on first use."""
_ELSEWHERE = {"Policy": "BalancingPolicy"}
"""Public names that their module has under another one."""
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hetexp' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), _ELSEWHERE.get(name, name))
