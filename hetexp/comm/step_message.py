"""The one small all-reduce of a step: every rank's count, and what else ranks must know at the step's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hetexp.comm.communicator import Communicator, Pending

_PART = 2**32


class StepMessage:
    """What ranks tell each other in a step; the numbers travel while the forward pass runs.

    Beside the count of samples or tokens that the loss is the mean of, the training loop may add each rank's
    seconds of the step before, and what the first rank knows of members, requests and its clock. So all ranks
    act on it at the end of the same step.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._pending: Pending | None = None
        self.local_count: float = 0
        """What this rank sent last."""
        self.seconds: float | None = None
        """This rank's own work in the step before, sent with the next count: by all ranks or by none."""
        self.all_seconds: list[float] = []
        """What each rank sent with its last count."""
        self.notices: Callable[[], tuple[int, int, int]] | None = None
        """Asked on the first rank as a step begins: the newest epoch and request, and whether a checkpoint is
        due by its clock. Set on all ranks or on none."""
        self.noticed = (0, 0, 0)
        """What it answered in the last step; the same on every rank."""
        self.window: tuple[torch.Tensor | float, float] | None = None
        """This rank's sum and count of the loss since the last log line, if all ranks must know the mean
        before any of them changes its weights."""
        self.window_loss: float | None = None
        """That mean, the same on every rank; `None` if nothing counted."""

    def send(self, local_count: float) -> None:
        """Begin a step with this rank's count; every rank calls it once a step."""
        self.local_count = local_count
        notices: Sequence[int] = ()
        if self.notices is not None:
            notices = self.notices() if self._communicator.rank == 0 else (0, 0, 0)
        # In two parts: sums of whole counts stay exact, however large they are.
        numbers = torch.tensor([*divmod(local_count, _PART), *notices], dtype=torch.float64)
        if self.seconds is not None:
            seconds = torch.zeros(self._communicator.world_size, dtype=torch.float64)
            seconds[self._communicator.rank] = self.seconds
            numbers = torch.cat([numbers, seconds])
        self._pending = self._communicator.all_reduce_async(numbers)

    def receive(self) -> float:
        """Wait for the other ranks' messages, and return the sum of all counts."""
        assert self._pending is not None, "send() comes first"
        parts, rest, *more = self._pending.wait().tolist()
        if self.notices is not None:
            epoch, request, due, *more = more
            self.noticed = int(epoch), int(request), int(due)
        self.all_seconds = more
        return int(parts) * _PART + (int(rest) if rest.is_integer() else rest)

    def share_loss(self, loss_sum: torch.Tensor) -> None:
        """Find the mean loss since the last log line, this step's included, if `window` asks for it.

        A rank may die between two steps, and its part of a sum with it. What all ranks know before any of
        them updates its weights is known wherever the step was done.
        """
        if self.window is None:
            return
        before, count = self.window
        own = [float(before + loss_sum.detach()), count + self.local_count]
        total, number = self._communicator.all_reduce(torch.tensor(own, dtype=torch.float64)).tolist()
        self.window_loss = total / number if number else None
