"""The interface between hetexp and a vendor's runtime; each backend implements it in a file of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hetexp.core.cost.step import Work
from hetexp.core.device import DeviceSpec
from hetexp.core.precision import AUTOCAST
from hetexp.hardware.detection.builds import TorchBuild
from hetexp.hardware.detection.detected import DetectedCard, Reading
from hetexp.hardware.detection.machine import Machine
from hetexp.hardware.detection.pci import PciCard

if TYPE_CHECKING:
    import torch
    from torch import nn

VISIBILITY = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
)
"""Variables by which the user or a scheduler hides cards. A rank gets only the variables of its backend."""
MOST_OF_LIMIT = 1.5
"""Mean power ÷ power limit above which an energy counter counts as wrong."""

Counter = Callable[[], float | None]
"""Returns the joules that a device has drawn since a fixed moment; `None` if that is not known."""
Gauge = Callable[[], Reading]
"""Returns the driver's reading of a card now, without the processes that hold it.

Raises:
    CardLostError: the driver can no longer reach the card.
"""


class CardLostError(Exception):
    """A card no longer answers; the text is its driver's."""


@dataclass(frozen=True)
class StagePasses:
    """A part of a model that this device computes; other devices compute the other parts."""

    module: nn.Module
    inputs: Any
    """A small batch of its inputs, on the device; they require a gradient if another part computes them."""
    takes_bytes: int
    """Bytes of one sample that come from another device; 0 for the first part."""
    gives_bytes: int
    """Bytes of one sample that go to another device; 0 for the last part."""


