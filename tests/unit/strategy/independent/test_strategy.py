"""Training apart: nothing is exchanged, and what cannot go together is told."""

from __future__ import annotations

from support import unbuilt_config
from torch import nn

from hetexp.core.compose.options import group_options
from hetexp.core.config import read_config
from hetexp.core.instantiate import check_component
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.strategy.independent import Independent

CPUS = [CpuBackend.describe(index) for index in range(3)]


def test_the_option_has_the_defaults_of_the_class() -> None:
    node = group_options("strategy")["independent"]
    assert check_component("strategy", node) == []
    made = Independent(**{key: value for key, value in node.items() if key != "_target_"})
    assert vars(made) == vars(Independent())


def test_a_soup_needs_a_merge() -> None:
    config = read_config(unbuilt_config())
    assert Independent(soup="greedy").check(config, CPUS) == []
    (problem,) = Independent(merge=False, soup="greedy").check(config, CPUS)
    assert problem == (
        "`strategy.soup` must be null unless `strategy.merge` is true, but is 'greedy' instead. "
        "hetexp merge --soup greedy does it later."
    )


def test_nothing_is_exchanged() -> None:
    strategy = Independent()
    assert not strategy.all_reduces()
    assert strategy.exchanged_bytes(nn.Linear(2, 2), 3) == 0
