"""The constants of the memory estimate for each kind of device.

They come from the sources of torch; `benchmarks/bench_memory.py` compares them with a CUDA card.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetexp.core.device import DeviceSpec
from hetexp.hardware.emulation.memory_model import CONTEXT_BYTES as MODELLED_CONTEXT

MIB = 2**20
FRAGMENTATION = 1.15
"""Memory of a caching allocator ÷ allocated bytes: some holes between tensors stay empty. On an H100
1.00 to 1.15 for 67 of 71 models, sizes and precisions (`benchmarks/bench_memory.py --limits`)."""
HEADROOM = 1.09
"""Extra factor for advised sizes, which must run: 70 of the 71 needed less."""
CONTEXT_BYTES = {"cuda": 800 * MIB, "hip": 800 * MIB, "xpu": 256 * MIB, "mps": 256 * MIB}
"""Memory of driver and kernels. On an H100 527 MiB before the first tensor, 775 with the kernels of cuBLAS
and cuDNN; the other figures are assumed."""


@dataclass(frozen=True)
class MemoryRules:
    """The way in which a device's build of torch takes memory."""

    context_bytes: int
    """Memory of driver and kernels, which torch does not count."""
    workspace_bytes: int
    """Workspace of the library that multiplies matrices. Each thread that multiplies, of the forward and
    of the backward pass, keeps one (`CublasHandlePool.cpp`)."""
    fragmentation: float
    accelerator: bool
    """Whether the device has a caching allocator, and kernels that take memory beside their results."""
    foreach: bool
    """Whether torch's optimizers update all parameters at once by default, with temporaries of their size."""
    fused_attention: bool
    """Whether attention keeps no scores for the backward pass."""
    cudnn: bool = False
    """Whether convolutions are cuDNN's, whose fastest algorithms in float32 take memory of their own."""

    def with_headroom(self) -> MemoryRules:
        """Return the rules for advised sizes, by which somewhat less fits."""
        return replace(self, fragmentation=self.fragmentation * HEADROOM) if self.accelerator else self


def rules_for(device: DeviceSpec) -> MemoryRules:
    """Return the rules of a device; those of an emulated one fit `hetexp.hardware.emulation.memory_model`."""
    if device.backend == "emulated":
        return MemoryRules(MODELLED_CONTEXT, 0, 1.0, False, False, True)
    if device.limited:  # what `memory_gib` limits is torch's allocator
        return replace(_of_card(device), context_bytes=0)
    return _of_card(device)


def _of_card(device: DeviceSpec) -> MemoryRules:
    backend = {"nvidia": "cuda", "amd": "hip", "intel": "xpu", "apple": "mps"}.get(device.vendor, "cpu")
    if backend == "cuda":
        workspace = _cublas_workspace(device.architecture)
        return MemoryRules(CONTEXT_BYTES[backend], workspace, FRAGMENTATION, True, True, True, cudnn=True)
    if backend == "hip":
        large = (device.architecture or "").startswith(("gfx94", "gfx95"))
        workspace = (128 if large else 32) * MIB
        return MemoryRules(CONTEXT_BYTES[backend], workspace, FRAGMENTATION, True, True, True)
    if backend in ("xpu", "mps"):
        return MemoryRules(CONTEXT_BYTES[backend], 0, FRAGMENTATION, True, backend == "xpu", False)
    return MemoryRules(0, 0, 1.0, False, False, True)


def _cublas_workspace(architecture: str | None) -> int:
    """Return `getChosenWorkspaceSize` of torch 2.11: 32 MiB from Hopper on, `:4096:2:16:8` before."""
    digits = (architecture or "").removeprefix("sm_").rstrip("af")
    known = digits.isdigit()
    return (4096 * 2 + 16 * 8) * 1024 if known and int(digits) < 90 else 32 * MIB
