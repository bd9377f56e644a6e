"""One rank tries the first samples for all, and one reports why a start has failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support import plan_on, unbuilt_config

from hetexp.core.config import read_config
from hetexp.core.device import DeviceSpec
from hetexp.core.errors import ConfigError, StartRefusedError
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.training.loss import build_loss, single_losses
from hetexp.training.measuring.trial_pass import Tried
from hetexp.training.starting.agreement import (
    agree,
    heed_trial,
    share_trial,
    starting_together,
    trying_rank,
)

RAW = unbuilt_config()
CONFIG = read_config(RAW)
CPUS = [CpuBackend.describe(0), CpuBackend.describe(1)]
CARD = replace(CPUS[0], id="cuda:0", backend="cuda")
PLAN = plan_on(CPUS, RAW)


@pytest.mark.parametrize(
    ("devices", "rank"), [(CPUS, 0), ([CARD, *CPUS], 1), ([CARD, replace(CARD, id="cuda:1")], 0)]
)
def test_the_first_rank_on_the_cpu_tries(devices: list[DeviceSpec], rank: int) -> None:
    assert trying_rank(plan_on(devices, RAW)) == rank


def fail(rank: int, store: dist.Store) -> None:
    with starting_together(PLAN, CONFIG, rank, store):
        raise ConfigError(f"rank {rank} does not fit.")


def test_of_an_error_on_all_ranks_one_reports() -> None:
    store = dist.HashStore()
    with pytest.raises(ConfigError, match="rank 0 does not fit"):
        fail(0, store)
    with pytest.raises(StartRefusedError, match=r"rank 0 \(cpu:0\) cannot start"):
        fail(1, store)


def test_a_rank_whose_error_no_other_has_reports_it() -> None:
    store = dist.HashStore()
    store.set("handshake/0", "{}")  # it has built everything
    with pytest.raises(ConfigError, match="rank 1 does not fit"):
        fail(1, store)
    with pytest.raises(StartRefusedError, match=r"rank 1 \(cpu:1\) cannot start"):
        agree(PLAN, CONFIG, 0, store, {"data": {}})


def test_all_ranks_take_over_what_the_trial_has_shown(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    terms = {
        "classes": {"loss": "cross_entropy", "output": "a", "target": "x"},
        "numbers": {"loss": "mse", "output": "b", "target": "y"},
    }
    tried, loss = build_loss("sum", {"terms": terms}), build_loss("sum", {"terms": terms})
    output = {"a": torch.zeros(2, 5, 3), "b": torch.zeros(2)}
    tried.total(output, {"x": torch.zeros(2, 5, dtype=torch.long), "y": torch.zeros(2)})
    share_trial(Tried([single.seen_dim for single in single_losses(tried)], ["mind this"]), store)
    heed_trial(loss, store, tell=False)
    assert not caplog.records
    heed_trial(loss, store, tell=True)
    assert caplog.messages == ["mind this"]
    doubt = {"a": torch.zeros(2, 3, 3), "b": torch.zeros(2)}
    targets = {"x": torch.zeros(2, 3, dtype=torch.long), "y": torch.zeros(2)}
    assert float(loss.total(doubt, targets)) == float(tried.total(doubt, targets))
    with pytest.raises(ConfigError, match=r"loss\.class_dim"):
        build_loss("sum", {"terms": terms}).total(doubt, targets)
