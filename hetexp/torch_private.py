"""Every private name of torch that hetexp uses, behind a public one.

A release of torch may rename or drop any of them, so they stand in this file alone;
`tests/unit/test_torch_private.py` looks through the package, and calls each. They were read in the sources of
torch 2.8.0, 2.9.1, 2.13.0 and 2.14.1. What happens without a name:

| name in torch | without it |
|---|---|
| `utils._pytree`, `utils._python_dispatch`, `nn.modules.batchnorm._BatchNorm` | `import` fails: nested samples, the memory estimate and BatchNorm layers need them |
| `ops.aten._scaled_dot_product_…` | this module's import fails: the memory estimate of attention needs them |
| `autograd.Variable._execution_engine` | a backward pass fails: its own time could not be told from waiting |
| `UntypedStorage._cdata`, `Tensor._indices`, `Tensor._values` | AttributeError: the memory estimate, paced sparse gradients |
| `nn.Module._apply`, `_forward_pre_hooks`, `parametrizations._SpectralNorm` | AttributeError: complex models, spectral norms |
| `OptimizedModule._orig_mod` | the compiled module stands for the model |
| `_foreach_mul_`, `_foreach_lerp_` | each gradient is scaled, each statistic moved separately |
| `_dynamo.maybe_mark_dynamic` | torch compiles each batch size separately |
| `_dynamo.exc.TorchDynamoException` | errors of torch's compiler are shown as torch writes them |
| `_C._nn._parse_to` | AttributeError: a language model whose base has a type of its own cannot be moved |
| `utils.data._utils.collate` | `import` fails: samples are stacked into page-locked memory by it |
| `utils.data._utils.worker._worker_info` | a stream sees its loader process, by which it may divide itself |
| `distributed_c10d.ProcessGroup…` | that library is refused for an exchange; the next route is tried |
| `Backend._set_default_timeout` | `Backend.set_timeout` (torch 2.14) replaces it |
| `distributed_c10d._set_pg_timeout` | `torch.distributed.set_timeout` (torch 2.14) replaces it |
| `distributed_c10d._world` | no group forms again in the same process |
| `distributed_c10d._get_default_store` | AttributeError: ranks of an engine that has formed a group do not meet |
| `distributed_c10d._update_default_pg` | a route that hangs ends the run |
| `distributed_c10d._abort_process_group` | a collective that hangs ends at its own time limit |
| `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` | constants are sent once, at the start |
| `PipelineStage._get_init_p2p_neighbors_ops` | nothing to leave out (torch 2.8) |
| `Reducer._remove_autograd_hooks` | no group forms again in the same process |
"""  # noqa: E501

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data._utils.collate import collate, default_collate_fn_map

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = [
    "BatchNormBase",
    "TorchDispatchMode",
    "collate",
    "default_collate_fn_map",
    "tree_leaves",
    "tree_map_only",
]

FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention
EFFICIENT_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward
PLAIN_ATTENTION = torch.ops.aten._scaled_dot_product_attention_math
"""The operations among which `scaled_dot_product_attention` chooses."""
GROUP_CLASSES = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}
"""Collective backend → the class of torch that speaks to the library."""
USE_NCCL2 = "TORCH_DIST_USE_NCCL2"
"""Variable by which torch 2.14 and newer take a new class for NCCL if it is `1`."""

# Tensors and autograd.


queue_after_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Runs a function once, at the end of the backward pass that is under way; a hook calls it."""


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors of the same storage share while it lives, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values of a sparse tensor, which may hold an index more than once."""
    return tensor._indices(), tensor._values()


def scale_all_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply dense tensors in place, by one kernel for many of them where torch has one."""
    multiply = getattr(torch, "_foreach_mul_", None)
    if multiply is not None:
        multiply(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def lerp_all_(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    """Move dense tensors towards others in place, by one kernel for all of them where torch has one."""
    move = getattr(torch, "_foreach_lerp_", None)
    if move is not None:
        move(tensors, ends, weight)
        return
    for tensor, end in zip(tensors, ends, strict=True):
        tensor.lerp_(end, weight)


# Modules.


def apply_to_tensors(model: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer by the function's result, as `Module.to` does."""
    model._apply(function)


