"""What a step does beyond a plain loop stays little, and does not grow with the model's layers."""

from __future__ import annotations

from collections.abc import Iterator

import bench_step
import pytest
import torch


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_step_does_little_beyond_a_plain_loop() -> None:
    small, large = bench_step.bench(2), bench_step.bench(6)
    beyond = {
        layers: {key: found["hetexp"][key] - found["plain loop"][key] for key in found["hetexp"]}
        for layers, found in ((2, small), (6, large))
    }
    # The verdict on the gradient: the only value that is looked at.
    assert small["hetexp"]["reads"] == large["hetexp"]["reads"] == 1
    assert beyond[6]["operations"] - beyond[2]["operations"] < 10
    assert 0 < beyond[2]["operations"] < 60
    # A parameter may be looked at, but modules are not walked through: that alone is ten calls for each.
    parameters = 4 * 12
    assert beyond[6]["python calls"] - beyond[2]["python calls"] < 5 * parameters
    assert large["plain loop"]["python calls"] > small["plain loop"]["python calls"]
