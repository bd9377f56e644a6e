"""Recognises torch's errors for memory that ran out, which have no class in common."""

from __future__ import annotations

_SIGNS = (
    "out of memory",  # CUDA, HIP, XPU and MPS, each after its own name; also "CUDA error: out of memory"
    "status_alloc_failed",  # cuBLAS, cuDNN, hipBLAS
    "rocblas_status_memory_error",
    "unable to find an engine to execute this computation",  # cuDNN: none of its kernels gets a workspace
    "defaultcpuallocator",  # "can't allocate memory", on Windows "not enough memory"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, so that a smaller pass may succeed.

    Errors of a collective do not count, even those that name memory: a smaller pass here does not help its
    other ranks.
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return "nccl" not in text and "gloo" not in text and any(sign in text for sign in _SIGNS)


def first_line(error: BaseException) -> str:
    """Return the device's message, without torch's advice and stack."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
