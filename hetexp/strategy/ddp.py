"""torch's DistributedDataParallel over equal and unequal devices."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveFloat

from hetexp.core.config import Config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import must_be
from hetexp.strategy.base import Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetexp.strategy.empty_share import EmptyShareGuard


log = logging.getLogger(__name__)


class DDP(Strategy):
    """Keeps a replica a rank and all-reduces the gradients during backward.

    The arguments are torch's own (`torch.nn.parallel.DistributedDataParallel`); `static_graph` promises
    that every step runs the same graph, which accumulation and a share that is empty only sometimes break.
    """

    name: ClassVar[str] = "ddp"
    predicted_as = "all_reduce"

    def __init__(
        self,
        find_unused_parameters: bool = False,
        bucket_cap_mb: PositiveFloat = 25.0,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
    ) -> None:
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb = bucket_cap_mb
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.broadcast_buffers = broadcast_buffers

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        problems = []
        trainer = config.trainer
        if self.static_graph and (trainer.accumulate > 1 or trainer.microbatch_size is not None):
            problems.append(
                must_be("strategy.static_graph", "false where gradients accumulate over microbatches", True)
            )
        if self.static_graph and not trainer.drop_last:
            problems.append(
                must_be(
                    "strategy.static_graph",
                    "false unless `trainer.drop_last` is true",
                    True,
                    "The short last batch can leave a rank without samples, which is another graph.",
                )
            )
        return problems

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        from hetexp.strategy.empty_share import EmptyShareGuard

        _warn_of_batch_norm(model)
        # torch 2.13 deprecates the argument and warns whenever it is given, also with its own default.
        buffers: dict[str, Any] = {} if self.broadcast_buffers else {"broadcast_buffers": False}
        # No `device_ids`: the module is on its device already, and CPU ranks refuse the argument.
        return DistributedDataParallel(
            EmptyShareGuard(model),
            find_unused_parameters=self.find_unused_parameters,
            bucket_cap_mb=self.bucket_cap_mb,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            **buffers,
        )

    def accumulate(self, module: nn.Module) -> AbstractContextManager[None]:
        from torch.nn.parallel import DistributedDataParallel

        assert isinstance(module, DistributedDataParallel)
        context: AbstractContextManager[None] = module.no_sync()
        return context

    def exchange_through(self, module: nn.Module, hook: Callable[[Any, Any], Any]) -> None:
        from torch.nn.parallel import DistributedDataParallel

        assert isinstance(module, DistributedDataParallel)
        module.register_comm_hook(None, hook)

    def varies_passes(self) -> bool:
        return not self.static_graph  # several passes have another graph than one

    def guard(self, module: nn.Module) -> EmptyShareGuard | None:
        from torch.nn.parallel import DistributedDataParallel

        from hetexp.strategy.empty_share import EmptyShareGuard

        assert isinstance(module, DistributedDataParallel)
        assert isinstance(module.module, EmptyShareGuard)
        return module.module

    def end_exchange(self, module: nn.Module, missing: Sequence[nn.Parameter]) -> None:
        """Let the reducer's own hooks run for the missing parameters, as the rest of backward would have.

        Every bucket is then sent, and the last one ends the reduction. Without `find_unused_parameters` each
        hook may run only once in a step. With it the reducer counts parameters as ready that the step does
        not use, and which these are is its secret: each parameter is tried by itself, and the reducer refuses
        those before anything happens (`checkAndRaiseMarkedTwiceError` in torch's `reducer.cpp`).

        Raises:
            torch.OutOfMemoryError: every gradient was sent already, so that the other ranks cannot be told.
        """
        import torch

        from hetexp.strategy.empty_share import given_gradient

        if not missing:
            raise torch.OutOfMemoryError("Memory ran out after the last gradient was sent.")
        groups = [[parameter] for parameter in missing] if self.find_unused_parameters else [list(missing)]
        for group in groups:
            zero = given_gradient(group, math.nan)
            assert zero is not None
            try:
                zero.backward()
            except RuntimeError as error:
                if not self.find_unused_parameters or "ready only once" not in str(error):
                    raise

    def averaged_over(self, world_size: int) -> int:
        return world_size

    def keeps_gradients(self) -> bool:
        return self.gradient_as_bucket_view

    def bucket_bytes(self, gradient_bytes: int, accumulates: bool) -> int:
        """Return the bytes of torch's buckets, which hold each gradient once (`reducer.cpp`).

        As views into the buckets, gradients take no memory of their own. But `no_sync` leaves the buckets
        alone: the first microbatch's gradients are tensors of their own, and become views at the exchange.
        The buckets of the first step give way to those of the second before its forward pass.
        """
        return 0 if self.gradient_as_bucket_view and not accumulates else gradient_bytes


def _warn_of_batch_norm(model: nn.Module) -> None:
    """Say what is not exact: the statistics of a batch are each rank's own."""
    import torch.distributed as dist
    from torch.nn.modules.batchnorm import _BatchNorm

    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if names and dist.get_world_size() > 1 and dist.get_rank() == 0:
        log.warning(
            "%s and %d more BatchNorm layers: their statistics are each rank's own, and rank 0's are kept. "
            "GroupNorm or LayerNorm would be exact.",
            names[0],
            len(names) - 1,
        )
