"""From a plan, a strategy and a policy to stages: what decides, what is told, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support import plan_on

from hetexp.balancing.adaptive import Adaptive
from hetexp.balancing.equal import Equal
from hetexp.balancing.manual import Manual
from hetexp.balancing.profiled import Profiled
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel
from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.core.stage import Layer, Stage
from hetexp.hardware.links import HOST_EXCHANGE
from hetexp.launch.prepare.preparation import with_assignment
from hetexp.plan.device_estimates import NOTHING, DeviceEstimates
from hetexp.plan.stages.assign import StageAssignment, assign_stages

MIB = 2**20


@dataclass(frozen=True)
class Facts:
    name: str = "1F1B"
    stages_a_rank: int = 1
    returns: bool = False


@dataclass
class Cuts:
    """A strategy that cuts models; `groups=None` leaves them to the planner."""

    groups: list[list[int]] | None = None
    ranges: list[list[list[int]]] | None = None
    schedule: Facts = field(default_factory=Facts)
    microbatches: int = 8

    def num_microbatches(self, num_stages: int, num_ranks: int, num_samples: int) -> int:
        return self.microbatches

    def groups_on(self, devices: Sequence[DeviceSpec]) -> list[list[int]] | None:
        return self.groups

    def ranges_in(self, layers: Sequence[str]) -> list[list[list[int]]] | None:
        return self.ranges


def pipeline(count: int, **others: Any) -> Cuts:
    return Cuts([list(range(count))], **others)


def layers(count: int, weight: int = 0, kept: int = 0) -> tuple[Layer, ...]:
    return (Layer("a layer", 1 / count, weight, weight, 0, kept, 0, 2 * weight),) * count


def plan_of(memory: Sequence[float | None], total: int = 64) -> Plan:
    """Return a plan of CPUs with so many GiB each."""
    devices = [
        DeviceSpec(f"cpu:{i}", "cpu", i, f"CPU {i}", "cpu", memory_bytes=None if m is None else int(m * GIB))
        for i, m in enumerate(memory)
    ]
    return plan_on(devices, {"trainer": {"global_batch_size": total}})


def known(plan: Plan, *per_sample: float, channel: Channel | None = None) -> DeviceEstimates:
    own = [DeviceCalibration(SpeedCurve(0.0, one), 2 / 3, 0.0, 0.0) for one in per_sample]
    return DeviceEstimates.measured(plan.devices, own, Exchange(measured=channel or Channel()))


def ranges(found: StageAssignment) -> list[list[tuple[int, int, int, int]]]:
    return [[(s.replica, s.index, s.first_layer, s.end_layer) for s in own] for own in found.stages]


def test_measured_speeds_decide() -> None:
    plan = plan_of([None, None])
    found = assign_stages(plan, pipeline(2), Profiled(), layers(8), known(plan, 0.01, 0.03))
    assert found.ranks == (0, 1)
    assert ranges(found) == [[(0, 0, 0, 6)], [(0, 1, 6, 8)]]
    assert (found.shares, found.local_batch_sizes) == ((0.75, 0.25), (64, 64))
    # Beside the work each message has gloo's latency, 0.1 ms.
    assert found.step_seconds == pytest.approx(0.01 * 8 * 0.75 * 9 + 8 * HOST_EXCHANGE.latency_seconds)
    assert found.bubble == pytest.approx(1 / 9, abs=2e-3)
    assert found.reasons == (
        "The pipeline takes 64 samples a step in 8 microbatches (1F1B): layers 0–5 on cpu:0, layers 6–7 on "
        "cpu:1.",
        "A step is predicted to take 0.5408 s, 11.2% of it waiting; with as many layers in each stage, 1 s "
        "(speeds: measured).",
    )


def test_shares_decide_where_the_policy_says_so_and_speeds_predict() -> None:
    plan = plan_of([None, None])
    found = assign_stages(plan, pipeline(2), Equal(), layers(8), known(plan, 0.01, 0.03))
    assert ranges(found) == [[(0, 0, 0, 4)], [(0, 1, 4, 8)]]
    assert found.step_seconds == pytest.approx(0.12 * 8 + 0.04, rel=1e-3)
    assert "The layers follow the shares of policy equal." in found.reasons
    found = assign_stages(plan, pipeline(2), Manual([3, 1]), layers(8), None)
    assert ranges(found) == [[(0, 0, 0, 6)], [(0, 1, 6, 8)]]
    assert (found.step_seconds, found.bubble) == (None, None)
    without = assign_stages(plan, pipeline(2), Manual([1, 0]), layers(8), None)
    assert ranges(without)[1] == [(0, 1, 7, 8)]  # a stage has a layer at least


@pytest.mark.parametrize("policy", [Profiled(), Adaptive()])
def test_where_nothing_is_known_shares_decide(policy: Any) -> None:
    plan = plan_of([None, None])
    nothing = DeviceEstimates((None, None), (NOTHING,) * 2, plan.devices, Exchange())
    found = assign_stages(plan, pipeline(2), policy, layers(8), nothing)
    assert ranges(found) == [[(0, 0, 0, 4)], [(0, 1, 4, 8)]]
    name = type(policy).__name__.lower()
    told = f"The layers follow the shares of policy {name}, as nothing is known of the devices' speeds."
    assert found.reasons[-1] == told


def test_a_device_that_holds_the_others_up_is_left_out() -> None:
    plan = plan_of([None, None, None])
    slow = known(plan, 0.01, 1.0, 0.01)
    found = assign_stages(plan, pipeline(3), Profiled(), layers(6), slow)
    assert found.ranks == (0, 2)
    assert found.reasons[-1] == "Without cpu:1 (CPU 1) a step is as short or shorter."
    assert len(assign_stages(plan, pipeline(3), Profiled(drop_slower=False), layers(6), slow).ranks) == 3
    assert len(assign_stages(plan, pipeline(3), Adaptive(), layers(6), slow).ranks) == 3


def test_devices_change_places_where_memory_asks_for_it() -> None:
    """The first stage keeps two microbatches and the last one: the device with more memory goes first."""
    plan = plan_of([1.0, 3.0])
    many = layers(4, weight=1, kept=60 * MIB)
    found = assign_stages(plan, pipeline(2), Profiled(), many, known(plan, 0.01, 0.01))
    assert found.ranks == (1, 0)
    assert found.memory_bytes[0] > found.memory_bytes[1]
    changed = with_assignment(plan, found)
    assert [device.id for device in changed.devices] == ["cpu:1", "cpu:0"]
    assert changed.stages == found.stages
    assert changed.memory_bytes == found.memory_bytes
    assert not any(reason.startswith("Policy ") for reason in changed.reasons)
    assert assign_stages(plan, pipeline(2), Profiled(), many, known(plan, 0.01, 0.01), False).ranks == (0, 1)


def test_given_ranges_are_kept_and_checked() -> None:
    plan = plan_of([1.0, 1.0])
    chosen = pipeline(2, ranges=[[[0, 1], [1, 4]]])
    found = assign_stages(plan, chosen, Profiled(), layers(4), known(plan, 0.01, 0.01))
    assert ranges(found) == [[(0, 0, 0, 1)], [(0, 1, 1, 4)]]
    heavy = layers(4, weight=100 * MIB)
    with pytest.raises(ConfigError, match=r"the cut that is given does not fit .*CPU 1.* 1.17 of 1.00 GiB"):
        assign_stages(plan, chosen, Profiled(), heavy, known(plan, 0.01, 0.01))
    assert (
        assign_stages(plan, pipeline(2), Profiled(), heavy, known(plan, 0.01, 0.01)).memory_bytes
        == (800 * MIB,) * 2
    )
    with pytest.raises(ConfigError, match="no cut fits the devices' memory"):
        assign_stages(plan, pipeline(2), Profiled(), layers(4, weight=200 * MIB), known(plan, 0.01, 0.01))
    with pytest.raises(ConfigError, match="`model` must have at least 3 layers"):
        assign_stages(plan_of([None] * 3), pipeline(3), Equal(), layers(2), None)


def test_a_card_has_less_room_for_tensors_than_memory() -> None:
    """Driver, workspaces and fragmentation take their part."""
    plan = plan_of([1.0, 1.0])
    cards = [replace(device, backend="cuda", vendor="nvidia") for device in plan.devices]
    heavy = layers(4, weight=50 * MIB)  # 400 MiB for each, of the 1,024 that CPUs have
    assert assign_stages(plan, pipeline(2), Profiled(), heavy, known(plan, 0.01, 0.01)).step_seconds
    of_cards = replace(plan, devices=tuple(cards))
    with pytest.raises(ConfigError, match="no cut fits the devices' memory"):
        assign_stages(of_cards, pipeline(2), Profiled(), heavy, known(of_cards, 0.01, 0.01))


def test_groups_that_the_planner_chooses() -> None:
    """Devices 0 and 2 each hold half of the model, device 1 all of it."""
    plan = plan_of([0.8, 1.6, 0.8])
    found = assign_stages(plan, Cuts(), Profiled(), layers(4, weight=80 * MIB), known(plan, 0.01, 0.01, 0.01))
    assert found.ranks == (0, 1, 2)  # rising in each pipeline: nothing changes places
    assert {own[0].replica for own in found.stages} == {0, 1}
    assert found.stages[0][0].replica == found.stages[2][0].replica
    alone = found.stages[1][0]
    assert (alone.first_layer, alone.end_layer) == (0, 4)
    assert sum(found.replica_batch_sizes) == 64
    assert found.replica_batch_sizes[alone.replica] < 32  # two devices together do more
    assert found.local_batch_sizes[0] == found.local_batch_sizes[2] == 64 - found.local_batch_sizes[1]
    assert sum(found.shares) == pytest.approx(1)


def test_given_groups_exchange_what_both_hold() -> None:
    """One after another: the ring of layers 0–2 of the first two, then that of the last layer."""
    plan = plan_of([None] * 4)
    groups = Cuts([[0, 1], [2, 3]], [[[0, 2], [2, 4]], [[0, 3], [3, 4]]], microbatches=1)
    channel = Channel(0.5, MIB)
    found = assign_stages(
        plan, groups, Profiled(), layers(4, weight=MIB), known(plan, *[0.01] * 4, channel=channel)
    )
    assert found.replica_batch_sizes == (32, 32)
    # Rings: layers 0–1 on (0, 2), 2 on (1, 2), 3 on (1, 3); of two ranks each moves its bytes once.
    assert found.step_seconds is not None
    pipelines = 0.01 * 32 + 2 * HOST_EXCHANGE.latency_seconds  # one microbatch; messages have no bytes
    assert found.step_seconds == pytest.approx(pipelines + (1 + 2) + (1 + 1) + (1 + 1))


def test_several_stages_a_rank() -> None:
    plan = plan_of([None, None])
    strategy = pipeline(2, schedule=Facts("ZBVZeroBubble", 2, True))
    found = assign_stages(plan, strategy, Profiled(), layers(8), known(plan, 0.01, 0.01))
    assert [[stage.index for stage in own] for own in found.stages] == [[0, 3], [1, 2]]
    assert found.stages[0][0] == Stage(0, 0, 0, found.stages[1][0].first_layer)


def test_fewer_bytes_between_stages_are_predicted() -> None:
    """A slow way between hosts: what is coded passes it sooner, and its cut may be another one."""
    spent = []
    for wire in ("float32", "bfloat16", "int8"):
        plan = plan_of([None, None])
        plan = replace(plan, config={**plan.config, "comm": {"boundary_wire": wire}})
        sends = tuple(replace(layer, output_bytes=2**20) for layer in layers(4))
        found = assign_stages(plan, pipeline(2), Profiled(), sends, known(plan, 1e-6, 1e-6))
        assert found.step_seconds is not None
        spent.append(found.step_seconds)
    assert spent[0] > 1.8 * spent[1] > 3.0 * spent[2]
