"""Four layers that may be cut apart; the process of one stage dies once in the midst of giving its part."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from faulty import my_rank
from torch import nn


class Net(nn.Sequential):
    """Linear layers.

    Args:
        dies: number of the member that dies.
        save: in which one, from 1.
        once: a file that is there once it has died.
    """

    def __init__(self, dies: int = -1, save: int = 0, once: str = "") -> None:
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
        super().__init__(*layers, nn.Linear(16, 10))
        with suppress(AssertionError):  # the launcher, which builds it, too, is no rank
            if my_rank() == dies and not Path(once).exists():
                _die_in(save, Path(once))


def _die_in(save: int, once: Path) -> None:
    import hetexp.strategy.pipeline.checkpoint as saving

    module: Any = saving
    send, as_bytes, saves = module._send, module._bytes, 0

    def sends(*arguments: Any) -> None:
        nonlocal saves
        saves += 1
        send(*arguments)

    def leaves(tensor: Any) -> Any:
        if saves == save:
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return as_bytes(tensor)

    module._send, module._bytes = sends, leaves
