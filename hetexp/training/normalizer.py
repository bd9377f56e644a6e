"""The factor that makes a sum of losses over unequal ranks the gradient of the global batch's mean.

With the loss summed locally, rank r's backward gives g_r = ∇ Σ_{i in its slice} loss_i. The exact gradient of
the global batch is (Σ_r g_r) / N with N the count of samples or unmasked tokens of all ranks that step
together, or the sum of their weights (pytorch/pytorch#67253). W is the number of these ranks, S the loss
scale (1 unless a rank computes in float16). Every place that scales a loss or a gradient, but for clipping:

| strategy | loss, before backward (1) | exchange | gradient, before clipping (2) |
|---|---|---|---|
| `ddp` | × S · W / N | ÷ W, then sum (`comm/hook.py`, or torch's own) | ÷ S |
| `single`, `dp` | × S / N | – | ÷ S |
| `local_sgd`, `independent` | × S / N, N its own count | – | ÷ S |
| `hierarchical_sgd` | × S / N, N its host's count | sum over the host | ÷ S |
| `hetexp.Synchronous` | × S / N | ÷ S, then its own (`strategy/synchronous/`) | – |
| `pipeline`, `hybrid` | × S / N on the last stage | sum | ÷ S |
| a script (`hetexp launch`) | – | ÷ W under `ddp` | × W / N |

(1) is in `training/gradient.py`, for stages in `strategy/pipeline/staging.py`. (2) ÷ S is `LossScale.unscale`
(`training/nonfinite/loss_scale.py`), called from `training/step.py`, for stages from
`strategy/pipeline/engine.py`; × W / N is in `library/step.py`, with W = 1 under `single`. Clipping follows in
`training/step.py`, for scripts in `library/run.py`. An exchange divides by `Strategy.gradient_divisor`: W, or
1 if it only sums. The syncs of local SGD scale changes of weights, not gradients
(`strategy/local_sgd/outer.py`). With `debug.normalizer=per_rank` the factor is S ÷ the rank's own count, as
in plain DDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hetexp.comm.step_message import StepMessage
from hetexp.training.nonfinite.loss_scale import LossScale


class LossNormalizer:
    """Computes the factor of a step's local loss sums.

    Args:
        message: carries the ranks' counts.
        gradient_divisor: factor by which the strategy's exchange divides; 1 if it only sums.
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
        self._global_count: float = 0

    @property
    def local_count(self) -> float:
        """This rank's count in the last step that began."""
        return self.message.local_count

    @property
    def term_counts(self) -> tuple[float, Sequence[float]]:
        """The count that divides the loss, and those that divide its terms, once `factor` is known."""
        message = self.message
        if self._per == "per_rank":
            return self.local_count, message.local_terms
        return self._global_count, message.all_terms

    def start(self, local_count: float, local_terms: Sequence[float] = ()) -> None:
        """Begin a step with this rank's count; every rank calls it once a step.

        Args:
            local_terms: this rank's count of each term of a loss with several; equally many on every rank.
        """
        self.message.send(local_count, local_terms)

    def factor(self) -> tuple[float, float]:
        """Wait for the other ranks' counts.

        Returns:
            The factor of the local loss sums with the loss scale (0 if nothing in the whole batch counts),
            and the global count.
        """
        global_count = self._global_count = self.message.receive()
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        if self._per == "per_rank":
            return scale / (self.local_count or 1), global_count
        return (scale * self._gradient_divisor / global_count if global_count else 0.0), global_count