def to_arguments(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """Return device, type and `non_blocking` of a call of `Module.to`."""
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, non_blocking


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` has compiled, or the model itself."""
    bare: nn.Module = getattr(model, "_orig_mod", model)
    return bare


def forward_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the functions that a module calls before its forward pass."""
    return list(module._forward_pre_hooks.values())


def spectral_norm_class() -> type[nn.Module]:
    """Return the class of the parametrization that `parametrizations.spectral_norm` adds."""
    return nn.utils.parametrizations._SpectralNorm


def exclude_from_ddp(module: nn.Module, names: Iterable[str]) -> None:
    """Let DDP send none of these parameters and buffers of a module that it is about to wrap."""
    exclude = getattr(DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model", None)
    if exclude is not None:
        exclude(module, list(names))


def remove_ddp_hooks(module: DistributedDataParallel) -> None:
    """Take DDP's hooks from the parameters, which would go on exchanging."""
    module.reducer._remove_autograd_hooks()


def leave_out_first_messages(stage: PipelineStage) -> None:
    """Let a stage exchange no message with its neighbours before its first step; all ranks call it.

    Only NCCL needs them. Releases differ: 2.8 has none, and 2.9 sends 8 bytes where it receives 4, so that
    gloo ends the process.
    """
    if hasattr(stage, "_get_init_p2p_neighbors_ops"):
        stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]


# The compiler.


def import_compiler() -> None:
    """Import torch's compiler, for 1.2 s; every optimizer needs it."""
    importlib.import_module("torch._dynamo")


def allow_any_size(tensor: torch.Tensor, dim: int) -> None:
    """Let one compiled graph serve all sizes of a dimension but 1."""
    mark = getattr(torch._dynamo, "maybe_mark_dynamic", None)
    if mark is not None:
        mark(tensor, dim)


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the base class of the errors of torch's compiler."""
    error = getattr(torch._dynamo.exc, "TorchDynamoException", None)
    return () if error is None else (error,)


# Loader processes.


def hide_loader_process() -> None:
    """Let `torch.utils.data.get_worker_info` return `None` in this process."""
    worker: Any = importlib.import_module("torch.utils.data._utils.worker")
    worker._worker_info = None


# torch.distributed.


def group_class(library: str) -> Any | None:
    """Return torch's class for groups of gloo, NCCL or XCCL; `None` if this build lacks the library.

    As in `init_process_group`, `TORCH_DIST_USE_NCCL2=1` chooses the new class for NCCL, which takes the same
    options.
    """
    name = GROUP_CLASSES[library]
    if library == "nccl" and os.environ.get(USE_NCCL2) == "1":
        newer = getattr(dist.distributed_c10d, "ProcessGroupNCCL2", None)
        if newer is not None:
            return newer
    return getattr(dist.distributed_c10d, name, None)


def group_options(group_class: Any, timeout: timedelta, size: int) -> Any:
    """Return the options with which torch itself creates a group of NCCL or XCCL.

    Args:
        timeout: longest wait in a collective.
        size: number of ranks.
    """
    options = group_class.Options()
    options._timeout = timeout
    options.group_name, options.global_ranks_in_group = "exchange", list(range(size))
    return options


def set_library_timeout(group: Any, timeout: timedelta) -> None:
    """Set the longest wait in a collective of a group that `group_class` has made."""
    (getattr(group, "set_timeout", None) or group._set_default_timeout)(timeout)


def set_default_timeout(timeout: timedelta) -> None:
    """Set the longest wait in a collective of the default group."""
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(timeout)


def all_gather_options() -> Any:
    """Return the options of an all-gather that has none."""
    return dist.distributed_c10d.AllgatherOptions()


def restart_group_count() -> None:
    """Give the next group the number of a process's first one.

    Ranks use the number to meet. torch counts groups that did not form, which may be so on some ranks only.
    """
    dist.distributed_c10d._world.group_count = 0


def formed_groups() -> list[Any]:
    """Return all groups of torch.distributed that this process has formed; the list keeps them alive."""
    return list(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else []


def default_store() -> dist.Store:
    """Return the store in which the default group met."""
    return dist.distributed_c10d._get_default_store()


def forget_default_group() -> None:
    """Let another default group form, although this one neither ended nor could be aborted."""
    dist.distributed_c10d._update_default_pg(None)


def abort_groups() -> None:
    """End the collectives of all groups, those that hang as well."""
    dist.distributed_c10d._abort_process_group()
