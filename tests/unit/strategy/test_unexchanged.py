"""What strategies share that exchange nothing in backward."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hetexp.comm.communicator import SoloCommunicator
from hetexp.model.recompute import recompute_layers
from hetexp.plan.strategy import Strategy
from hetexp.strategy.independent import Independent
from hetexp.strategy.local_sgd import LocalSGD
from hetexp.strategy.single import Single


@pytest.mark.parametrize("strategy", [Single(), LocalSGD(), Independent()], ids=lambda one: one.name)
def test_a_batch_that_is_computed_again_counts_once(strategy: Strategy) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()), nn.Linear(4, 2))
    model, inputs = copy.deepcopy(plain), torch.randn(6, 3)
    recompute_layers(model)
    module = strategy.wrap(model, torch.device("cpu"))
    strategy.attach_group(module, SoloCommunicator(), inputs, nullcontext)
    module(inputs).sum().backward()
    plain(inputs).sum().backward()
    buffers = dict(plain.named_buffers())
    assert int(buffers["1.0.num_batches_tracked"]) == 1
    for name, buffer in model.named_buffers():
        assert torch.allclose(buffer, buffers[name]), name
