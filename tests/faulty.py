"""Data and a model as a person may write them, that go wrong on one rank in a chosen way."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetexp.core.device import GIB
from hetexp.training.saving.data_facts import PLACES

FAULTS: dict[str, Callable[[], object]] = {
    "raise": lambda: _fail("this sample is broken"),
    "say gloo": lambda: _fail("Connection reset by peer while reading this sample"),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "_exit 3": lambda: os._exit(3),
    "_exit 0": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit("enough of this"),
    "hang": lambda: threading.Event().wait(),
}


COMPARED = 2 * PLACES
"""Reads of samples that ranks compare before they train."""


def my_rank() -> int:
    """Return the rank whose log this process writes to, also before any group is formed."""
    found = re.search(r"rank_(\d+)\.log", str(Path("/proc/self/fd/1").readlink()))
    assert found
    return int(found[1])


def _fail(text: str) -> None:
    raise RuntimeError(text)


class Data:
    """Four numbers a sample and two classes.

    Args:
        fault: what goes wrong on rank 1, see `FAULTS`.
        after: samples that can be read before, without those that ranks compare at the start; -1: not even
            the data set can be built.
        longer: samples that rank 1 has more than the others.
    """

    facts = {"input_shape": [4], "num_classes": 2}

    def __init__(self, fault: str | None = None, after: int = 0, longer: int = 0) -> None:
        self.fault, self.after, self.read = fault, after if after < 0 else after + COMPARED, 0
        self.length = 64 + (longer and longer * my_rank())
        self._maybe_fail()

    def _maybe_fail(self) -> None:
        if self.fault is not None and self.read > self.after and my_rank() == 1:
            print(f"rank 1 was here, at its sample {self.read - COMPARED}", flush=True)
            FAULTS[self.fault]()
        self.read += 1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._maybe_fail()
        return torch.ones(4), torch.tensor(index % 2)


class Net(nn.Module):
    """A linear model.

    Args:
        fail_at: forward pass that raises on rank 1.
        wider: whether it has more hidden values on rank 1.
    """

    def __init__(self, fail_at: int = 0, wider: bool = False) -> None:
        super().__init__()
        hidden = 3 + my_rank() if wider else 3
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 2))
        self.fail_at, self.passes = fail_at, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == self.fail_at and my_rank() == 1:
            raise ArithmeticError("this layer does not like its input")
        output: torch.Tensor = self.layers(inputs)
        return output


class StopsAtTheEnd(Net):
    """The linear model; rank 1 stands still once it has done everything."""

    def __init__(self) -> None:
        super().__init__()
        with contextlib.suppress(AssertionError):  # the launcher, which builds it, too, is no rank
            if my_rank() == 1:
                atexit.register(FAULTS["SIGSTOP"])


class BadToEvaluate:
    """Training data that can be read, and evaluation data with a fault (see `Data`)."""

    facts = Data.facts

    def __init__(self, fault: str | None = None) -> None:
        self.train, self.evaluation = Data(), Data(fault)


class SlowToEvaluate:
    """Training data that is read at once, and evaluation data that takes rank 0 its time.

    Args:
        seconds: for each sample of the evaluation, on rank 0.
        stop_at: sample of the evaluation at which rank 1 stands still.
    """

    facts = Data.facts

    def __init__(self, seconds: float = 0.0, stop_at: int | None = None) -> None:
        self.train, self.evaluation = Data(), _Slow(seconds, stop_at)


class _Slow(Data):
    def __init__(self, seconds: float, stop_at: int | None) -> None:
        super().__init__()
        self.seconds, self.stop_at = seconds, stop_at

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if my_rank() == 0:
            threading.Event().wait(self.seconds)
        if index == self.stop_at and my_rank() == 1:
            FAULTS["SIGSTOP"]()
        return super().__getitem__(index)


class _ShortInBackward(torch.autograd.Function):
    """Passes values on, and raises in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the manual.")


class _HoldsInBackward(torch.autograd.Function):
    """Passes values on, and takes real memory of the device for a moment in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gib_per_sample: float) -> torch.Tensor:
        ctx.num_bytes = int(len(value) * gib_per_sample * GIB)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.empty(ctx.num_bytes, dtype=torch.uint8, device=gradients[0].device)
        return gradients[0], None


class Hungry(nn.Module):
    """Four layers; on some ranks a pass over too many samples runs out of memory.

    Args:
        most: samples of a pass that the memory suffices for.
        where: `forward`, or `backward` between its second layer and its third, counted from the end.
        gib_per_sample: of the device's real memory, taken there in any case.
        ranks: that have so little memory.
        after: passes in which there is enough.
        unused: whether there is a fifth layer, which takes no part.
    """

    def __init__(
        self,
        most: int = 1000,
        where: str = "forward",
        ranks: Sequence[int] = (1,),
        after: int = 0,
        unused: bool = False,
        gib_per_sample: float = 0.0,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)])
        self.unused = nn.Linear(8, 8) if unused else None
        self.most, self.where, self.after = most, where, after
        self.gib_per_sample = gib_per_sample
        self.short, self.passes = my_rank() in ranks, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        short = self.training and self.short and self.passes > self.after and len(inputs) > self.most
        value = inputs
        for number, layer in enumerate(self.layers):
            value = torch.tanh(layer(value)) if number < 3 else layer(value)
            if self.short and self.gib_per_sample and number == 1:
                held = _HoldsInBackward.apply(value, self.gib_per_sample)  # type: ignore[no-untyped-call]
                value = held
            if short and number == 1:
                if self.where == "forward":
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                value = _ShortInBackward.apply(value)  # type: ignore[no-untyped-call]
        return value


class Greedy(torch.optim.SGD):
    """Runs out of memory in its sixth step on rank 1."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 6 and my_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().step(closure)


class DiesInSync(nn.Module):
    """A linear model whose process is killed on rank 2 in the middle of a sync of `local_sgd`.

    Args:
        sync: which one, from 1. The ranks have added up their weights by then, and not their counters.
    """

    def __init__(self, sync: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("calls", torch.tensor(0))
        self._left = sync

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs)
        return output

    def named_buffers(self, *arguments: Any, **options: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "_agree_on_integers" and my_rank() == 2:
            self._left -= 1
            if self._left == 0:
                FAULTS["SIGKILL"]()
        return super().named_buffers(*arguments, **options)
