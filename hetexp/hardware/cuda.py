"""NVIDIA cards: found by NVML without torch, driven by torch's `cuda` backend."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from hetexp.core.device import DeviceSpec
from hetexp.core.errors import SetupError
from hetexp.hardware.backend import Backend

if TYPE_CHECKING:
    import torch
    from torch import nn


class CudaBackend(Backend):
    """Drives one NVIDIA card, the only one that its process sees."""

    native_collective: ClassVar[str | None] = "nccl"

    @classmethod
    def detect(cls) -> list[DeviceSpec]:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no library, no driver, no permission: no card that could be used
            return []
        try:
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            cards = [
                (_text(pynvml.nvmlDeviceGetUUID(h)), _text(pynvml.nvmlDeviceGetName(h)), h) for h in handles
            ]
            visible = _visible([uuid for uuid, _, _ in cards])
            return [
                DeviceSpec(
                    id=f"cuda:{index}",
                    backend="cuda",
                    index=index,
                    name=name,
                    vendor="nvidia",
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    uuid=uuid,
                    driver=driver,
                )
                for index, (uuid, name, handle) in enumerate(cards[i] for i in visible)
            ]
        except pynvml.NVMLError:
            return []
        finally:
            pynvml.nvmlShutdown()

    @classmethod
    def environment(cls, spec: DeviceSpec) -> dict[str, str]:
        # By UUID: NVML counts in PCI order and CUDA, by default, from the fastest card.
        return {"CUDA_VISIBLE_DEVICES": spec.uuid or str(spec.index)}

    def torch_device(self) -> torch.device:
        import torch

        if torch.version.cuda is None or not torch.cuda.is_available():
            build = (
                "a build without CUDA"
                if torch.version.cuda is None
                else f"built for CUDA {torch.version.cuda}"
            )
            raise SetupError(
                f"{self.spec} cannot be driven by torch {torch.__version__}, {build}, whose driver is "
                f"{self.spec.driver}. Install a CUDA build of torch, or give the device an interpreter that "
                "has one (`python:` in `hardware.devices`)."
            )
        torch.cuda.set_device(0)
        # float32 means float32: cuDNN's default of TF32 keeps 10 bits of the mantissa.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        return torch.device("cuda", 0)

    def limit_memory(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        import torch

        assert self.spec.memory_bytes is not None
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.spec.memory_bytes / total), 0)

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000.0

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def peak_memory_bytes(self) -> int | None:
        import torch

        return int(torch.cuda.max_memory_allocated())


def _visible(uuids: list[str]) -> list[int]:
    """Positions of the cards that CUDA_VISIBLE_DEVICES leaves visible, in its order.

    Like CUDA, the list ends at the first entry that names no card.
    """
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in mask.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            position = int(entry)
        else:
            matches = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
            if len(matches) != 1:
                break
            position = matches[0]
        if position not in chosen:
            chosen.append(position)
    return chosen


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
