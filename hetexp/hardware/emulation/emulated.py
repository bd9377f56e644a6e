"""An emulated card: real arithmetic on the CPU, at the card's modelled speed and in its modelled memory.

Modelled times, each × `time_scale`: a forward pass `link(inputs) + overhead + FLOPs / (peak rate ×
efficiency)`; a backward pass, the same without inputs; an update `overhead + bytes moved / memory bandwidth`.
Kernels bound by memory bandwidth and the driver's work are not modelled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from hetexp.core.cost.step import Work
from hetexp.core.device import GIB, DeviceSpec
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.base import Counter, StagePasses
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.emulation.deviation import Deviation
from hetexp.hardware.emulation.memory_model import ModelledAllocator
from hetexp.hardware.emulation.ordered_faults import FaultyBackend
from hetexp.hardware.emulation.pacing import Pacer, count_work

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetexp.hardware.catalogue import Card

OUTRUN_TOLERANCE = 0.02
"""Share of its modelled time that a device may run late before its timings are called invalid."""
SCALE_MARGIN = 1.5
"""Emulated time ÷ real time of passes at full speed, for a first pace that is surely slow enough."""
PACED_MARGIN = 1.25
"""Emulated time ÷ real time of passes at that pace, so that a busy moment is not longer than emulated."""
SHORTEST_PASS = 8e-3
"""Shortest time of a pass in seconds; the lateness of a sleep is small beside it."""
UPDATE_PASSES = 7
"""Times that an update moves each weight: AdamW reads weight, gradient and two moments, and writes three."""


class CardTimes:
    """The modelled times of one model's passes on one card.

    Args:
        card: figures of the card.
        precision: as the catalogue names it (`float32`).
        forward_flops: operations of one sample forward.
        backward_flops: operations of one sample backward.
        update_bytes: bytes that an update moves through the card's memory.
        deviation: how this card differs from its figures.
        takes_bytes: bytes of one sample that come from another device, to which their gradient returns.
        gives_bytes: bytes of one sample that go to another device, from which their gradient returns.
    """

    def __init__(
        self,
        card: Card,
        precision: str,
        forward_flops: float,
        backward_flops: float,
        update_bytes: float,
        deviation: Deviation | None = None,
        takes_bytes: int = 0,
        gives_bytes: int = 0,
    ) -> None:
        self.card = card
        self._rate = card.tflops[precision] * 1e12 * card.efficiency
        self._forward_flops, self._backward_flops = forward_flops, backward_flops
        self._update_bytes = update_bytes
        self._deviation = deviation or Deviation(None, 0)
        self._takes_bytes, self._gives_bytes = takes_bytes, gives_bytes
        self.slower = 1.0
        """Current factor of the times: heat, an ordered slow-down."""

    def forward(self, num_samples: int, num_bytes: int) -> float:
        travel = self.card.host_link.seconds(num_bytes)
        travel += self._travel(self._gives_bytes, num_samples)
        return travel + self._compute(self._forward_flops, num_samples)

    def backward(self, num_samples: int) -> float:
        both = (self._takes_bytes, self._gives_bytes)
        travel = sum(self._travel(num_bytes, num_samples) for num_bytes in both)
        return travel + self._compute(self._backward_flops, num_samples)

    def _travel(self, bytes_per_sample: int, num_samples: int) -> float:
        """Return the time of tensors between two stages on the card's link, in one direction."""
        return self.card.host_link.seconds(bytes_per_sample * num_samples) if bytes_per_sample else 0.0

    def update(self) -> float:
        travelled = self._update_bytes / (self.card.bandwidth_gb_per_second * 1e9)
        return (self.card.overhead_seconds + travelled) * self.slower

    def _compute(self, flops: float, num_samples: int) -> float:
        return self.slower * self._deviation.seconds(
            self.card.overhead_seconds, flops / self._rate, num_samples
        )


