"""From measurements to the plan: the best split, and no device that makes the job slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import plan_on

from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.plan.calibrated_plan import best_split, calibrated_plan, choose


def plan_of(count: int, total: int = 64) -> Plan:
    devices = [DeviceSpec(f"cuda:{i}", "cuda", i, f"Card {i}", "nvidia") for i in range(count)]
    return plan_on(
        devices,
        {"trainer": {"global_batch_size": total}},
        memory_bytes=(None,) * count,
        reasons=("Policy profiled splits 64 samples a step.", "nccl exchanges the gradients."),
    )


def device(per_sample: float, fixed: float = 0.0) -> DeviceCalibration:
    return DeviceCalibration(SpeedCurve(fixed, per_sample), 0.5, 0.0, 0.0)


def linked(seconds: float) -> Exchange:
    """An exchange that takes so long, whatever the number of devices (two: 2 rounds of one latency)."""
    return Exchange(((1.0, 0),), Channel(seconds / 2))


def test_two_that_help_each_other() -> None:
    choice = choose(plan_of(2), [device(0.01), device(0.03)], linked(0.02))
    assert choice.ranks == (0, 1)
    assert choice.split.counts == (48, 16)
    assert choice.step_seconds == pytest.approx(0.5)
    (reason,) = choice.reasons
    assert "cuda:0 48, cuda:1 16; predicted 0.5 s a step" in reason


def test_one_that_slows_the_job_is_left_out_with_the_reason() -> None:
    choice = choose(plan_of(2), [device(0.2), device(0.01)], linked(0.1))
    assert choice.ranks == (1,)
    assert choice.split.counts == (64,)
    assert choice.step_seconds == pytest.approx(0.64)
    assert choice.reasons[0].startswith(
        "cuda:0 (Card 0) is left out: with it a step is predicted to take 0.7"
    )
    assert choice.reasons[0].endswith("without it 0.64 s.")


def test_a_gain_that_cannot_be_measured_is_no_reason_to_take_it() -> None:
    slow = device(10.0, fixed=0.3)
    assert choose(plan_of(2), [device(0.01), slow], Exchange()).ranks == (0,)
    assert choose(plan_of(2), [device(0.01), slow], Exchange(), drop_slower=False).ranks == (0, 1)


@pytest.mark.parametrize(
    ("seconds", "before", "ranks"),
    [
        (0.10, None, (0, 1)),  # 0.58 s together against 0.64 s alone
        (0.10, (0,), (0,)),  # 9 % is no reason to change
        (0.00, (0,), (0, 1)),  # 25 % is
        (0.18, None, (0,)),  # 0.66 s against 0.64 s
        (0.18, (0, 1), (0, 1)),
        (0.40, (0, 1), (0,)),
    ],
)
def test_who_takes_part_stays_unless_others_are_clearly_faster(
    seconds: float, before: tuple[int, ...] | None, ranks: tuple[int, ...]
) -> None:
    choice = choose(plan_of(2), [device(0.01), device(0.03)], linked(seconds), before=before)
    assert choice.ranks == ranks
    kept = (
        before == ranks and choose(plan_of(2), [device(0.01), device(0.03)], linked(seconds)).ranks != ranks
    )
    assert any("balancing.recalibrate=true" in reason for reason in choice.reasons) == kept


def test_all_take_part_where_none_may_be_left_out_whatever_was_before() -> None:
    choice = choose(plan_of(2), [device(0.01), device(0.03)], linked(0.4), drop_slower=False, before=(0,))
    assert choice.ranks == (0, 1)


DEVICES = st.lists(st.builds(device, st.floats(1e-3, 1.0), st.floats(0.0, 0.5)), min_size=1, max_size=5)


@given(DEVICES, st.floats(0.0, 2.0))
def test_never_slower_than_the_fastest_alone(devices: list[DeviceCalibration], seconds: float) -> None:
    plan = plan_of(len(devices))
    choice = choose(plan, devices, linked(seconds))
    alone = min(one.curve.seconds(64) for one in devices)
    assert choice.step_seconds <= alone * (1 + 1e-9)
    assert choice.split.total == 64
    for rank in range(len(devices)):
        assert (rank in choice.ranks) or any(str(plan.devices[rank]) in reason for reason in choice.reasons)


def test_memory_limits_the_shares_and_the_sets() -> None:
    # Alone the fast one holds 16 of 64 samples: it needs company, however slow.
    fast, slow = device(0.01).capped(16), device(0.03)
    choice = choose(plan_of(2), [fast, slow], Exchange())
    assert choice.split.counts == (16, 48)
    choice = choose(plan_of(3), [fast, slow, device(0.03)], Exchange())
    assert choice.split.counts == (16, 24, 24)
    with pytest.raises(ValueError, match="64"):
        choose(plan_of(2), [fast, slow.capped(47)], Exchange())
    assert choose(plan_of(2), [fast, slow.capped(48)], Exchange()).split.counts == (16, 48)
    # The slower one alone would do, and the fast one cannot hold a sample.
    assert choose(plan_of(2), [device(0.01).capped(0), slow], Exchange()).ranks in ((1,), (0, 1))


def test_the_plan_of_those_that_take_part() -> None:
    plan = plan_of(3)
    devices = [device(0.01), device(10.0, fixed=5.0), device(0.01)]
    choice = choose(plan, devices, Exchange())
    new = calibrated_plan(plan, devices, Exchange().to_dict(), choice)
    assert [d.id for d in new.devices] == ["cuda:0", "cuda:2"]
    assert new.shares == (0.5, 0.5)
    assert new.local_batch_sizes == (32, 32)
    assert new.threads == (1, 1)
    assert new.calibration is not None
    assert new.calibration["devices"] == [devices[0].to_dict(), devices[2].to_dict()]
    assert new.calibration["predicted_step_seconds"] == choice.step_seconds
    assert not any(reason.startswith("Policy") for reason in new.reasons)
    assert new.reasons[-1] == "nccl exchanges the gradients."
    assert best_split(plan, devices, Exchange(), (0, 2)) == replace(choice, reasons=())


def test_limits_of_a_pass_go_into_the_plan_and_cost_what_they_cost() -> None:
    fast, slow = device(0.01, fixed=0.1), device(0.03)
    assert fast.split_microbatches(None) is fast
    assert fast.split_microbatches(16).split_microbatches(32).curve.microbatch_size == 16
    devices = [fast.split_microbatches(8), slow]
    choice = choose(plan_of(2), devices, Exchange())
    whole = choose(plan_of(2), [fast, slow], Exchange())
    assert choice.split.counts[0] < whole.split.counts[0]  # each of its passes has the fixed cost
    plan = calibrated_plan(plan_of(2), devices, {}, choice)
    assert plan.microbatch_sizes == (8, None)
    assert [plan.microbatch_size(rank) for rank in (0, 1)] == [8, None]
    asked = replace(plan, config={"trainer": {"global_batch_size": 64, "microbatch_size": 4}})
    assert asked.microbatch_size(1) == 4
    assert replace(plan, microbatch_sizes=()).microbatch_size(0) is None
