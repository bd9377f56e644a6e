"""Training samples partitioned among the ranks, for strategies whose ranks train independently."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetexp.core.split import apportion
from hetexp.data.sampler import GlobalSampler, Indices, Position, random_order


class PartitionedSampler(GlobalSampler):
    """Draws global batches of which each rank's slice comes from its own part of the samples.

    The seed decides the parts. In each epoch every sample occurs once, in a new order within its part.
    Batches have the sizes of `GlobalSampler`'s and are split by the same shares.

    Args:
        shares: share of each rank in a batch (`hetexp.core.split.apportion`).
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        seed: int,
        shares: Sequence[float],
        drop_last: bool = False,
        overfit_batches: int = 0,
    ) -> None:
        super().__init__(num_samples, global_batch_size, seed, drop_last, overfit_batches)
        full, left = divmod(num_samples, global_batch_size)
        self._full, self._counts = full, apportion(global_batch_size, shares).counts
        self._left = apportion(left, shares).counts
        sizes = [full * count + last for count, last in zip(self._counts, self._left, strict=True)]
        order = random_order(seed, (0, 1), num_samples)  # no epoch has this key
        self.parts: tuple[Indices, ...] = tuple(np.split(order, np.cumsum(sizes)[:-1]))
        """The samples of each rank."""

    def _batch_start(self, position: Position) -> Position:
        """Move a position within a batch, left by another batch size, to the next batch: parts end there."""
        batches = -(-position.offset // self.global_batch_size)
        end = min(batches * self.global_batch_size, self._epoch_size)
        return super()._batch_start(Position(position.epoch, end))

    def _order(self, epoch: int) -> Indices:
        cached = self._cached  # the loader's thread may be about to replace it
        if cached is None or cached[0] != epoch:
            place = np.empty(self.num_samples, dtype=np.int64)
            place[random_order(self.seed, (epoch,), self.num_samples)] = np.arange(self.num_samples)
            mixed = [part[np.argsort(place[part], kind="stable")] for part in self.parts]
            slices = [
                part[batch * count : (batch + 1) * count]
                for batch in range(self._full)
                for part, count in zip(mixed, self._counts, strict=True)
            ]
            slices += [part[self._full * count :] for part, count in zip(mixed, self._counts, strict=True)]
            cached = self._cached = (epoch, np.concatenate(slices))
        return cached[1]
