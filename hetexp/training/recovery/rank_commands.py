"""What people ask of a running training; all ranks act at the end of the same step, the first one answers.

`checkpoint` saves, `stop` ends the training after the step. Anything else is a name for which the run's own
code has a handler: `hetexp.on_request` or `trainer.on_request` registers it.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hetexp.core.epoch import Request, answer_key
from hetexp.core.errors import PeerLostError, did_you_mean
from hetexp.core.instantiate import locate

if TYPE_CHECKING:
    from hetexp.training.loop import Training

log = logging.getLogger(__name__)

OWN = ("checkpoint", "stop")
"""Names that hetexp itself answers to."""


@dataclass(frozen=True)
class Asked:
    """What a handler is given; it is called on every rank."""

    argument: str
    """What followed the name."""
    step: int
    """Steps that are done."""
    rank: int
    world_size: int
    model: nn.Module
    """Holds the parameters; the same on every rank. What changes it must do so alike on all of them."""
    optimizer: torch.optim.Optimizer


Handler = Callable[[Asked], Any]
"""Returns what is answered, as JSON can hold it; the first rank's counts."""

_handlers: dict[str, Handler] = {}


def on_request(name: str, handler: Handler) -> None:
    """Let `hetexp control RUN NAME [ARGUMENT]` call a handler on every rank at the end of the same step.

    Raises:
        ValueError: hetexp itself answers to this name.
    """
    if name in OWN:
        raise ValueError(f"`name` must be another than {' and '.join(OWN)}, but is '{name}' instead.")
    _handlers[name] = handler


class Requests:
    """Answers requests, one after another.

    Args:
        store: the launcher's.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.handled = 0
        """Number of the last one that was seen to; the same on every rank."""

    def serve(self, training: Training, newest: int) -> None:
        """See to all requests up to this one; all ranks call it at the end of the same step.

        Raises:
            PeerLostError: a rank is lost meanwhile; the request is seen to again.
        """
        while self.handled < newest:
            number = self.handled + 1
            request = Request.from_json(self._store.get(Request.key(number)))
            answer = self._answer(training, request)
            self.handled = number
            if training.state.rank == 0:
                self._store.set(answer_key(number), json.dumps(answer))

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
            known = [*OWN, *self._known(training)]
            return {
                "error": f"`{request.name}` is no request that this run knows: {', '.join(known)}."
                + did_you_mean(request.name, known)
            }
        state = training.state
        asked = Asked(request.argument, step, state.rank, state.plan.world_size, state.model, state.optimizer)
        try:
            return reply | {"answer": handler(asked)}
        except PeerLostError:
            raise
        except Exception as error:  # a mistake in it is no reason to lose the training
            log.warning("the handler of `%s` failed:\n%s", request.name, traceback.format_exc())
            return {"error": f"the handler of `{request.name}` failed: {type(error).__name__}: {error}"}

    def _known(self, training: Training) -> dict[str, str]:
        return {**dict.fromkeys(_handlers, ""), **training.state.config.trainer.on_request}

    def _handler(self, training: Training, name: str) -> Handler | None:
        path = training.state.config.trainer.on_request.get(name)
        if name in _handlers or path is None:
            return _handlers.get(name)
        found: Handler = locate(path)
        return found
