"""A model and an optimizer that end their own process at a chosen moment of a chosen step."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from faulty import my_rank
from torch import nn

from hetexp.core.errors import PeerLostError
from hetexp.model.base import WithAuxiliary
from hetexp.model.sae import SAE

COMMON = (
    "data=synthetic",
    "data.num_samples=240",
    "data.num_test_samples=50",
    "model=custom",
    "optimizer=adamw",
    "optimizer.lr=0.01",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=32",
    "trainer.precision=float64",
    "trainer.keep_last=0",
)
"""Options of a training whose ranks these models end."""


class Net(nn.Module):
    """A small network with running statistics, which tell how many steps are done.

    Args:
        kills: moment (`forward`, `backward`, `evaluation`, `save`) → [member, steps done].
        slow_until: file that ends the pauses of `pause` seconds in each pass in training.
    """

    def __init__(
        self,
        kills: Mapping[str, tuple[int, int]] | None = None,
        slow_until: str | None = None,
        pause: float = 0.02,
    ) -> None:
        super().__init__()
        # No bias before the norm: its gradient is rounding alone, by which Adam would move it all the same.
        self.hidden, self.norm = nn.Linear(16, 12, bias=False), nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 10)
        self.kills, self.slow_until, self.pause = dict(kills or {}), slow_until, pause
        self.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            lambda *_: self._maybe("save")
        )

    def _maybe(self, moment: str) -> None:
        if self.kills.get(moment) is not None:
            member, step = self.kills[moment]
            if my_rank() == member and int(self.norm.num_batches_tracked or 0) == step:
                os.kill(os.getpid(), signal.SIGKILL)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._maybe("forward" if self.training else "evaluation")
        if self.training and self.slow_until is not None and not Path(self.slow_until).exists():
            time.sleep(self.pause)
        hidden: torch.Tensor = torch.relu(self.norm(self.hidden(inputs)))
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._maybe("backward"))
        output: torch.Tensor = self.head(hidden)
        return output


class CountingNorm(nn.LayerNorm):
    """Normalises each sample by itself, and counts the batches as BatchNorm does."""

    num_batches_tracked: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_batches_tracked += 1
        return super().forward(input)


class Apart(Net):
    """The same; no layer needs another rank within a pass."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm: nn.Module = CountingNorm(12)  # type: ignore[assignment]


def fill(folder: Path) -> None:
    """Take all that is left of the disk that a folder is on."""
    with contextlib.suppress(OSError), (folder / "ballast").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


class Filling(Net):
    """The same; member 1 fills a disk in the pass after a step, before it may die there.

    Args:
        folder: on that disk.
        step: after which it does.
        dies: whether it dies of a signal right afterwards.
    """

    def __init__(self, folder: str, step: int, dies: bool) -> None:
        super().__init__({"forward": (1, step)} if dies else None)
        self.folder, self.step = Path(folder), step

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and my_rank() == 1 and int(self.norm.num_batches_tracked or 0) == self.step:
            fill(self.folder)
        return super().forward(inputs)


class Parting(torch.optim.AdamW):
    """In one step a member dies before its update, another one has lost it by then, and the rest goes on.

    So those that are left differ by a step, as where a rank dies while it sends the last of a gradient.

    Args:
        dies, loses: the members.
        at: steps done.
    """

    def __init__(self, params: Any, dies: int = -1, loses: int = -1, at: int = -1, **options: Any) -> None:
        super().__init__(params, **options)
        self.dies, self.loses, self.at = dies, loses, at

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: dict[str, Any] = next(iter(self.state.values()), {})
        if int(state.get("step", 0)) == self.at:
            if my_rank() == self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if my_rank() == self.loses:
                self.at = -1
                raise PeerLostError(f"rank {self.dies} of the exchange is gone")
        super().step()


class SlowSAE(SAE):
    """A sparse autoencoder whose passes pause until a file is there."""

    def __init__(
        self,
        slow_until: str | None = None,
        pause: float = 0.1,
        input_size: int | None = None,
        mean: Sequence[float] | None = None,
        scale: float | None = None,
        **others: Any,
    ) -> None:
        super().__init__(input_size=input_size, mean=mean, scale=scale, **others)
        self.slow_until, self.pause = slow_until, pause

    def forward(self, inputs: torch.Tensor) -> WithAuxiliary:
        if self.training and self.slow_until is not None and not Path(self.slow_until).exists():
            time.sleep(self.pause)
        return super().forward(inputs)