class EmulatedBackend(FaultyBackend, CpuBackend):
    """Paces the passes of one model and limits its memory."""

    name: ClassVar[str] = "emulated"
    energy_source: ClassVar[str] = "modelled"

    def __init__(self, spec: DeviceSpec) -> None:
        from hetexp.hardware.catalogue import card_of  # it imports pydantic, which detection does not need

        super().__init__(spec)
        self.card = card_of(spec)
        self.times: list[CardTimes] = []
        """Times of each paced module."""
        self._planned: CardTimes | None = None
        """Times of the first module without deviation, as planner and policies see the card."""
        self.pacer = Pacer()
        self._allocator: ModelledAllocator | None = None

    @classmethod
    def describe_card(cls, index: int, card: Card) -> DeviceSpec:
        """Return emulated device number `index`, with all facts of its card that a rank needs."""
        return DeviceSpec(
            id=f"emulated:{index}",
            backend="emulated",
            index=index,
            name=f"{card.name} (emulated)",
            vendor=card.vendor,
            memory_bytes=int(card.memory_gib * GIB),
            power_limit_watts=card.power_limit_watts,
            rates=dict(card.tflops),
            precisions=tuple(card.tflops),
            card=card.key,
            card_facts=card.model_dump(mode="json"),
        )

    def peak_memory_bytes(self) -> int | None:
        return self._allocator.peak_bytes if self._allocator is not None else None

    def free_memory_bytes(self) -> int | None:
        return self._allocator.free_bytes if self._allocator is not None else None

    @contextmanager
    def energy_counter(self, machine: Machine) -> Iterator[Counter | None]:
        """Yield a counter of the energy at the power limit during work, as `hetexp plan` predicts it."""
        yield self._joules if self.spec.power_limit_watts is not None else None

    def energy_is_plausible(self, joules: float, seconds: float) -> bool:
        return True  # modelled joules belong to modelled seconds

    def _joules(self) -> float:
        assert self.spec.power_limit_watts is not None
        return self.spec.power_limit_watts * self.pacer.modelled_seconds

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
        """Count the model's work on `inputs`, and hook its passes; delays begin with `start_pacing`."""
        self._attach([StagePasses(model, inputs, 0, 0)], model, optimizer)

    def attach_stages(
        self, stages: Sequence[StagePasses], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._attach(stages, model, optimizer, [stage.module for stage in stages])

    def _attach(
        self,
        stages: Sequence[StagePasses],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        """Pace some modules, and limit the memory of the model that they belong to."""
        weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        deviation = Deviation(self.deviation_seed, self.spec.index)
        # Under autocast, the weights stay in float32, but most of the work is in `precision`.
        precision = self.precision or str(next(model.parameters()).dtype).removeprefix("torch.")
        for stage in stages:
            forward, backward, fractions = count_work(stage.module, stage.inputs)
            figures = (self.card, precision, forward, backward, UPDATE_PASSES * weights)
            times = CardTimes(*figures, deviation, stage.takes_bytes, stage.gives_bytes)
            self.times.append(times)
            self._planned = self._planned or CardTimes(*figures)
            self.pacer.follow(stage.module, times, fractions)
        assert self.spec.memory_bytes is not None
        name = str(self.spec)
        self._allocator = ModelledAllocator(model, optimizer, self.spec.memory_bytes, name, modules)

    def begin_step(self, step: int) -> None:
        self.pacer.end_update()
        super().begin_step(step)
        for times in self.times:
            times.slower = self.slower

    def begin_update(self) -> None:
        self.pacer.begin_update()

    def pause(self) -> None:
        self.pacer.end_update()

    def resume(self) -> None:
        self.pacer.forget()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        with super().waiting():
            yield
        self.pacer.put_off(time.perf_counter() - started)

    def backward_done(self) -> float:
        return self.pacer.backward_done

    def rehearsal_scale(self) -> float | None:
        margin = PACED_MARGIN if self.pacer.time_scale else SCALE_MARGIN
        return max(self.pacer.needed_scale(margin), SHORTEST_PASS / self.pacer.shortest_pass())

    @property
    def steady(self) -> bool:
        return self.deviation_seed is None and not self.faults.events

    def modelled_work(self, microbatches: Sequence[int], bytes_per_sample: int) -> Work:
        assert self._planned is not None
        return Work(
            forward=tuple(self._planned.forward(n, n * bytes_per_sample) for n in microbatches),
            backward=tuple(self._planned.backward(n) for n in microbatches),
            update=self._planned.update(),
        )

    def start_pacing(self, time_scale: float) -> None:
        self.pacer.start(time_scale)

    def paced(self) -> list[tuple[str, float, float]]:
        return self.pacer.paced

    def invalid_reason(self) -> str | None:
        if self.pacer.late_share <= OUTRUN_TOLERANCE:
            return None
        return (
            f"{self.spec}: this machine's real work took {self.pacer.late_share:.0%} longer than the "
            f"emulated card's modelled time; raise `hardware.time_scale` above {self.pacer.time_scale:.3g}"
        )
