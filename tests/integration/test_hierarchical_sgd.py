"""Hosts that each take exact steps, and meet now and then; they are groups of ranks on this machine."""

from __future__ import annotations

import pytest
from support import Train, difference, worst

from hetexp.core.errors import ConfigError

EXACT = 1e-12
MODEL = (
    "data=synthetic",
    "data.num_samples=160",
    "data.num_test_samples=16",
    "model=mlp",
    "model.hidden_sizes=[12]",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=16",
    "trainer.precision=float64",
    "trainer.log_every=1",
)
FOUR = ("hardware.devices=[cpu,cpu,cpu,cpu]", "balancing=manual")
GROUPS = ("strategy=hierarchical_sgd", "strategy.groups=[[0,1],[2,3]]")
DILOCO = (
    "strategy.outer_lr=0.7",
    "strategy.outer_momentum=0.9",
    "strategy.outer_nesterov=true",
    "optimizer=adamw",
)


def test_hosts_that_meet_each_step_are_ddp(train: Train) -> None:
    """Plain SGD, unequal devices in unequal hosts, one of them without samples."""
    steps = ("trainer.max_steps=6", "trainer.checkpoint_every=1", "optimizer=sgd")
    shares = "balancing.weights=[7,3,6,0]"
    ddp = train(*MODEL, *FOUR, shares, *steps, "strategy=ddp")
    hosts = train(*MODEL, *FOUR, shares, *steps, *GROUPS, "strategy.sync_every=1")
    loss, parameters = worst(hosts, ddp, 6)
    assert loss <= EXACT
    assert parameters <= EXACT
    assert not hosts.summary["exact"]


def test_a_host_is_one_device_of_local_sgd(train: Train) -> None:
    """With AdamW, clipping and an outer momentum, over several syncs: two devices, or two hosts of two."""
    steps = ("trainer.max_steps=12", "trainer.checkpoint_every=4", "trainer.clip_norm=0.5", *DILOCO)
    two = ("hardware.devices=[cpu,cpu]", "balancing=manual", "balancing.weights=[10,6]")
    devices = train(*MODEL, *two, *steps, "strategy=local_sgd", "strategy.sync_every=4")
    four = (*MODEL, *FOUR, "balancing.weights=[7,3,1,5]", *steps)
    hosts = train(*four, *GROUPS, "strategy.sync_every=4")
    assert len(hosts.losses) == len(devices.losses) == 12
    for one, other in zip(hosts.losses, devices.losses, strict=True):
        assert abs(one - other) <= EXACT * abs(other)
    assert difference(hosts.parameters(), devices.parameters()) <= EXACT
    # Else it would say nothing: the hosts' steps are not those of four devices apart.
    apart = train(*four, "strategy=local_sgd", "strategy.sync_every=4")
    assert difference(apart.parameters(), devices.parameters()) > 1e-6


def test_one_host_is_refused_with_the_fix(train: Train) -> None:
    with pytest.raises(
        ConfigError, match=r"on one host, but is 'hierarchical_sgd' instead. .*strategy.groups="
    ):
        train(*MODEL, *FOUR, "balancing.weights=[1,1,1,1]", "strategy=hierarchical_sgd")
