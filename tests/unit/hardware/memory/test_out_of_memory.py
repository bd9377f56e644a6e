"""Which errors mean that memory ran out, so that a smaller pass may do."""

from __future__ import annotations

import pytest
import torch

from hetexp.hardware.memory.out_of_memory import first_line, is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("whatever it says"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.79 GB, other allocations: 92.00 KB)"),
        RuntimeError("XPU out of memory. Tried to allocate 9.31 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("Unable to find an engine to execute this computation"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 4000000000000 bytes."
        ),
    ],
)
def test_memory_ran_out(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x4 and 5x2)"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NCCL error: unhandled cuda error, Failed to CUDA malloc: out of memory"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] out of memory"),
        ValueError("out of memory"),
        MemoryError("out of memory"),
        KeyboardInterrupt(),
    ],
)
def test_something_else_happened(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_the_real_error_of_the_cpu_is_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)


def test_advice_and_stack_are_left_out() -> None:
    assert first_line(RuntimeError("CUDA out of memory.\nSee the manual")) == "CUDA out of memory."
    assert first_line(RuntimeError()) == "RuntimeError"
