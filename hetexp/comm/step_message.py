"""The one small all-reduce of a step: every rank's count, and other facts for the end of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hetexp.comm.communicator import Communicator
from hetexp.comm.pending import Pending

_PART = 2**32


class StepMessage:
    """The message of all ranks in a step, which travels while the forward pass runs.

    It holds the count of samples or tokens that the loss is the mean of. The training loop may add each
    rank's seconds of the step before, and rank 0's news of members, requests and its clock. So all ranks act
    on them at the end of the same step.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._pending: Pending | None = None
        self.local_count: float = 0
        """This rank's count in the last message."""
        self.local_terms: Sequence[float] = ()
        """This rank's further counts in the last message: those of a loss with several means."""
        self.all_terms: list[float] = []
        """The sums of all ranks' further counts in the last message."""
        self.seconds: float | None = None
        """This rank's own work in the step before, sent with the next count; set on all ranks or on none."""
        self.all_seconds: list[float] = []
        """Each rank's seconds in the last message."""
        self.notices: Callable[[], tuple[int, int, int]] | None = None
        """Called on rank 0 as a step begins: the newest epoch and request, and whether a checkpoint is
        due by its clock. Set on all ranks or on none."""
        self.noticed = (0, 0, 0)
        """Rank 0's notices in the last message; the same on every rank."""
        self.drawn: tuple[float, ...] | None = None
        """Numbers of the samples that this rank has drawn of a stream, which must be equal on all ranks; set
        on all ranks or on none."""
        self.all_drawn: list[list[float]] = []
        """Each rank's numbers in the last message."""
        self.window: tuple[torch.Tensor | float, float] | None = None
        """This rank's sum and count of the loss since the last log line, if all ranks must know the mean
        before any of them changes its weights."""
        self.window_loss: float | None = None
        """The mean loss, the same on every rank; `None` if nothing counted."""

    def send(self, local_count: float, local_terms: Sequence[float] = ()) -> None:
        """Begin a step with this rank's counts; every rank calls it once a step.

        Args:
            local_terms: further counts, equally many on every rank.
        """
        self.local_count, self.local_terms = local_count, local_terms
        notices: Sequence[int] = ()
        if self.notices is not None:
            notices = self.notices() if self._communicator.rank == 0 else (0, 0, 0)
        # In two parts, so that sums of whole counts stay exact, however large they are.
        terms = [part for count in local_terms for part in divmod(count, _PART)]
        numbers = torch.tensor([*divmod(local_count, _PART), *terms, *notices], dtype=torch.float64)
        if self.seconds is not None:
            seconds = torch.zeros(self._communicator.world_size, dtype=torch.float64)
            seconds[self._communicator.rank] = self.seconds
            numbers = torch.cat([numbers, seconds])
        if self.drawn is not None:
            drawn = torch.zeros(self._communicator.world_size, len(self.drawn), dtype=torch.float64)
            drawn[self._communicator.rank] = torch.tensor(self.drawn, dtype=torch.float64)
            numbers = torch.cat([numbers, drawn.view(-1)])
        self._pending = self._communicator.all_reduce_async(numbers)

    def receive(self) -> float:
        """Wait for the other ranks' messages, and return the sum of all counts."""
        assert self._pending is not None, "send() comes first"
        parts, rest, *more = self._pending.wait().tolist()
        if self.local_terms:
            ends = 2 * len(self.local_terms)
            self.all_terms = [whole(*more[at : at + 2]) for at in range(0, ends, 2)]
            more = more[ends:]
        if self.notices is not None:
            epoch, request, due, *more = more
            self.noticed = int(epoch), int(request), int(due)
        if self.drawn is not None:
            size = len(self.drawn)
            start = len(more) - size * self._communicator.world_size
            self.all_drawn = [more[place : place + size] for place in range(start, len(more), size)]
            more = more[:start]
        self.all_seconds = more
        return whole(parts, rest)

    def share_loss(self, loss_sum: torch.Tensor) -> None:
        """Compute the mean loss since the last log line, with this step, if `window` is set.

        A rank that dies between two steps takes its part of a sum with it. So all ranks learn the mean before
        any of them updates its weights.
        """
        if self.window is None:
            return
        before, count = self.window
        with self._communicator.waiting():
            local = [float(before + loss_sum.detach()), count + self.local_count]
        total, number = self._communicator.all_reduce(torch.tensor(local, dtype=torch.float64)).tolist()
        self.window_loss = total / number if number else None


def whole(parts: float, rest: float) -> float:
    """Return a count that has travelled in two parts."""
    return int(parts) * _PART + (int(rest) if rest.is_integer() else rest)
