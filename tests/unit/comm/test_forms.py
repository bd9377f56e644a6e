"""Sparse gradients are summed over ranks row by row, with the same bits on every rank."""

from __future__ import annotations

import pytest
import torch
from fake_ranks import FakeExchange, FakeGroup
from torch import nn

from hetexp.comm.forms import as_real, no_rows, of_other_forms, sparse_parameters, sum_sparse


def sparse(
    rows: list[int], width: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    values = torch.randn(len(rows), width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.int64), values, (9, width)).coalesce()


def summed(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    return FakeGroup(len(tensors)).run(lambda comm: sum_sparse(FakeExchange(comm), tensors[comm.rank]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "rows", [[[1, 4, 4], [4, 8], []], [[], [], []], [[0], [0]], [[3, 1], [7, 5]]], ids=str
)
def test_the_sum_is_that_of_dense_tensors(rows: list[list[int]], dtype: torch.dtype) -> None:
    tensors = [sparse(of_rank, seed=rank, dtype=dtype) for rank, of_rank in enumerate(rows)]
    results = [result for result, _ in summed(tensors)]
    expected = torch.zeros(9, 3, dtype=dtype)
    for tensor in tensors:  # in rank order
        expected = expected + tensor.to_dense()
    for result in results:
        assert result.is_coalesced()
        assert torch.equal(result.to_dense(), expected)
        assert result._nnz() == len({row for of_rank in rows for row in of_rank})


def test_several_sparse_dimensions() -> None:
    dense = [torch.tensor([[0.0, 2.0], [0.0, 1.0]]), torch.tensor([[3.0, 0.5], [0.0, 0.0]])]
    for result, _ in summed([tensor.to_sparse() for tensor in dense]):
        assert torch.equal(result.to_dense(), dense[0] + dense[1])


def test_what_it_sends_are_rows_and_indices() -> None:
    assert [sent for _, sent in summed([sparse([1, 2, 3]), sparse([5])])] == [8 + 3 * (8 + 24)] * 2
    assert [sent for _, sent in summed([sparse([]), sparse([])])] == [8, 8]


def test_values_that_are_not_finite_reach_every_rank() -> None:
    tensors = [no_rows(torch.zeros(9, 3), float("nan")).coalesce(), sparse([2], dtype=torch.float32)]
    for result, _ in summed(tensors):
        assert bool(result.to_dense()[0].isnan().all())
        assert bool(result.to_dense()[1:].isfinite().all())
    assert no_rows(torch.zeros(9, 3))._nnz() == 0


def test_which_parameters_have_such_gradients() -> None:
    model = nn.ModuleDict(
        {
            "dense": nn.Embedding(3, 2),
            "words": nn.Embedding(3, 2, sparse=True),
            "bag": nn.EmbeddingBag(3, 2, sparse=True),
        }
    )
    assert sparse_parameters(model) == {model["words"].weight, model["bag"].weight}
    assert of_other_forms(model)
    assert not of_other_forms(nn.Embedding(3, 2))
    wave = nn.Module()
    wave.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert of_other_forms(wave)
    assert as_real(wave.weight.detach()).shape == (2, 2)
