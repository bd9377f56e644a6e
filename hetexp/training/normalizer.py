"""The factor that makes a sum of losses over unequal ranks the gradient of the global batch's mean.

With the loss summed locally, rank r's backward gives g_r = ∇ Σ_{i in its slice} loss_i. The exact gradient of
the global batch is (Σ_r g_r) / N with N the *global* count of samples or unmasked tokens, or the sum of their
weights (pytorch/pytorch#67253). With W the number of ranks and S the loss scale, these places scale:

| step | hetexp's own loop | a script's loop (`hetexp launch`) |
|---|---|---|
| loss, before backward (`training/gradient.py`) | × S · W / N | – |
| exchange in backward (`comm/hook.py`, or torch's) | ÷ W | ÷ W |
| gradient, after the exchange | ÷ S (`nonfinite/grad_check.py`) | × W / N (`library/step.py`) |

An exchange that sums instead of averaging has 1 in W's place (`Strategy.gradient_divisor`).
"""

from __future__ import annotations

from typing import Literal

from hetexp.comm.step_message import StepMessage
from hetexp.training.nonfinite.loss_scale import LossScale


class LossNormalizer:
    """Computes the factor of a step's local loss sums.

    Args:
        message: carries the ranks' counts.
        gradient_divisor: number of ranks by which the strategy's exchange divides the summed gradient.
        per: `global` is exact; `per_rank` divides by the rank's own count, as plain DDP would.
        loss_scale: a further factor, the same on all ranks; `None`: none.
    """

    def __init__(
        self,
        message: StepMessage,
        gradient_divisor: int,
        per: Literal["global", "per_rank"] = "global",
        loss_scale: LossScale | None = None,
    ) -> None:
        self.message, self.loss_scale = message, loss_scale
        self._gradient_divisor, self._per = gradient_divisor, per

    @property
    def local_count(self) -> float:
        """This rank's count in the last step that began."""
        return self.message.local_count

    def start(self, local_count: float) -> None:
        """Begin a step with this rank's count; every rank calls it once a step."""
        self.message.send(local_count)

    def factor(self) -> tuple[float, float]:
        """Wait for the other ranks' counts.

        Returns:
            The factor of the local loss sums with the loss scale (0 if nothing in the whole batch counts),
            and the global count.
        """
        global_count = self.message.receive()
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        if self._per == "per_rank":
            return scale / (self.local_count or 1), global_count
        return (scale * self._gradient_divisor / global_count if global_count else 0.0), global_count