class Backend(ABC):
    """Drives one device in one rank's process.

    The launcher calls the class methods, which must neither import torch nor touch an accelerator. The rank
    calls the instance methods. Slow-downs, memory limits and ordered faults wrap a backend from outside
    (`hetexp.hardware.emulation`).
    """

    name: ClassVar[str]
    """Prefix of its devices' ids, in small letters: `cuda` in `cuda:0`."""
    native_collective: ClassVar[str | None] = None
    """torch.distributed's backend for a group of only such devices, if the vendor has one."""
    native_aborts: ClassVar[bool] = False
    """Whether `abort` of that backend's process group ends collectives that wait for a lost rank."""
    vendor: ClassVar[str] = "cpu"
    """Maker of its cards, in small letters."""
    drivers: ClassVar[tuple[str, ...]] = ()
    """Files of Linux, one of which exists if a driver of its cards is loaded; none: that is not known."""
    wheel: ClassVar[str] = "cpu"
    """Environment that `hetexp env create` makes for it: `cuda`, `rocm`, `xpu`, `cpu`."""
    torch_type: ClassVar[str] = "cpu"
    """torch's word for such devices."""
    energy_source: ClassVar[str] = "measured"
    """Kind of its energy counter: `measured` or `modelled`."""
    computes_on_cpu: ClassVar[bool] = False
    """Whether the CPU does the work of its devices, so that any number of runs and ranks may use them."""
    copies_page_locked: ClassVar[bool] = False
    """Whether copies from page-locked memory of the host (`torch.Tensor.pin_memory`) overlap its work."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.precision: str | None = None
        """Precision of the rank's model; `None`: that of its parameters."""
        self.num_visible = 1
        """Number of cards that this process sees: several if the strategy drives several (`dp`)."""
        self.waits: list[tuple[Any, Any]] = []
        """Marks around each wait for other ranks within a pass, until a timer takes them."""

    @classmethod
    def cards(cls, machine: Machine, on_bus: Sequence[PciCard]) -> list[DetectedCard]:
        """Return every card of the vendor in the machine, usable or not, with the driver's readings.

        Numbers and ids follow later (`hetexp.hardware.detection.inventory`). If a driver, a library or a
        query fails, the card is listed without that field.

        Args:
            on_bus: the cards of this vendor that the kernel sees.
        """
        return []

    @classmethod
    @contextmanager
    def gauges(cls, cards: Sequence[DetectedCard], machine: Machine) -> Iterator[list[Gauge | None]]:
        """Open the gauges of these cards, for repeated readings.

        Yields:
            A gauge for each card; `None` if the driver reports nothing of it.
        """
        yield [None for _ in cards]

    @classmethod
    def hide(cls, cards: Sequence[DetectedCard], machine: Machine) -> tuple[list[DetectedCard], list[str]]:
        """Mark the cards that inherited visibility variables hide (`DetectedCard.hidden_by`).

        Args:
            cards: this backend's cards, numbered.

        Returns:
            The same cards in the same order, and the variables' mistakes. The user who asks for one of these
            cards gets these messages, never another card.
        """
        return list(cards), []

    @classmethod
    def build_problem(cls, spec: DeviceSpec, build: TorchBuild) -> str | None:
        """Return why this torch cannot drive the device, `None` if it can."""
        return None

    @classmethod
    @abstractmethod
    def environment(cls, spec: DeviceSpec) -> dict[str, str]:
        """Return the variables that make a process see only this device, set before torch is imported.

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
        """Return when the device has reached the mark."""
        self.synchronize()

    def read_later(self, value: torch.Tensor) -> Callable[[], float]:
        """Return a function that later returns the value that a scalar of the device has now.

        The function waits until the device has reached this call, but not for later work.
        """
        return lambda: float(value)

    def lock_pages(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Page-lock memory of the host, so that the device copies into it while the host goes on.

        Returns:
            A function that unlocks the memory before it is freed; `None` if the memory is not locked.
        """
        return None

    def random_states(self) -> list[torch.Tensor]:
        """Return the random state of each card that this process sees; the CPU's states are not included."""
        return []

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:  # noqa: B027 - optional
        """Restore the states that `random_states` returned for such a device, here or elsewhere."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surround a wait for other ranks within a pass, which does not count as this device's work."""
        start = self.mark()
        yield
        self.waits.append((start, self.mark()))

    @contextmanager
    def energy_counter(self, machine: Machine) -> Iterator[Counter | None]:
        """Open the counter of the device's energy; `None` if it has none."""
        yield None

    def energy_is_plausible(self, joules: float, seconds: float) -> bool:
        """Return whether the device can have drawn so much within its power limit.

        Counters are updated only a few times a second, so a shorter time counts as one second.
        """
        limit = self.spec.power_limit_watts
        return limit is None or joules <= MOST_OF_LIMIT * limit * max(seconds, 1.0)

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """Return the most memory that this process has held on the device, `None` if it is not counted."""

    def attach(  # noqa: B027 - optional
        self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any
    ) -> None:
        """Prepare the device for this model, before a strategy wraps it.

        Args:
            inputs: a small batch of the training data, on the device.
        """

    def attach_stages(  # noqa: B027 - optional
        self, stages: Sequence[StagePasses], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Prepare the device for some parts of a model, instead of `attach`.

        Args:
            model: all that this device holds of the whole model.
        """

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """Return a context in which a model of float32 weights computes in this precision."""
        if precision not in AUTOCAST:
            return nullcontext()
        import torch

        return torch.autocast(self.torch_type, dtype=getattr(torch, precision))

    def computes_in(self, precision: str) -> bool | None:
        """Return whether the device computes in a precision natively, `None` if that cannot be found out."""
        return None

    def limit_memory(self, num_bytes: int) -> bool:
        """Limit this process's memory on the device, and return whether torch can limit it."""
        return False

    def free_memory_bytes(self) -> int | None:
        """Return the bytes that the device could still give to tensors, `None` if they are not known."""
        return None

    def release_memory(self) -> None:  # noqa: B027 - optional
        """Return memory that torch keeps for later tensors to the device."""

    def begin_step(self, step: int) -> None:  # noqa: B027 - optional
        """Begin a step.

        Args:
            step: number of steps already done; negative in a rehearsal.

        Raises:
            torch.OutOfMemoryError, torch.AcceleratorError: a fault is ordered for this step.
        """

    def begin_update(self) -> None:  # noqa: B027 - optional
        """Begin the optimizer's update: the gradients have been exchanged."""

    def pause(self) -> None:  # noqa: B027 - optional
        """End the phase that is running, as an evaluation or a checkpoint begins."""

    def resume(self) -> None:  # noqa: B027 - optional
        """Continue training after an evaluation or a checkpoint."""

    def backward_done(self) -> float:
        """Return the completed fraction of the running backward pass; 1 unless the device is paced."""
        return 1.0

    @property
    def steady(self) -> bool:
        """Whether passes of a size always take the same time, as an emulated card's do."""
        return False

    def rehearsal_scale(self) -> float | None:
        """Return the smallest `time_scale` that the rehearsed passes allow, `None` of a real device."""
        return None

    def modelled_work(self, microbatches: Sequence[int], bytes_per_sample: int) -> Work | None:
        """Return the catalogue's prediction for a step of these microbatches, `None` of a real device."""
        return None

    def start_pacing(self, time_scale: float) -> None:  # noqa: B027 - optional
        """Begin to pace passes at the scale that all ranks agreed on; real devices ignore it."""

    def paced(self) -> list[tuple[str, float, float]]:
        """Return name, real seconds and modelled seconds of each paced phase."""
        return []

    def invalid_reason(self) -> str | None:
        """Return why this rank's timings must not be used, or `None` if they may."""
        return None
