"""hetexp: train one PyTorch model on unequal devices. Importing it never imports torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetexp.library.run import Run
    from hetexp.library.setup import setup
    from hetexp.training.recovery.rank_commands import on_request

__all__ = ["Run", "__version__", "on_request", "setup"]
__version__ = "0.1.0"
_LIBRARY = {
    "Run": "hetexp.library.run",
    "on_request": "hetexp.training.recovery.rank_commands",
    "setup": "hetexp.library.setup",
}
"""What a script uses, and where it is: imported when it is used, because torch comes with it."""


def __getattr__(name: str) -> Any:
    if name not in _LIBRARY:
        raise AttributeError(f"module 'hetexp' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_LIBRARY[name]), name)
