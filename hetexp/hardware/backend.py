"""The interface between hetexp and a vendor's runtime: one small file a backend implements it."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from hetexp.core.device import DeviceSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

BACKENDS = {
    "cpu": "hetexp.hardware.cpu:CpuBackend",
    "cuda": "hetexp.hardware.cuda:CudaBackend",
    "emulated": "hetexp.hardware.emulated:EmulatedBackend",
}


def backend_class(name: str) -> type[Backend]:
    """Return the class of a backend by its name; its vendor library is not imported yet."""
    located: type[Backend] = pkgutil.resolve_name(BACKENDS[name])
    return located


class Backend(ABC):
    """Drives one device in one rank's process.

    The class methods run in the launcher, which never touches an accelerator and may not import torch
    through them; the instance methods run in the rank.
    """

    native_collective: ClassVar[str | None] = None
    """torch.distributed's backend for a group of only such devices, where the vendor has one."""
    computes_on_cpu: ClassVar[bool] = False
    """Whether ranks of this backend compete for the cores of the CPU."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def detect(cls) -> list[DeviceSpec]:
        """Return the devices of this backend in this machine; an absent driver means an empty list."""

    @classmethod
    @abstractmethod
    def environment(cls, spec: DeviceSpec) -> dict[str, str]:
        """Return the variables that make a process see only this device; set before torch is imported."""

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

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """Return the most memory this process has held on the device, `None` where nobody counts."""

    def attach(self, model: nn.Module, inputs: Any) -> None:  # noqa: B027 - most devices need nothing
        """Prepare the device for this model; `inputs` is a small batch of the training data."""

    def rehearsal_scale(self) -> float | None:
        """Return the smallest `time_scale` that the rehearsed passes allow; only emulated devices do."""
        return None

    def start_pacing(self, time_scale: float) -> None:  # noqa: B027
        """Begin to pace passes at the scale that all ranks agreed on; only emulated devices do."""

    def invalid_reason(self) -> str | None:
        """Return why this rank's timings must not be used, or `None` where they may."""
        return None
