"""Gradients that are no dense tensors of real numbers: sparse ones, and those of complex parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hetexp.comm.exchange import Exchange


def sparse_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose gradients are sparse, by the rule of torch's DistributedDataParallel."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = (module for module in model.modules() if isinstance(module, kinds) and module.sparse)
    return {module.weight for module in found if isinstance(module.weight, nn.Parameter)}


def of_other_forms(model: nn.Module) -> bool:
    """Return whether a gradient of the model is sparse or complex, which not every library sums."""
    return bool(sparse_parameters(model)) or any(parameter.is_complex() for parameter in model.parameters())


def no_rows(like: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    """Return a sparse gradient of a parameter without rows, or of one row if the value is not zero."""
    count = int(value != 0.0)
    indices = torch.zeros((1, count), dtype=torch.int64, device=like.device)
    values = torch.full((count, *like.shape[1:]), value, dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(indices, values, like.shape, is_coalesced=True, check_invariants=False)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a complex tensor's real and imaginary parts [..., 2]; a real tensor as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def sum_sparse(exchange: Exchange, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of all ranks' sparse tensors, and the bytes that this rank has sent.

    The ranks send each other how many rows they have, then the rows' indices and values. All add them up in
    rank order, row by row, so that every rank gets the same bits on any device.

    Args:
        tensor: coalesced; all ranks have one shape and type, and any number of rows.

    Raises:
        PeerLostError: another rank is gone or did not come in time.
    """
    indices, values = tensor.indices(), tensor.values()
    rows = exchange.gather(_bytes(torch.tensor([indices.shape[1]], device=tensor.device)))
    counts = [int(count.view(torch.int64)) for count in rows]
    most = max(counts)
    if not most:
        return tensor, 8
    all_indices = _gather(exchange, indices.t(), counts, most)
    all_values = _gather(exchange, values, counts, most)
    union, places = torch.unique(torch.cat(all_indices), dim=0, return_inverse=True)
    summed = torch.zeros((len(union), *values.shape[1:]), dtype=values.dtype, device=values.device)
    for part, where in zip(all_values, places.split(counts), strict=True):
        summed.index_add_(0, where, part)  # each row once, so that the order of additions is the ranks'
    result = torch.sparse_coo_tensor(
        union.t(), summed, tensor.shape, is_coalesced=True, check_invariants=False
    )
    sent = most * (8 * indices.shape[0] + values[:1].new_empty((1, *values.shape[1:])).nbytes)
    return result, 8 + sent


def _gather(exchange: Exchange, local: torch.Tensor, counts: Sequence[int], most: int) -> list[torch.Tensor]:
    """Return every rank's rows; this rank's are filled up to the largest number, as all send alike."""
    padded = local.new_zeros((most, *local.shape[1:]))
    padded[: len(local)] = local
    gathered = exchange.gather(_bytes(padded))
    return [
        part.contiguous().view(padded.dtype).view(padded.shape)[:count]
        for part, count in zip(gathered, counts, strict=True)
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
