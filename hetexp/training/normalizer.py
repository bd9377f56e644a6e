"""The one place where a gradient is scaled.

With the loss summed locally, rank r's backward gives g_r = ∇ Σ_{i in its slice} loss_i. The exact gradient of
the global batch is (Σ_r g_r) / N with N the *global* count of samples or unmasked tokens, or the sum of their
weights. An exchange that averages over W ranks yields (Σ_r g_r) / W instead, so each local sum is multiplied
by W / N beforehand. N is known only after a small all-reduce, which travels while the forward pass runs. See
pytorch/pytorch#67253.

The same all-reduce carries one more number of each rank, where the loop has something to report (the seconds
of the step before: see `hetexp/training/balancer.py`). It carries three of the first rank: news of members,
requests (`hetexp/training/recovery/rank_recovery.py`), and whether a checkpoint is due by its clock. So all
ranks act on them at the end of the same step.

Where a rank computes in float16, all ranks multiply by the one loss scale as well; `settle` in
`hetexp/training/nonfinite/loss_scale.py` divides the exchanged gradient by it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from hetexp.comm.communicator import Communicator, Pending
from hetexp.training.nonfinite.loss_scale import LossScale

_PART = 2**32


class LossNormalizer:
    """Gives the factor for a step's local loss sums.

    Args:
        gradient_divisor: number of ranks by which the strategy's exchange divides the summed gradient.
        per: `global` is exact; `per_rank` divides by the rank's own count, as plain DDP would.
        loss_scale: what all ranks multiply by beside that; `None`: nothing.
    """

    def __init__(
        self,
        communicator: Communicator,
        gradient_divisor: int,
        per: Literal["global", "per_rank"] = "global",
        loss_scale: LossScale | None = None,
    ) -> None:
        self.loss_scale = loss_scale
        self._communicator = communicator
        self._gradient_divisor = gradient_divisor
        self._per = per
        self.report: float | None = None
        """A number for all ranks to know, sent with the next count: of every rank or of none."""
        self.reported: list[float] = []
        """What each rank reported in the step of the last `factor`."""
        self.notices: Callable[[], tuple[int, int, int]] | None = None
        """Asked on the first rank, as a step begins, for the newest epoch and request, and whether its clock
        asks for a checkpoint; `None`: no rank is."""
        self.noticed = (0, 0, 0)
        """What it answered in the step of the last `factor`; the same on every rank."""
        self.window: tuple[torch.Tensor | float, float] | None = None
        """Sum and count of the own loss since the last log line, where the step ends with one and its loss
        is to be known before anybody's weights change; `None`: there is no hurry."""
        self.window_loss: float | None = None
        """The mean loss that came of it, the same on every rank; `None` where nothing counted."""
        self.local_count: float = 0
        """Of this rank, in the last step that began."""
        self._pending: Pending | None = None

    def start(self, local_count: float) -> None:
        """Begin a step with this rank's count; every rank must call it once a step."""
        self.local_count = local_count
        notices: Sequence[int] = ()
        if self.notices is not None:
            notices = self.notices() if self._communicator.rank == 0 else (0, 0, 0)
        # In two parts: sums of whole counts stay exact, however large they are.
        numbers = torch.tensor([*divmod(local_count, _PART), *notices], dtype=torch.float64)
        if self.report is not None:
            reports = torch.zeros(self._communicator.world_size, dtype=torch.float64)
            reports[self._communicator.rank] = self.report
            numbers = torch.cat([numbers, reports])
        self._pending = self._communicator.all_reduce_async(numbers)

    def factor(self) -> tuple[float, float]:
        """Wait for the other ranks' counts.

        Returns:
            What to multiply the local loss sums by (0 where nothing in the whole batch counts), the loss
            scale included, and the global count.
        """
        assert self._pending is not None, "start() comes first"
        parts, rest, *self.reported = self._pending.wait().tolist()
        if self.notices is not None:
            epoch, request, due, *self.reported = self.reported
            self.noticed = int(epoch), int(request), int(due)
        global_count = int(parts) * _PART + (int(rest) if rest.is_integer() else rest)
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        if self._per == "per_rank":
            return scale / (self.local_count or 1), global_count
        return (scale * self._gradient_divisor / global_count if global_count else 0.0), global_count

    def share_loss(self, loss_sum: torch.Tensor) -> None:
        """Find the mean loss since the last log line, this step's included, where `window` asks for it.

        A rank may die between two steps, and its part of a sum with it. What all ranks know before any of
        them updates its weights is known wherever the step was done.
        """
        if self.window is None:
            return
        before, count = self.window
        mine = [float(before + loss_sum.detach()), count + self.local_count]
        total, number = self._communicator.all_reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
        self.window_loss = total / number if number else None
