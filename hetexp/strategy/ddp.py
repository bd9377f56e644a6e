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
from hetexp.core.errors import ConfigError, must_be
from hetexp.plan.exchange_checks import check_wire, refuse_boundary_wire
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.plan.strategy import BUCKET_CAP_BYTES, Strategy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetexp.comm.communicator import Communicator
    from hetexp.comm.empty_share import EmptyShareGuard


log = logging.getLogger(__name__)

FIRST_BUCKET_BYTES = 2**20
"""torch's default for the first bucket, which leaves sooner than the others."""
LEAST_DIVIDED_BYTES = 2**17
"""Fewest bytes of gradients for which a second exchange costs less than it hides."""


class DDP(Strategy):
    """Keeps a replica a rank and all-reduces the gradients during backward.

    The arguments are torch's own (`torch.nn.parallel.DistributedDataParallel`); `static_graph` promises
    that every step runs the same graph, which several microbatches a step break.

    Args:
        find_unused_parameters: whether parameters may stay without a gradient in a step.
        bucket_cap_mb: size of a bucket of gradients, in MiB. Smaller buckets leave earlier, larger ones cost
            less each. `None`: 25; two thirds of a model's gradients if they are at most 2 MiB, so that these
            are exchanged during backward.
        static_graph: whether every step runs the same graph, which several microbatches a step break.
        gradient_as_bucket_view: whether gradients lie in the buckets, without a second copy.
        broadcast_buffers: whether all ranks take rank 0's buffers at the start of each step.
        sync_batch_norm: whether BatchNorm normalises over all ranks' samples, which is exact. Otherwise each
            rank's statistics are its own, and rank 0's are kept.
    """

    name: ClassVar[str] = "ddp"
    exact = True
    reforms = True
    compiles = True

    def __init__(
        self,
        find_unused_parameters: bool = False,
        bucket_cap_mb: PositiveFloat | None = None,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        sync_batch_norm: bool = True,
    ) -> None:
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb = bucket_cap_mb
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.broadcast_buffers = broadcast_buffers
        self.sync_batch_norm = sync_batch_norm
        self._equal = False
        """Whether the ranks' weights are equal before `wrap`."""

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        problems = []
        trainer = config.trainer
        if self.static_graph and (trainer.accumulate > 1 or trainer.microbatch_size is not None):
            problems.append(
                must_be("strategy.static_graph", "false where gradients accumulate over microbatches", True)
            )
        return problems

    def check_exchange(self, config: Config) -> list[str]:
        return check_wire(config) + refuse_boundary_wire(config, self.name)

    def check_script(self) -> list[str]:
        return [] if type(self) is DDP else super().check_script()  # a subclass may want a loop of its own

    def predict(self, inputs: PredictionInputs) -> list[PredictedRun]:
        return inputs.all_reduced()

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        from hetexp.comm.empty_share import EmptyShareGuard
        from hetexp.strategy.spectral import spectral_iterations
        from hetexp.torch_private import exclude_from_ddp

        # torch 2.13 deprecates the argument and warns whenever it is given, also with its own default.
        buffers: dict[str, Any] = {} if self.broadcast_buffers else {"broadcast_buffers": False}
        guard, constant = EmptyShareGuard(model), getattr(model, "constant_names", None)
        guard.iterations = spectral_iterations(model)
        if callable(constant):  # every rank has them: they need not be sent, at the start or ever
            names = [f"model.{name}" for name in constant()]
            exclude_from_ddp(guard, names)
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        cap = self.bucket_cap_bytes(trained)
        # Without `device_ids`: the module is on its device already, and CPU ranks refuse the argument.
        return DistributedDataParallel(
            guard,
            find_unused_parameters=self.find_unused_parameters,
            # Without an argument torch begins with a smaller bucket, which leaves sooner.
            bucket_cap_mb=None if cap == BUCKET_CAP_BYTES else cap / 2**20,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            # Otherwise torch would send the whole model again.
            init_sync=not self._equal,
            **buffers,
        )

    def bucket_cap_bytes(self, gradient_bytes: int) -> int:
        if self.bucket_cap_mb is not None:
            return int(self.bucket_cap_mb * 2**20)
        divided = LEAST_DIVIDED_BYTES <= gradient_bytes <= 2 * FIRST_BUCKET_BYTES
        return gradient_bytes * 2 // 3 if divided else BUCKET_CAP_BYTES

    def unwrap(self, module: nn.Module, model: nn.Module) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        from hetexp.torch_private import remove_ddp_hooks

        self._equal = True
        if isinstance(module, DistributedDataParallel):
            # Its hooks on the parameters would go on exchanging, and the module, which refers to itself,
            # would keep the group's connections open. The reducer is safe to destroy here: its remaining
            # collectives have failed.
            remove_ddp_hooks(module)
            del module.reducer, module.logger
            module.process_group = None  # type: ignore[assignment]
            norms = _guard_of(module).norms
            if norms is not None:
                norms.leave()
        return model

    def attach_group(
        self,
        module: nn.Module,
        communicator: Communicator,
        inputs: Any,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        from hetexp.strategy.batch_norm import SynchronisedNorms, batch_norms
        from hetexp.training.measuring.trial_pass import used_parameters

        guard = _guard_of(module)
        model = guard.bare_model
        unused = self.find_unused_parameters or self.static_graph
        if communicator.world_size > 1 and self.sync_batch_norm and batch_norms(model):
            norms = guard.norms = SynchronisedNorms(model, communicator.duplicate_for_rows(), waiting, unused)
            norms.record(inputs)
        elif unused:
            # A zero is a gradient: with it an optimizer would decay weights that no rank has used, and the
            # static graph would change.
            guard.used = used_parameters(model, inputs) or None
        _warn_of_batch_norm(model, communicator)

    def equal_passes(self, module: nn.Module) -> bool:
        guard = _guard_of(module)
        return guard.norms is not None or bool(guard.iterations)

    def check_exchanged(self, module: nn.Module) -> None:
        """Refuse trained parameters without a gradient: DDP never sends their buckets.

        torch itself reports them one step later, when the weights differ already, and never after the last
        step.
        """
        if self.find_unused_parameters or self.static_graph:
            return
        guard = _guard_of(module)
        if any(p.grad is None and p.requires_grad for p in guard.trained):
            named = guard.bare_model.named_parameters()
            unused = [name for name, p in named if p.requires_grad and p.grad is None]
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            raise ConfigError(
                "`strategy.find_unused_parameters` must be true if a step leaves parameters unused, but is "
                f"False instead, and {', '.join(unused[:5])}{more} got no gradient. Or freeze them "
                "(requires_grad=False)."
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
        """Return the guard; `None` if BatchNorm layers wait for other ranks inside a pass.

        A rank that breaks off there leaves the others waiting, so running out of memory ends the run.
        """
        guard = _guard_of(module)
        return guard if guard.norms is None else None

    def abort_exchange(
        self, module: nn.Module, missing: Sequence[nn.Parameter], gradient: float = math.nan
    ) -> None:
        """Run the reducer's hooks for the missing parameters, as the rest of backward would have.

        Every bucket is then sent, and the last one ends the reduction. Without `find_unused_parameters` each
        hook may run only once in a step. With it the reducer marks unused parameters as ready, without saying
        which. So each parameter is tried separately, and the reducer refuses those that it has marked
        (`checkAndRaiseMarkedTwiceError` in torch's `reducer.cpp`).

        Raises:
            torch.OutOfMemoryError: every gradient was sent already, so the other ranks cannot learn of it.
        """
        import torch

        from hetexp.comm.empty_share import given_gradient

        if not missing:
            raise torch.OutOfMemoryError("Memory ran out after the last gradient was sent.")
        groups = [[parameter] for parameter in missing] if self.find_unused_parameters else [list(missing)]
        sparse = _guard_of(module).sparse
        for group in groups:
            zero = given_gradient(group, gradient, sparse)
            assert zero is not None
            try:
                zero.backward()
            except RuntimeError as error:
                if not self.find_unused_parameters or "ready only once" not in str(error):
                    raise

    def gradient_divisor(self, world_size: int) -> int:
        return world_size

    def exchanged_bytes(self, model: nn.Module, world_size: int) -> int | None:
        """Return the bytes of torch's buckets, which hold every trained parameter's gradient."""
        trained = (p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        return sum(trained) if world_size > 1 else 0

    def keeps_gradients(self) -> bool:
        return self.gradient_as_bucket_view

    def bucket_bytes(self, gradient_bytes: int, accumulates: bool) -> int:
        """Return the bytes of torch's buckets, which hold each gradient once (`reducer.cpp`).

        As views into the buckets, gradients take no further memory. But `no_sync` does not use the buckets:
        the first microbatch's gradients are separate tensors, and become views at the exchange. The buckets
        of the first step are freed before the forward pass of the second.
        """
        return 0 if self.gradient_as_bucket_view and not accumulates else gradient_bytes


def _guard_of(module: nn.Module) -> EmptyShareGuard:
    from torch.nn.parallel import DistributedDataParallel

    from hetexp.comm.empty_share import EmptyShareGuard

    assert isinstance(module, DistributedDataParallel)
    assert isinstance(module.module, EmptyShareGuard)
    return module.module


def _warn_of_batch_norm(model: nn.Module, communicator: Communicator) -> None:
    """Warn of BatchNorm layers that are not exact: each rank has its own statistics of a batch."""
    from hetexp.strategy.batch_norm_layer import SynchronisedBatchNorm
    from hetexp.torch_private import BatchNormBase

    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, BatchNormBase) and not isinstance(module, SynchronisedBatchNorm)
    ]
    if names and communicator.world_size > 1 and communicator.rank == 0:
        log.warning(
            "%s and %d more BatchNorm layers: their statistics are each rank's own, and rank 0's are kept. "
            "strategy.sync_batch_norm=true makes torch's layers exact; GroupNorm and LayerNorm are exact.",
            names[0],
            len(names) - 1,
        )
