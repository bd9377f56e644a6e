"""Samples come to a card from page-locked memory, however they are loaded, and are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_by_one import OneByOne
from torch.utils.data import TensorDataset

from hetexp.core.split import Split
from hetexp.data.loader import local_batches
from hetexp.data.page_locked import on_device
from hetexp.data.sampler import GlobalSampler, Position


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_microbatches_are_page_locked(num_workers: int, one_by_one: bool) -> None:
    rows = TensorDataset(torch.randn(512, 3, 32, 32), torch.arange(512))
    dataset: Any = OneByOne(rows) if one_by_one else rows
    sampler, card = GlobalSampler(512, 64, seed=1), torch.device("cuda", 0)
    arrived = []
    batches = local_batches(
        dataset,
        sampler,
        Position(),
        40,
        lambda step, n: Split((n,)),
        0,
        2,
        num_workers=num_workers,
        page_locked=True,
    )
    for batch in batches:
        for inputs, targets in batch.microbatches:
            assert inputs.is_pinned()
            assert targets.is_pinned()
            arrived.append((on_device(inputs, card, torch.float32), on_device(targets, card, torch.float32)))
    # Memory that is given again must not be filled before the copy from it has ended.
    for inputs, targets in arrived:
        assert torch.equal(inputs.cpu(), rows.tensors[0][targets.cpu()])
    assert len(arrived) == 80
