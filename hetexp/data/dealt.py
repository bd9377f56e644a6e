"""Training samples dealt out to the ranks, for strategies in which each of them trains by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetexp.core.split import apportion
from hetexp.data.sampler import GlobalSampler, Indices, Position, random_order


class DealtSampler(GlobalSampler):
    """Draws global batches of which a rank's slice always comes from its own part of the samples.

    The parts are drawn once by the seed. In each epoch every sample comes once, in a new order within its
    part; batches have the sizes that `GlobalSampler`'s have, and are cut by the same shares.

    Args:
        shares: of each rank in a batch (`hetexp.core.split.apportion`).
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
        sizes = [full * count + rest for count, rest in zip(self._counts, self._left, strict=True)]
        dealt = random_order(seed, (0, 1), num_samples)  # no epoch has this key
        self.parts: tuple[Indices, ...] = tuple(np.split(dealt, np.cumsum(sizes)[:-1]))
        """The samples of each rank."""

    def _settle(self, position: Position) -> Position:
        """A position that another batch size led to goes on with the next whole batch: parts end there."""
        batches = -(-position.offset // self.global_batch_size)
        end = min(batches * self.global_batch_size, self._epoch_size)
        return super()._settle(Position(position.epoch, end))

    def _order(self, epoch: int) -> Indices:
        cached = self._cached  # the loader's thread may be about to replace it
        if cached is None or cached[0] != epoch:
            place = np.empty(self.num_samples, dtype=np.int64)
            place[random_order(self.seed, (epoch,), self.num_samples)] = np.arange(self.num_samples)
            mixed = [part[np.argsort(place[part], kind="stable")] for part in self.parts]
            pieces = [
                part[batch * count : (batch + 1) * count]
                for batch in range(self._full)
                for part, count in zip(mixed, self._counts, strict=True)
            ]
            pieces += [part[self._full * count :] for part, count in zip(mixed, self._counts, strict=True)]
            cached = self._cached = (epoch, np.concatenate(pieces))
        return cached[1]
