"""The part that the vendors' backends share, as torch's device modules (`torch.cuda`, …) are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.base import Backend
from hetexp.hardware.detection.builds import TorchBuild

if TYPE_CHECKING:
    import torch


class AcceleratorBackend(Backend):
    """Drives the only card of a kind that its process sees, through torch's module for that kind."""

    torch_type: ClassVar[str]
    """torch's word for such devices: `cuda` (AMD cards, too), `xpu`, `mps`."""
    platform: ClassVar[str]
    """Name of the vendor's platform in messages: `CUDA`, `ROCm`."""

    @classmethod
    def build_problem(cls, spec: DeviceSpec, build: TorchBuild) -> str | None:
        owner = build.python or "this interpreter"
        if build.problem is not None:
            return f"{owner} cannot drive it: {build.problem}"
        if build.kind != cls.name:
            return f"torch {build.version} of {owner} is not built for {cls.platform}"
        return None

    def torch_device(self) -> torch.device:
        import torch

        module = self._module()
        if not module.is_available():
            raise SetupError(
                f"{self.spec} cannot be driven by torch {torch.__version__} ({self._build()}); its driver is "
                f"{self.spec.driver or 'not known'}. Run `hetexp doctor` to see why, or give the device an "
                "interpreter whose torch can (`python:` in `hardware.devices`, hetexp env create "
                f"{self.wheel})."
            )
        module.set_device(0)
        self._check_card(module)
        return torch.device(self.torch_type, 0)

    def _check_card(self, module: Any) -> None:
        """Check that the card is the chosen one: training on another card would be worse than no training."""
        seen, chosen = self._seen_uuid(module), self.spec.uuid
        if module.device_count() != self.num_visible:
            expected = "the only card" if self.num_visible == 1 else f"one of {self.num_visible} cards"
            masks = ", ".join(f"{k}={v}" for k, v in self.environment(self.spec).items())
            raise SetupError(
                f"{self.spec} must be {expected} that its rank sees, but torch sees "
                f"{module.device_count()} ({masks})."
            )
        if seen is not None and chosen is not None and bare_uuid(chosen) != bare_uuid(seen):
            raise SetupError(
                f"{self.spec} was chosen ({chosen}), but torch sees another card ({seen}). Remove visibility "
                "variables that a start-up file of the interpreter sets."
            )

    def _seen_uuid(self, module: Any) -> str | None:
        """Return the UUID of the only card that torch sees, `None` if torch has none to compare."""
        uuid = getattr(module.get_device_properties(0), "uuid", None)
        return str(uuid) if uuid is not None else None

    def _build(self) -> str:
        import torch

        kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
        built = [f"{name} {version}" for name, version in kinds.items() if version]
        return "built for " + " and ".join(built) if built else "built for no accelerator"

    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.torch_type)

    def computes_in(self, precision: str) -> bool | None:
        import torch

        native = getattr(self._module(), "is_bf16_supported", None)
        if precision == "bfloat16" and native is not None:
            return bool(native(including_emulation=False))
        try:  # Arc cards without float64 and Apple's GPUs refuse even to hold it
            torch.ones(1, dtype=getattr(torch, precision), device=self.torch_type).add_(1.0)
        except (TypeError, RuntimeError):
            return False
        return True

    def limit_memory(self, num_bytes: int) -> bool:
        module = self._module()
        total = module.get_device_properties(0).total_memory
        module.set_per_process_memory_fraction(min(1.0, num_bytes / total), 0)
        return True

    def free_memory_bytes(self) -> int | None:
        module = self._module()
        held, kept = int(module.memory_allocated()), int(module.memory_reserved())
        try:
            free = int(module.mem_get_info()[0]) + kept - held
        except RuntimeError:  # Level Zero does not know it of every card
            return None
        if self.spec.limited and self.spec.memory_bytes is not None:
            free = min(free, self.spec.memory_bytes - held)
        return max(0, free)

    def release_memory(self) -> None:
        self._module().empty_cache()

    def mark(self) -> Any:
        event = self._module().Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000.0

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def synchronize(self) -> None:
        self._module().synchronize()

    def random_states(self) -> list[torch.Tensor]:
        return [self._module().get_rng_state(place) for place in range(self.num_visible)]

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        for place, state in zip(range(self.num_visible), states, strict=False):
            self._module().set_rng_state(state, place)

    def peak_memory_bytes(self) -> int | None:
        return int(self._module().max_memory_allocated())


class CudaNamespaceBackend(AcceleratorBackend):
    """Drives a card whose torch answers as `cuda`: NVIDIA's, and AMD's by a ROCm build."""

    torch_type: ClassVar[str] = "cuda"
    copies_page_locked: ClassVar[bool] = True

    def torch_device(self) -> torch.device:
        import torch

        # torch.version has `cuda` or `hip`, by the vendor that it is built for.
        if getattr(torch.version, self.name) is None and torch.cuda.is_available():
            raise SetupError(  # the other vendor's build
                f"{self.spec} cannot be driven by torch {torch.__version__}, {self._build()}. Give the "
                "device an interpreter whose torch can (`python:` in `hardware.devices`, hetexp env create "
                f"{self.wheel})."
            )
        # float32 means float32: TF32, cuDNN's default (also on an MI300), keeps 10 bits of the mantissa.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        return super().torch_device()

    def lock_pages(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        import torch

        runtime = torch.cuda.cudart()
        try:
            if int(runtime.cudaHostRegister(address, num_bytes, 0)) != 0:
                return None
        except RuntimeError:
            return None
        return lambda: runtime.cudaHostUnregister(address)

    def read_later(self, value: torch.Tensor) -> Callable[[], float]:
        import torch

        host = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def read() -> float:
            arrived.synchronize()
            return float(host)

        return read


def bare_uuid(uuid: str) -> str:
    """Return a UUID without vendor's prefix and dashes, which NVML and torch write differently."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-").replace("-", "")
