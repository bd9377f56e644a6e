"""Makes a real device slower than it is, or lets it use only a part of its memory (`slow`, `memory_gib`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from hetexp.core.device import DeviceSpec
from hetexp.hardware.base import Backend, StagePasses
from hetexp.hardware.emulation.memory_model import ModelledAllocator
from hetexp.hardware.emulation.ordered_faults import FaultyBackend
from hetexp.hardware.emulation.pacing import Slowdown

if TYPE_CHECKING:
    import torch
    from torch import nn


@cache
def altered(backend: type[Backend]) -> type[FaultyBackend]:
    """Return a backend's class with ordered faults, slow-down and memory limit around it."""
    if issubclass(backend, FaultyBackend):  # an emulated device models all of them
        return backend
    facts = {"__doc__": backend.__doc__, "__module__": backend.__module__}
    return cast("type[FaultyBackend]", type(backend.__name__, (_AlteredBackend, backend), facts))


class _AlteredBackend(FaultyBackend):
    """Wraps the class of a real backend, which follows in the method resolution order."""

    def __init__(self, spec: DeviceSpec) -> None:
        super().__init__(spec)
        self._slowdown: Slowdown | None = None
        self._allocator: ModelledAllocator | None = None

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
        self._slowdown = self._slow_down(model)
        self._limit(model, optimizer, [])
        super().attach(model, optimizer, inputs)

    def attach_stages(
        self, stages: Sequence[StagePasses], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        modules = [stage.module for stage in stages]
        for module in modules:
            self._slow_down(module)
        self._limit(model, optimizer, modules)
        super().attach_stages(stages, model, optimizer)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if self._slowdown is not None:
            self._slowdown.catch_up()
        with super().waiting():
            yield
        if self._slowdown is not None:
            self._slowdown.go_on()

    def free_memory_bytes(self) -> int | None:
        free = super().free_memory_bytes()
        return self._allocator.free_bytes if free is None and self._allocator is not None else free

    def _slow_down(self, module: nn.Module) -> Slowdown | None:
        if self.spec.slow == 1.0 and not self.faults.lasting:
            return None
        return Slowdown(module, lambda: self.slower, self)

    def _limit(self, model: nn.Module, optimizer: torch.optim.Optimizer, stages: Sequence[nn.Module]) -> None:
        """Limit the device to `spec.memory_bytes`, by torch's allocator or else by a model of it."""
        size = self.spec.memory_bytes
        if not self.spec.limited:
            return
        assert size is not None
        if not self.limit_memory(size):
            self._allocator = ModelledAllocator(model, optimizer, size, str(self.spec), stages)
