"""Model, data and optimizer of the runs that are killed: they tell where a step is, and its samples.

A rank imports this by name (`_target_`). The model's passes and the optimizer's calls are the marks at which
a kill may be ordered, so that the product needs none.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

ORDER = "HETEXP_CHAOS_ORDER"
"""Variable with the place at which a rank is to tell, as JSON (`Watch`)."""
RECORDS = "HETEXP_CHAOS_RECORDS"
"""Variable with the folder into which each process writes the samples of its steps."""
HOLD_SECONDS = 10.0
"""Longest that a rank waits to be killed."""
FEATURES, CLASSES = 4, 3


class Watch:
    """Counts how often this process has come to each place, tells of the ordered one, and records samples."""

    def __init__(self) -> None:
        order = json.loads(os.environ.get(ORDER, "{}"))
        self._place: str | None = order.get("place")
        self._number: int = order.get("number", 0)
        self._rank: int | None = order.get("rank")
        self._hold: bool = order.get("hold", False)
        self._socket: str = order.get("socket", "")
        self._counts: dict[str, int] = {}
        folder = os.environ.get(RECORDS)
        self._records = Path(folder, f"{os.getpid()}.jsonl") if folder else None
        self.seen: list[torch.Tensor] | None = None
        """The samples since the last `zero_grad`; `None` before the first one: the model is only tried."""

    def at(self, place: str) -> None:
        """Tell the harness that this process is at a place, if it wants to know, and let it act."""
        if place != self._place:
            return
        self._counts[place] = count = self._counts.get(place, 0) + 1
        if count != self._number or self._rank not in (None, rank_by_log()):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
            teller.sendto(str(os.getpid()).encode(), self._socket)
        if self._hold:
            threading.Event().wait(HOLD_SECONDS)

    def updated(self, step: int) -> None:
        """Record the samples of a step that this process has just updated its weights by."""
        if self._records is None or self.seen is None:
            return
        indices = [int(index) for batch in self.seen for index in batch.tolist()]
        line = {"step": step, "indices": indices, "time": time.monotonic()}
        with self._records.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def rank_by_log(pid: int | str = "self") -> int | None:
    """Return the rank whose log a process writes to, `None` where it writes to none."""
    try:
        target = str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return None
    found = re.search(r"_(\d+)\.log$", target)
    return int(found[1]) if found is not None else None


_watch: Watch | None = None


def watch() -> Watch:
    """Return the one of this process, made when it is first needed: processes are forked."""
    global _watch
    if _watch is None:
        _watch = Watch()
    return _watch


class Data:
    """A small task; the first number of an input is the sample's place in the data.

    Args:
        num_samples: of the training data, and a third as many to evaluate.
    """

    facts = {"input_shape": [1 + FEATURES], "num_classes": CLASSES}

    def __init__(self, num_samples: int = 96) -> None:
        generator = torch.Generator().manual_seed(11)
        truth = torch.randn(FEATURES, CLASSES, generator=generator)
        self.train, self.evaluation = (
            self._samples(number, truth, generator) for number in (num_samples, num_samples // 3)
        )

    @staticmethod
    def _samples(number: int, truth: torch.Tensor, generator: torch.Generator) -> TensorDataset:
        features = torch.randn(number, FEATURES, generator=generator)
        noisy = features @ truth + torch.randn(number, CLASSES, generator=generator)
        places = torch.arange(number, dtype=torch.float32)[:, None]
        return TensorDataset(torch.cat([places, features], dim=1), noisy.argmax(dim=1))


class Net(nn.Module):
    """Two layers that say where their passes are."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.first.bias.register_post_accumulate_grad_hook(lambda _: watch().at("exchange"))
        # Taken where a checkpoint is made of the model.
        self.register_state_dict_pre_hook(lambda *_: watch().at("save"))  # type: ignore[no-untyped-call]
        watch().at("build")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, classes] of inputs [batch, 1 + features]."""
        seen = watch().seen
        if self.training and seen is not None:
            seen.append(inputs[:, 0].detach())
        watch().at("forward" if self.training else "evaluate")
        hidden = torch.tanh(self.first(inputs[:, 1:]))
        if hidden.requires_grad:
            hidden.register_hook(lambda _: watch().at("backward"))
        output: torch.Tensor = self.second(hidden)
        return output


class Optimizer(torch.optim.AdamW):
    """Records the samples of every step that it does."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        watch().seen = []
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        watch().at("update")
        result = super().step(closure)
        first = self.state[self.param_groups[0]["params"][0]]
        watch().updated(int(first["step"]))
        watch().at("updated")
        return result
