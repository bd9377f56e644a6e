"""The interface between hetexp and a vendor's runtime: one small file a backend implements it."""

from __future__ import annotations

import pkgutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hetexp.core.cost.step import Work
from hetexp.core.device import DeviceSpec
from hetexp.core.fault import FaultSchedule
from hetexp.core.precision import AUTOCAST
from hetexp.hardware.detection.builds import TorchBuild
from hetexp.hardware.detection.detected import DetectedCard
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import PciCard
from hetexp.hardware.emulation.ordered_faults import suffer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetexp.hardware.emulation.memory_model import ModelledAllocator
    from hetexp.hardware.emulation.pacing import Slowdown
    from hetexp.hardware.energy import Counter
    from hetexp.hardware.gauges import Gauge

BACKENDS = {
    "cpu": "hetexp.hardware.backends.cpu:CpuBackend",
    "cuda": "hetexp.hardware.backends.cuda:CudaBackend",
    "hip": "hetexp.hardware.backends.hip:HipBackend",
    "xpu": "hetexp.hardware.backends.xpu:XpuBackend",
    "mps": "hetexp.hardware.backends.mps:MpsBackend",
    "emulated": "hetexp.hardware.emulation.emulated:EmulatedBackend",
}
ACCELERATORS = ("cuda", "hip", "xpu", "mps")
"""Backends of cards that a machine can have; detection asks each of them."""
VISIBILITY = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
)
"""Variables by which a person or a scheduler hides cards; a rank gets one of them, and none of the others."""


@dataclass(frozen=True)
class StagePasses:
    """A piece of a model that a device computes beside others, of the same model or on other devices."""

    module: nn.Module
    inputs: Any
    """A small batch of what goes into it, on the device; where another piece gives it, it requires a
    gradient."""
    takes_bytes: int
    """What comes from another device for one sample; 0 for the first piece."""
    gives_bytes: int
    """What goes to another device of one sample; 0 for the last one."""


def backend_class(name: str) -> type[Backend]:
    """Return the class of a backend by its name; its vendor library is not imported yet."""
    located: type[Backend] = pkgutil.resolve_name(BACKENDS[name])
    return located


def environment_together(specs: Sequence[DeviceSpec]) -> dict[str, str]:
    """Return the variables that make a process see all of these devices of one backend, each once."""
    together: dict[str, list[str]] = {}
    for spec in specs:
        for key, value in backend_class(spec.backend).environment(spec).items():
            values = together.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: ",".join(values) for key, values in together.items()}


def visible_places(specs: Sequence[DeviceSpec]) -> list[int]:
    """Return the number by which a process that sees all of these devices calls each of them."""
    seen = [backend_class(spec.backend).environment(spec) for spec in specs]
    apart = [one for place, one in enumerate(seen) if one not in seen[:place]]
    return [apart.index(one) for one in seen]


