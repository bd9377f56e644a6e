"""Commands of the user to a running training: all ranks act at the end of the same step, rank 0 answers.

`checkpoint` saves, `stop` ends the training after the step. Any other name needs a handler of the user's,
which `hetexp.on_request` or `trainer.on_request` registers.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetexp.core.epoch import Request, SignedStore, answer_key
from hetexp.core.errors import PeerLostError, SetupError, did_you_mean
from hetexp.core.instantiate import locate

if TYPE_CHECKING:
    from hetexp.training.loop import Training

log = logging.getLogger(__name__)

OWN = ("checkpoint", "stop")
"""Names that hetexp itself answers to."""


@dataclass(frozen=True)
class Asked:
    """The argument of a handler, which every rank calls."""

    argument: str
    """Text after the command's name."""
    step: int
    """Number of steps done."""
    rank: int
    world_size: int
    model: nn.Module
    """Holds the parameters, the same on every rank. A handler must change it alike on all ranks."""
    optimizer: torch.optim.Optimizer


Handler = Callable[[Asked], Any]
"""Returns the answer, as JSON can hold it; that of rank 0 is sent."""

_handlers: dict[str, Handler] = {}


def on_request(name: str, handler: Handler) -> None:
    """Let `hetexp control RUN NAME [ARGUMENT]` call a handler on every rank at the end of the same step.

    Raises:
        ValueError: hetexp itself answers to this name.
    """
    if name in OWN:
        raise ValueError(f"`name` must be another than {' and '.join(OWN)}, but is '{name}' instead.")
    _handlers[name] = handler


class RankCommands:
    """Answers requests, one after another.

    Args:
        store: the launcher's.
    """

    def __init__(self, store: SignedStore) -> None:
        self._store = store
        self.handled = 0
        """Number of the last request that was answered; the same on every rank."""

    def serve(self, training: Training, newest: int) -> None:
        """Answer all requests up to `newest`; all ranks call it at the end of the same step.

        Raises:
            PeerLostError: a rank is lost meanwhile; the request is answered again.
            SetupError: another process has overwritten a request in the store.
        """
        while self.handled < newest:
            number = self.handled + 1
            request = self._read(number, training.state.config.comm.timeout_seconds)
            answer = self._answer(training, request)
            self.handled = number
            if training.state.rank == 0:
                self._store.write(answer_key(number), json.dumps(answer))

    def _read(self, number: int, seconds: float) -> Request:
        deadline, pause, key = time.monotonic() + seconds, threading.Event(), Request.key(number)
        while (text := self._store.read(key)) is None:
            if time.monotonic() > deadline:
                raise SetupError(f"`{key}` must stay in the run's store, but another process has changed it.")
            pause.wait(0.05)
        return Request.from_json(text)

    def _answer(self, training: Training, request: Request) -> dict[str, Any]:
        step = training.progress.step
        reply: dict[str, Any] = {"done": True, "step": step}
        if request.name == "checkpoint":
            training.window.stop()
            reply["checkpoint"] = training.save(wait=True)
            training.window.restart()
            return reply
        if request.name == "stop":
            training.stops = True
            return reply
        handler = self._handler(training, request.name)
        if handler is None:
            names = [*OWN, *dict.fromkeys([*_handlers, *training.state.config.trainer.on_request])]
            return {
                "error": f"`{request.name}` is no request that this run knows: {', '.join(names)}."
                + did_you_mean(request.name, names)
            }
        state = training.state
        asked = Asked(request.argument, step, state.rank, state.plan.world_size, state.model, state.optimizer)
        try:
            return reply | {"answer": handler(asked)}
        except PeerLostError:
            raise
        except Exception as error:  # an error of the handler must not end the training
            log.warning("the handler of `%s` failed:\n%s", request.name, traceback.format_exc())
            return {"error": f"the handler of `{request.name}` failed: {type(error).__name__}: {error}"}

    def _handler(self, training: Training, name: str) -> Handler | None:
        path = training.state.config.trainer.on_request.get(name)
        if name in _handlers or path is None:
            return _handlers.get(name)
        handler: Handler = locate(path)
        return handler
