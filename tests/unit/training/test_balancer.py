"""Every rank gives the same answer, at whatever step it asks, and nothing changes that a loader has seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import unbuilt_config
from torch.utils.data import Dataset, TensorDataset

from hetexp.balancing.scheduler import SchedulerSettings
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.plan import Plan
from hetexp.core.split import Split, apportion
from hetexp.data.loader import local_batches, read_ahead
from hetexp.data.sampler import GlobalSampler, Position
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.training.balancer import SPLITS_FILE, Balancer, start_curves

TOTAL = 64


def plan_of(*weights: float, run_dir: Path = Path("run"), **changes: Any) -> Plan:
    shares = tuple(weight / sum(weights) for weight in weights)
    plan = Plan(
        run_id="run",
        run_dir=str(run_dir),
        name="run",
        group=None,
        config=unbuilt_config(trainer={"global_batch_size": TOTAL, "microbatch_size": None}),
        devices=tuple(CpuBackend.describe(i) for i in range(len(weights))),
        strategy="ddp",
        shares=shares,
        local_batch_sizes=apportion(TOTAL, shares).counts,
        collective_backend="gloo",
        threads=(1,) * len(weights),
        precisions=("float32",) * len(weights),
    )
    return replace(plan, **changes)


SETTINGS = SchedulerSettings(max_move=1.0)


class Ranks:
    """All ranks of a job, each with its own balancer and loader, one step after another.

    Args:
        rates: seconds that a sample takes each device.
        accumulate: of each rank, since ranks may differ in how far their loaders have read.
    """

    def __init__(
        self, plan: Plan, rates: list[float], num_workers: int = 0, settings: SchedulerSettings = SETTINGS
    ) -> None:
        self.plan, self.rates = plan, rates
        self.ahead = 2 * num_workers
        self.balancers = [Balancer(plan, settings, self.ahead) for _ in rates]
        self.step = 0
        self.seen: list[tuple[int, ...]] = []
        self.answers: dict[int, Split] = {}

    def own(self, rank: int, samples: int) -> float:
        return self.rates[rank] * samples

    def run(self, steps: int, total: int = TOTAL) -> None:
        for _ in range(steps):
            for balancer in self.balancers:  # the loaders read ahead, as far as they may
                for step in range(self.step, self.step + 1 + self.ahead):
                    answer = balancer.split(step, total)
                    assert self.answers.setdefault(step, answer) == answer, "a step was split in two ways"
            self.seen.append(self.answers[self.step].counts)
            if self.step:
                seconds = [self.own(rank, samples) for rank, samples in enumerate(self.seen[-2])]
                told = [b.observe(self.step - 1, TOTAL, seconds, self.step) for b in self.balancers]
                assert all(one == told[0] for one in told)
            self.step += 1


def test_the_plans_split_holds_where_nothing_follows() -> None:
    balancer = Balancer(plan_of(3, 1))
    assert not balancer.follows
    assert balancer.split(0, TOTAL).counts == (48, 16)
    assert balancer.split(99, 8).counts == (6, 2)
    assert balancer.now(4).counts == (3, 1)
    assert balancer.weights == (0.75, 0.25)
    assert balancer.observe(0, TOTAL, [1.0, 1.0], 1) is None
    assert balancer.to_dict() is None


def test_one_device_has_nothing_to_follow() -> None:
    assert not Balancer(plan_of(1), SETTINGS).follows


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_shares_follow_the_devices_and_no_step_is_split_twice(num_workers: int) -> None:
    ranks = Ranks(plan_of(1, 1), [0.01, 0.03], num_workers)
    ranks.run(12 + 2 * num_workers)
    assert ranks.seen[0] == (32, 32)
    assert ranks.seen[-1] == (48, 16)
    assert all(sum(counts) == TOTAL for counts in ranks.seen)
    # Nothing that a loader may have seen when the decision was made.
    first = ranks.seen.index((48, 16))
    assert first >= 4 + 2 * num_workers
    assert ranks.balancers[0].num_changes == 1
    assert {balancer.weights for balancer in ranks.balancers} == {(0.75, 0.25)}


def test_a_device_that_is_slow_for_a_while_gets_its_share_back() -> None:
    ranks = Ranks(plan_of(1, 1), [0.01, 0.01])
    ranks.run(20)
    assert set(ranks.seen) == {(32, 32)}
    ranks.rates = [0.01, 0.02]
    ranks.run(20)
    assert ranks.seen[26] == ranks.seen[-1] == (43, 21)
    ranks.rates = [0.01, 0.01]
    ranks.run(20)
    assert ranks.seen[46] == ranks.seen[-1] == (32, 32)


def test_large_moves_are_made_in_parts() -> None:
    ranks = Ranks(plan_of(1, 1), [0.01, 0.15], settings=SchedulerSettings(max_move=0.125))
    ranks.run(16)
    steps = [abs(b[0] - a[0]) for a, b in zip(ranks.seen, ranks.seen[1:], strict=False)]
    assert max(steps) == 8
    assert ranks.seen[-1] == (60, 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_device_without_samples_is_tried_for_one_step_and_returns(num_workers: int) -> None:
    settings = SchedulerSettings(max_move=1.0, probe_every=10)
    ranks = Ranks(plan_of(1, 1), [0.001, 0.2], num_workers, settings)
    ranks.run(26 + 6 * num_workers)
    assert ranks.seen[9 + 2 * num_workers] == (64, 0)
    probes = [at for at, counts in enumerate(ranks.seen) if at > 9 + 2 * num_workers and counts[1]]
    assert probes
    for step in probes:  # one step at a time, and its result is waited for
        assert ranks.seen[step][1] < 16
        assert step + 1 not in probes
    ranks.rates = [0.001, 0.001]
    ranks.run(400)
    assert ranks.seen[-1] == (32, 32)


def test_a_short_batch_is_split_as_the_step_would_be() -> None:
    ranks = Ranks(plan_of(1, 1), [0.01, 0.03])
    ranks.run(12)
    balancer = ranks.balancers[0]
    assert balancer.split(ranks.step, 16).counts == (12, 4)
    assert balancer.now(8).counts == (6, 2)


@settings(max_examples=40, deadline=None)
@given(
    rates=st.lists(st.floats(1e-3, 1e-1), min_size=2, max_size=4),
    stop=st.integers(1, 30),
    num_workers=st.integers(0, 2),
)
def test_a_checkpoint_changes_no_decision(rates: list[float], stop: int, num_workers: int) -> None:
    plan = plan_of(*[1.0] * len(rates))
    whole, first = Ranks(plan, rates, num_workers), Ranks(plan, rates, num_workers)
    whole.run(40)
    first.run(stop)
    stored = json.loads(json.dumps(first.balancers[0].to_dict()))
    for position in range(len(rates)):
        first.balancers[position] = Balancer(plan, SETTINGS, first.ahead)
        assert first.balancers[position].restore(stored)
    first.run(40 - stop)
    assert first.seen == whole.seen


def test_another_job_starts_anew() -> None:
    ranks = Ranks(plan_of(1, 1), [0.01, 0.03])
    ranks.run(12)
    stored = ranks.balancers[0].to_dict()
    assert not Balancer(plan_of(1, 1, 1), SETTINGS).restore(stored)
    assert not Balancer(plan_of(1, 1)).restore(stored)
    assert not Balancer(plan_of(1, 1), SETTINGS).restore(None)
    assert not Balancer(plan_of(1, 1, local_batch_sizes=(16, 16)), SETTINGS).restore(stored)
    fresh = Balancer(plan_of(1, 1), SETTINGS)
    assert fresh.restore(stored)
    assert fresh.split(99, TOTAL).counts == (48, 16)


def test_changes_are_written_down_with_their_reason(tmp_path: Path) -> None:
    balancer = Balancer(plan_of(1, 1, run_dir=tmp_path), SETTINGS)
    for step in range(1, 8):
        counts = balancer.split(step - 1, TOTAL).counts
        balancer.record(balancer.observe(step - 1, TOTAL, [0.01 * counts[0], 0.03 * counts[1]], step))
    (line,) = [json.loads(text) for text in (tmp_path / SPLITS_FILE).read_text().splitlines()]
    assert line["counts"] == [48, 16]
    assert line["action"] == "resplit"
    assert "from 32 / 32 to 48 / 16 samples" in line["reason"]
    assert balancer.split(line["step"] - 1, TOTAL).counts == (32, 32)
    assert balancer.split(line["step"], TOTAL).counts == (48, 16)


def test_start_curves_are_the_calibrations_or_else_the_shares() -> None:
    plan = plan_of(3, 1)
    first, second = start_curves(plan)
    assert first.seconds(48) == pytest.approx(1.0)
    assert second.seconds(16) == pytest.approx(1.0)
    curve = SpeedCurve(0.1, 0.02)
    measured = {"devices": [{"curve": curve.to_dict()}] * 2}
    assert start_curves(replace(plan, calibration=measured)) == [curve, curve]
    # Taken for infinitely slow, and yet something to begin with.
    assert start_curves(plan_of(1, 0))[1].seconds(1) > 100


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index


@pytest.mark.parametrize("data", [Numbers(), TensorDataset(torch.arange(400), torch.arange(400))])
def test_every_sample_once_whatever_is_decided(data: Dataset[Any]) -> None:
    """Case 14: an epoch of 400 samples in global batches of 20, shares that change, read ahead or not."""
    plan = plan_of(1, 1, local_batch_sizes=(10, 10))
    balancers = [Balancer(plan, SETTINGS, read_ahead(data)) for _ in range(2)]
    sampler = GlobalSampler(400, 20, seed=1)
    loaders = [
        local_batches(data, sampler, Position(), 20, balancer.split, rank)
        for rank, balancer in enumerate(balancers)
    ]
    seen: list[int] = []
    counts: list[list[int]] = []
    for step, batches in enumerate(zip(*loaders, strict=True)):
        slower = 4.0 if 5 <= step < 12 else 1.0
        numbers = [[int(i) for inputs, _ in batch.microbatches for i in inputs] for batch in batches]
        counts.append([len(one) for one in numbers])
        assert sum(counts[-1]) == 20
        seen += [number for one in numbers for number in one]
        if step:
            seconds = [0.01 * counts[-2][0], 0.01 * slower * counts[-2][1]]
            for balancer in balancers:
                balancer.observe(step - 1, 20, seconds, step)
    assert sorted(seen) == list(range(400))
    assert counts[0] == [10, 10]
    assert [16, 4] in counts
    assert counts[-1] == [10, 10]


def test_a_device_with_large_fixed_costs_is_understood_after_two_sizes() -> None:
    """A card that waits for its launches takes nearly as long for half of the samples."""

    class Launching(Ranks):
        def own(self, rank: int, samples: int) -> float:
            return 0.01 * samples if rank == 0 else 0.3 + 0.01 * samples

    ranks = Launching(plan_of(1, 1), [1.0, 1.0])
    ranks.run(30)
    slowest = max(ranks.own(rank, samples) for rank, samples in enumerate(ranks.seen[-1]))
    assert slowest <= 0.47 * 1.03  # of 47 / 17, where both take as long
    assert ranks.balancers[0].num_changes <= 3
    curve = ranks.balancers[0].scheduler.curves[1]  # type: ignore[union-attr]
    assert curve.fixed_seconds == pytest.approx(0.3, rel=0.1)