class Backend(ABC):
    """Drives one device in one rank's process.

    The class methods run in the launcher, which never touches an accelerator and may not import torch
    through them; the instance methods run in the rank.
    """

    native_collective: ClassVar[str | None] = None
    """torch.distributed's backend for a group of only such devices, where the vendor has one."""
    vendor: ClassVar[str] = "cpu"
    """Whose cards it drives."""
    wheel: ClassVar[str] = "cpu"
    """Environment that `hetexp env create` makes for it: `cuda`, `rocm`, `xpu`, `cpu`."""
    torch_type: ClassVar[str] = "cpu"
    """torch's word for such devices."""
    energy_source: ClassVar[str] = "measured"
    """What its energy counter is: `measured` or `modelled`."""
    computes_on_cpu: ClassVar[bool] = False
    """Whether ranks of this backend compete for the cores of the CPU."""
    copies_page_locked: ClassVar[bool] = False
    """Whether copies from page-locked memory of the host (`torch.Tensor.pin_memory`) run beside its work."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.faults = FaultSchedule([], spec.id)
        self.spared_port: int | None = None
        """Of the launcher's store: connections to it survive a fault of the network."""
        self.deviation_seed: int | None = None
        self.precision: str | None = None
        """What the rank's model computes in; `None`: in the type of its parameters."""
        self.slower = spec.slow
        """How many times slower than by itself the device is made to be at the moment."""
        self.num_visible = 1
        """Cards that this process sees; more than the one where the strategy drives several (`dp`)."""
        self._first_step_at: float | None = None
        self.waits: list[tuple[Any, Any]] = []
        """Marks around each wait for other ranks in the midst of a pass, until a meter takes them."""
        self._slowdown: Slowdown | None = None
        self._allocator: ModelledAllocator | None = None
        self._passes: list[nn.Module] = []
        """The pieces of the model that are called, where it is not called as a whole."""

    @classmethod
    def cards(cls, machine: Machine, on_bus: Sequence[PciCard]) -> list[DetectedCard]:
        """Return every card of the vendor in the machine, usable or not, and what is read of it.

        Numbers and ids are given afterwards (`hetexp.hardware.detection.inventory`). A driver, a library or a
        query that fails costs the field that it would have filled, never a card.

        Args:
            on_bus: the cards of this vendor that the kernel sees.
        """
        return []

    @classmethod
    @contextmanager
    def gauges(cls, cards: Sequence[DetectedCard], machine: Machine) -> Iterator[list[Gauge | None]]:
        """Open what tells the state of these cards, each of which is read again and again.

        Yields:
            For each card a function that returns its state or raises `CardLostError`; `None` if unknown.
        """
        yield [None for _ in cards]

    @classmethod
    def hide(cls, found: Sequence[DetectedCard], machine: Machine) -> tuple[list[DetectedCard], list[str]]:
        """Mark the cards that inherited visibility variables hide (`DetectedCard.hidden_by`).

        Args:
            found: this backend's cards, numbered.

        Returns:
            The same cards in the same order, and what is wrong with the variables: a person who wants one of
            these cards sees this error instead of getting another card.
        """
        return list(found), []

    @classmethod
    def build_problem(cls, spec: DeviceSpec, build: TorchBuild) -> str | None:
        """Return why this torch cannot drive the device, `None` where it can."""
        return None

    @classmethod
    @abstractmethod
    def environment(cls, spec: DeviceSpec) -> dict[str, str]:
        """Return the variables that make a process see only this device; set before torch is imported.

        All others of `VISIBILITY` are removed from the rank's environment.
        """

    @abstractmethod
    def torch_device(self) -> torch.device:
        """Return the device for tensors, made current.

        Raises:
            SetupError: this interpreter's torch cannot drive the device.
        """

    @abstractmethod
    def mark(self) -> Any:
        """Return a point in time on the device, after all work queued so far, without waiting for it."""

    @abstractmethod
    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks that are both in the past (see `synchronize`)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""

    def wait(self, mark: Any) -> None:
        """Return once the device has come to the mark."""
        self.synchronize()

    def read_later(self, value: torch.Tensor) -> Callable[[], float]:
        """Return what reads a number of the device as it is now, after more work has been queued.

        It waits for the device to have come to this call, and not for what follows.
        """
        return lambda: float(value)

    def lock_pages(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Page-lock memory of the host, so that the device copies into it while the host goes on.

        Returns:
            What undoes it, before the memory is given back; `None` where it is not locked.
        """
        return None

    def random_states(self) -> list[torch.Tensor]:
        """Return the state of the random numbers of each card that this process sees; none of a CPU's.

        Those of the CPU are the process's own, whatever it drives.
        """
        return []

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:  # noqa: B027 - likewise
        """Put back what `random_states` returned of such a device, here or elsewhere."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surround what waits for other ranks in the midst of a pass: it is no work of this device."""
        if self._slowdown is not None:
            self._slowdown.catch_up()
        start = self.mark()
        yield
        self.waits.append((start, self.mark()))
        if self._slowdown is not None:
            self._slowdown.go_on()

    @contextmanager
    def energy_counter(self, machine: Machine) -> Iterator[Counter | None]:
        """Open the counter of the energy that the device draws; `None` if it has none."""
        yield None

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """Return the most memory this process has held on the device, `None` if it is not counted."""

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
        """Prepare the device for this model, before a strategy wraps it.

        Args:
            inputs: a small batch of the training data, on the device.
        """
        if self.spec.slow != 1.0 or self.faults.lasting:
            from hetexp.hardware.emulation.pacing import Slowdown

            self._slowdown = Slowdown(model, lambda: self.slower, self)
        if self.spec.limited:
            self.limit_memory(model, optimizer)

    def attach_stages(
        self, stages: Sequence[StagePasses], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Prepare the device for some pieces of a model, instead of `attach`.

        Args:
            model: what this device has of it.
        """
        if self.spec.slow != 1.0 or self.faults.lasting:
            from hetexp.hardware.emulation.pacing import Slowdown

            for stage in stages:
                Slowdown(stage.module, lambda: self.slower, self)
        self._passes = [stage.module for stage in stages]
        if self.spec.limited:
            self.limit_memory(model, optimizer)

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """Return a context in which a model of float32 weights computes in this precision."""
        if precision not in AUTOCAST:
            return nullcontext()
        import torch

        return torch.autocast(self.torch_type, dtype=getattr(torch, precision))

    def computes_in(self, precision: str) -> bool | None:
        """Return whether the device in hand has a precision natively, `None` where it cannot be asked."""
        return None

    def limit_memory(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let the device hold no more than `spec.memory_bytes`, by a model of what it holds."""
        from hetexp.hardware.emulation.memory_model import ModelledAllocator

        assert self.spec.memory_bytes is not None
        name = str(self.spec)
        self._allocator = ModelledAllocator(model, optimizer, self.spec.memory_bytes, name, self._passes)

    def free_memory_bytes(self) -> int | None:
        """Return what the device could still give to tensors, `None` where that is not known."""
        return self._allocator.free_bytes if self._allocator is not None else None

    def release_memory(self) -> None:  # noqa: B027 - only some keep any
        """Give memory that is kept for later tensors back to the device."""

    def begin_step(self, step: int) -> None:
        """Let the faults happen that are ordered for this step (the number of steps already done).

        Raises:
            torch.OutOfMemoryError: one of them is an out-of-memory.
            torch.AcceleratorError: one of them is an error of the device.
        """
        if step < 0:  # a rehearsal
            return
        now = time.perf_counter()
        self._first_step_at = self._first_step_at or now
        elapsed = now - self._first_step_at
        self.slower = self.spec.slow * self.faults.factor(step, elapsed)
        for due in self.faults.due(step, elapsed):
            suffer(due, str(self.spec), self.spared_port)

    def begin_update(self) -> None:  # noqa: B027 - only a paced device has to know
        """Gradients are exchanged; the optimizer follows."""

    def pause(self) -> None:  # noqa: B027 - likewise
        """Something else than training is about to begin: what the device is busy with ends first."""

    def resume(self) -> None:  # noqa: B027 - likewise
        """Something else than training (an evaluation, a checkpoint) came between two steps."""

    def backward_done(self) -> float:
        """Return the fraction of the running backward pass that is over, as far as a paced device knows."""
        return 1.0

    def rehearsal_scale(self) -> float | None:
        """Return the smallest `time_scale` that the rehearsed passes allow; only emulated devices do."""
        return None

    def modelled_work(self, microbatches: Sequence[int], bytes_per_sample: int) -> Work | None:
        """Return what the catalogue says a step of these microbatches takes; only emulated devices know."""
        return None

    def start_pacing(self, time_scale: float) -> None:  # noqa: B027
        """Begin to pace passes at the scale that all ranks agreed on; only emulated devices do."""

    def paced(self) -> list[tuple[str, float, float]]:
        """Return name, real and modelled seconds of each phase that was paced."""
        return []

    def invalid_reason(self) -> str | None:
        """Return why this rank's timings must not be used, or `None` where they may."""
        return None
