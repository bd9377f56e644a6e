"""Gives a model on the meta device the functions of a card: autocast, attention, dropout.

torch's autocast never acts on meta tensors. Fake `cuda` tensors do not help: if torch has CUDA, they open a
context on the card, which the launcher must not touch; without CUDA, they fail. So this module makes the
casts, above autograd as torch makes them (`aten/src/ATen/autocast_mode.h`), by its own lists
for CUDA (documented under torch.amp, "CUDA Ops that can autocast"). The CPU's own lists differ a little.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hetexp.torch_private import (
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    PLAIN_ATTENTION,
    tree_leaves,
    tree_map_only,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER = _names(
    """_convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell lstm gru rnn_tanh rnn_relu
    scaled_dot_product_attention __matmul__ __rmatmul__"""
)
"""Functions that autocast runs in the lower precision; `@` is one of them by another name."""
FLOAT32 = _names(
    """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__
    softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss_nd nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits cross_entropy_loss dist pdist cdist
    renorm logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d norm"""
)
"""Functions that it runs in float32; `cross_entropy_loss` is made of two of them."""
FLOAT32_UNLESS_TYPED = _names(
    "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
)
"""The same, if the call does not name a type itself."""
WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Functions that need one type for all arguments and get the widest."""

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
"""Functions by which torch's own Python functions first check for overrides."""
_HALF = (torch.bfloat16, torch.float16)


class CardFunctions(TorchFunctionMode):
    """Replaces functions on meta tensors by those of a card's build of torch.

    Args:
        precision: `bfloat16` or `float16` are cast as by autocast; other precisions cast nothing.
        fused_attention: whether the card has kernels for attention that keep no scores.
    """

    def __init__(self, precision: str, fused_attention: bool) -> None:
        super().__init__()
        dtype = getattr(torch, precision)
        self._lower: torch.dtype | None = dtype if dtype in _HALF else None
        self._fused_attention = fused_attention
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._inside: Any = None

    def forget(self) -> None:
        """Drop the weights that were cast, as autocast does when its context ends."""
        self._weights.clear()

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # If a method of `torch.Tensor` calls its base's method, that call is the base's.
        if func is not self._inside and _asks(func):
            before, self._inside = self._inside, func
            try:
                with self:  # the functions that it consists of are replaced, not itself
                    return _body(func)(*args, **kwargs)
            finally:
                self._inside = before
        name = getattr(func, "__name__", "")
        if self._lower is not None:
            args, kwargs = self._cast(name, args, kwargs)
        if name == "scaled_dot_product_attention" and self._fused_attention:
            return attention(*args, **kwargs)
        if name == "dropout":
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _cast(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments in the type that autocast would give them."""
        assert self._lower is not None
        if name in LOWER:
            target = self._lower
        elif name in FLOAT32:
            target = torch.float32
        elif name in FLOAT32_UNLESS_TYPED:
            typed = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
            first = args[0] if args else None
            if not typed and isinstance(first, torch.Tensor) and first.is_floating_point():
                kwargs = {**kwargs, "dtype": torch.promote_types(first.dtype, torch.float32)}
            return args, kwargs
        elif name in WIDEST:
            target = self._lower
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    target = torch.promote_types(target, value.dtype)
        else:
            return args, kwargs
        cast: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            torch.Tensor, lambda tensor: self._to(tensor, target), (args, kwargs)
        )
        return cast

    def _to(self, tensor: torch.Tensor, target: torch.dtype) -> torch.Tensor:
        """Cast as autocast does: never float64, and each weight once."""
        if not tensor.is_floating_point() or tensor.dtype in (target, torch.float64):
            return tensor
        weight = tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32
        if not weight or target != self._lower:
            return tensor.to(target)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = (tensor, tensor.to(target))
        return self._weights[id(tensor)][1]


def _asks(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and not set(_QUESTIONS).isdisjoint(
        function.__code__.co_names
    )


@functools.cache
def _body(function: types.FunctionType) -> Callable[..., Any]:
    """Return the function without its check for overrides, which would find this mode again."""
    namespace = function.__globals__ | dict.fromkeys(_QUESTIONS, lambda *_: False)
    clone = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


def _dropout(input: torch.Tensor, p: float = 0.5, train: bool = True) -> torch.Tensor:
    """Drop values as cards do: the saved mask has one byte a value, not the value's type."""
    if not train or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the kernel that torch chooses on a card (`sdp_utils.cpp`); cuDNN's keeps what the flash one keeps.

    Flash attention takes half precision without a mask, the memory-efficient kernel float32 and masks. Other
    inputs (float64, odd head sizes, three or five dimensions) are computed with all scores.
    """
    size = query.shape[-1]
    plain = query.dim() == key.dim() == value.dim() == 4 and key.shape[-1] == value.shape[-1] == size
    if plain and query.dtype in _HALF and attn_mask is None and size <= 256:
        scale = scale if scale is not None else size**-0.5
        padding = -size % 8
        if padding:
            pad = functools.partial(torch.nn.functional.pad, pad=(0, padding))
            query, key, value = pad(query), pad(key), pad(value)
        out: torch.Tensor = FLASH_ATTENTION(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :size]
    aligned = size % (16 // query.element_size()) == 0
    if plain and query.dtype in (torch.float32, *_HALF) and aligned and not enable_gqa:
        bias = _bias(attn_mask, query, key)
        out = EFFICIENT_ATTENTION(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
        return out
    out = PLAIN_ATTENTION(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return a mask as the memory-efficient kernel takes it: a bias of the scores for every head."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
