"""Counts the bytes that a step holds while it runs on the meta device, whose tensors have no memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hetexp.hardware.memory.convolution import Convolution
from hetexp.torch_private import (
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION_BACKWARD,
    TorchDispatchMode,
    storage_key,
    tree_leaves,
)

aten = torch.ops.aten

MULTIPLICATIONS = frozenset(
    {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot, aten.vdot}
)
"""Operations of cuBLAS, which needs its workspace for them."""
HALF = frozenset({torch.bfloat16, torch.float16})
"""Types that cuDNN computes channels last in: it changes the layout of operands and results, each once."""
UNSORTED_INDICES = 3072
"""Up to so many indices the gradient of an embedding needs no sorting (`Embedding.cu`)."""


class LiveBytes(TorchDispatchMode):
    """Adds up the storages of meta tensors from the operation that makes them until they are freed.

    Args:
        block: maps a storage's bytes to what the device's allocator takes for them.
        held: existing tensors, which are not counted.
        kernels: whether to count the memory of a card's kernels beside their results.
        cudnn: whether to count the workspaces of convolutions on a device with plenty (`convolution.py`).
    """

    def __init__(
        self,
        block: Callable[[int], int],
        held: Iterable[torch.Tensor],
        kernels: bool,
        cudnn: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block, self._kernels, self._cudnn = block, kernels, cudnn
        self._held = {storage_key(tensor) for tensor in held}
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self.now = 0
        """Bytes held at present."""
        self.peak = 0
        """Most bytes held at once since `restart`."""
        self.with_plenty = 0
        """Most bytes held at once, with the workspaces of cuDNN on a device with plenty; never restarted."""
        self.multiplies = False
        """Whether matrices were multiplied since `restart`."""

    def restart(self) -> None:
        """Look for a new peak."""
        self.peak, self.multiplies = self.now, False

    def __torch_dispatch__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.is_meta:
                self._count(value)
        operation = func.overloadpacket
        if operation in MULTIPLICATIONS:
            self.multiplies = True
        extra = 0
        if self._kernels and operation in _TEMPORARIES:
            extra = self._block(int(_TEMPORARIES[operation](args, result)))
        self.peak = max(self.peak, self.now + extra)
        if self._cudnn and operation in _CONVOLUTIONS:
            extra = max(extra, self._block(_CONVOLUTIONS[operation](args)))
        self.with_plenty = max(self.with_plenty, self.now + extra)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._live or key in self._held:
            return
        size = self._block(storage.nbytes())
        self._live[key] = (size, weakref.ref(storage, lambda _: self._release(key)))
        self.now += size

    def _release(self, key: int) -> None:
        self.now -= self._live.pop(key)[0]


def cuda_block(num_bytes: int) -> int:
    """Return what CUDA's caching allocator takes for a tensor (`CUDACachingAllocator.cpp`).

    Blocks are multiples of 512 bytes. From 10 MiB on, segments are multiples of 2 MiB, and a remainder of up
    to 1 MiB is not split off.
    """
    size = 512 * math.ceil(num_bytes / 512)
    segment = 2 * 2**20 * math.ceil(size / (2 * 2**20))
    return segment if size >= 10 * 2**20 and segment - size <= 2**20 else size


def cpu_block(num_bytes: int) -> int:
    """Return what torch's CPU allocator takes for a tensor: it aligns by 64 bytes."""
    return 64 * math.ceil(num_bytes / 64)


def tensor_bytes(tensors: Iterable[torch.Tensor], block: Callable[[int], int]) -> int:
    """Return the bytes of tensors, each storage once."""
    storages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(map(block, storages.values()))


def _size(*values: Any) -> int:
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def _channels_last(*tensors: Any) -> int:
    return _size(*tensors) if tensors[0].dtype in HALF else 0


def _modelled(
    inputs: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool
) -> Convolution | None:
    """Return the convolution if its workspaces are known (groups show in the weight's shape)."""
    if inputs.dtype != torch.float32 or transposed or inputs.dim() != 4:
        return None
    plain = tuple(map(tuple, (stride, padding, dilation))) == ((1, 1), (1, 1), (1, 1))
    if not plain or tuple(weight.shape[1:]) != (inputs.shape[1], 3, 3):
        return None
    batch, channels, height, width = inputs.shape
    return Convolution(batch, channels, weight.shape[0], height, width)


def _forward_with_plenty(args: tuple[Any, ...]) -> int:
    inputs, weight, _, *how = args[:7]
    convolution = _modelled(inputs, weight, *how)
    return convolution.forward_bytes() if convolution is not None else 0


def _backward_with_plenty(args: tuple[Any, ...]) -> int:
    """Return the larger workspace, as the gradients are computed one after the other."""
    _, inputs, weight, _, *how = args[:8]
    convolution = _modelled(inputs, weight, *how)
    if convolution is None:
        return 0
    of_input, of_weight, _ = args[10]
    input_bytes = convolution.input_gradient_bytes() if of_input else 0
    return max(input_bytes, convolution.weight_gradient_bytes() if of_weight else 0)


_CONVOLUTIONS = {
    aten.convolution: _forward_with_plenty,
    aten.convolution_backward: _backward_with_plenty,
}


def _embedding_backward(args: tuple[Any, ...], result: Any) -> float:
    gradient, indices = args[:2]
    if indices.numel() <= UNSORTED_INDICES:
        return 0.0
    # A row of float32 an index, and the sorted indices with their segments (`EmbeddingBackwardKernel.cu`).
    return float(4 * gradient.numel() + 7 * _size(indices))


def _flash_backward(args: tuple[Any, ...], result: Any) -> float:
    query = args[1]
    batch, heads, length, size = query.shape
    rounded = 128 * math.ceil(length / 128)
    return float(4 * batch * heads * rounded * (32 * math.ceil(size / 32) + 1))


def _efficient_backward(args: tuple[Any, ...], result: Any) -> float:
    query, key = args[1:3]
    # float32: the product that delta is summed from; half: the sums of all three gradients in float32.
    return float(4 * (query.numel() if query.dtype == torch.float32 else query.numel() + 2 * key.numel()))


_TEMPORARIES: dict[Any, Callable[[tuple[Any, ...], Any], float]] = {
    aten.convolution: lambda args, result: _channels_last(*args[:2], *tree_leaves(result)),
    aten.convolution_backward: lambda args, result: _channels_last(*args[:3]),
    aten.embedding_dense_backward: _embedding_backward,
    FLASH_ATTENTION_BACKWARD: _flash_backward,
    EFFICIENT_ATTENTION_BACKWARD: _efficient_backward,
    # The loss of each element, before the sum.
    **dict.fromkeys(
        (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy),
        lambda args, result: _size(args[0]),
    ),
}
"""Bytes that an operation's kernels take beside the results, from its arguments and results."""
