"""What planner, launcher and report ask a strategy, and that a user's own need not know of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support import plan_on, spec_on, unbuilt_config
from torch import nn

from hetexp.balancing.equal import Equal
from hetexp.balancing.profiled import Profiled
from hetexp.core.config import Config
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.prepare.preparation import Preparation
from hetexp.plan.device_estimates import DeviceEstimates
from hetexp.plan.planner import check_plan, make_plan
from hetexp.plan.predict.inputs import PredictionInputs
from hetexp.plan.predict.runs import predict_runs
from hetexp.plan.stages.assign import StagedStrategy
from hetexp.plan.strategy import Strategy
from hetexp.report.diagram.picture import ExchangeBox, picture_of
from hetexp.strategy.auto import Auto
from hetexp.strategy.ddp import DDP
from hetexp.strategy.dp import DP
from hetexp.strategy.hierarchical_sgd import HierarchicalSGD
from hetexp.strategy.hybrid import Hybrid
from hetexp.strategy.independent import Independent
from hetexp.strategy.local_sgd import LocalSGD
from hetexp.strategy.pipeline import Pipeline
from hetexp.strategy.single import Single

CPUS = [CpuBackend.describe(index) for index in range(3)]


class Mean(Strategy):
    """Data parallel as a user may write it."""

    name: ClassVar[str] = "mean"
    exact = True

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        return (
            [] if len(devices) > 1 else ["`strategy` must be single for one device, but is 'mean' instead."]
        )

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        return model

    def accumulate(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def gradient_divisor(self, world_size: int) -> int:
        return world_size


def config(**sections: Any) -> dict[str, Any]:
    return unbuilt_config(strategy={"_target_": f"{__name__}.Mean"}, **sections)


def test_a_data_parallel_strategy_of_a_users_own_needs_no_more() -> None:
    spec = spec_on(CPUS[:2], config(trainer={"seed": 0}))
    assert check_plan(spec) == []
    plan = spec.strategy.prepare(make_plan(spec), Preparation(spec))
    assert (plan.strategy, plan.local_batch_sizes, plan.exact) == ("mean", (4, 4), True)
    assert plan.route is not None and plan.way.name == "shm"
    assert "The exchange goes by shm, in memory that all ranks share (cpu)." in plan.reasons
    curve = DeviceCalibration(SpeedCurve(0.0, 0.01), 0.5, 0.0, 0.0)
    known = DeviceEstimates.measured(plan.devices, [curve] * 2, Exchange())
    inputs = PredictionInputs(plan, known, {"equal": Equal(), "profiled": Profiled()})
    found = predict_runs(inputs, {"mine": spec.strategy})
    (row,) = found.rows
    assert (row.strategy, row.problem) == ("mine", "the cost model does not know this strategy")
    picture = picture_of(plan)
    members = tuple(device.key for device in picture.devices)
    assert picture.exchange == ExchangeBox(
        "gradients", "each step", "shm, through host memory", False, members
    )
    assert picture.lines[0].startswith("strategy mean")


def test_what_speaks_against_it_is_told_without_a_word_of_its_own() -> None:
    (problem,) = check_plan(spec_on(CPUS[:1], config()))
    assert problem.endswith("Or strategy.fallback=single goes on with the fastest of the devices alone.")
    wires = {"wire": "int8", "boundary_wire": "int8"}
    problems = check_plan(spec_on(CPUS[:2], config(comm=wires, debug={"exchange": False})))
    assert [problem.partition(",")[0] for problem in problems] == [
        "`comm.wire` must be float32 where `strategy` is mean",
        "`comm.boundary_wire` must be float32 where `strategy` is mean",
    ]
    assert Mean().check_script()[0].startswith("`strategy` must be ddp or single with hetexp launch")


class Recorded:
    """A preparation that returns the plan it gets."""

    def __init__(self) -> None:
        self.asked = ""

    def samples(self, plan: Plan) -> Plan:
        self.asked = "samples"
        return plan

    def stages(self, plan: Plan, cuts: StagedStrategy) -> Plan:
        self.asked = "stages"
        return plan


def test_each_strategy_asks_for_what_its_ranks_hold() -> None:
    plan = plan_on(CPUS, unbuilt_config())
    asked = {}
    for strategy in (Mean(), DDP(), Single(), DP(), LocalSGD(), Independent(), Pipeline(), Hybrid()):
        recorded = Recorded()
        made = strategy.prepare(plan, recorded)
        asked[strategy.name] = recorded.asked
        assert (made is plan) == (strategy.name != "dp"), strategy.name
        assert made.all_devices == plan.devices
    assert {name for name, what in asked.items() if what == "stages"} == {"pipeline", "hybrid"}


def test_who_sums_over_all_ranks_and_who_averages_gradients() -> None:
    plan = plan_on(CPUS, unbuilt_config())
    alone = plan_on(CPUS[:1], unbuilt_config())
    several = plan_on(CPUS, unbuilt_config(), replica_batch_sizes=(4, 4))
    strategies = (Mean(), DDP(), Single(), DP(), LocalSGD(), HierarchicalSGD(), Independent(), Hybrid())
    sums = {one.name for one in strategies if one.all_reduces()}
    assert sums == {"mean", "ddp", "local_sgd", "hierarchical_sgd"}
    averages = {one.name for one in strategies if one.averages_gradients(plan)}
    assert averages >= {"mean", "ddp"} and not averages & {"local_sgd", "independent", "hybrid"}
    assert Hybrid().averages_gradients(several)
    assert not DDP().averages_gradients(alone)


@pytest.mark.parametrize(
    ("strategy", "what", "when"),
    [
        (DDP(), "gradients as bfloat16", "each step"),
        (LocalSGD(sync_every=1), "weights", "each step"),
        (LocalSGD(sync_every=7, wire="int8"), "weights as int8", "every 7 steps"),
        (Independent(), "models, merged to one", "after the last step"),
        (Hybrid(), "gradients of the same layers as bfloat16", "each step"),
    ],
)
def test_what_a_diagram_says_of_the_exchange(strategy: Strategy, what: str, when: str) -> None:
    plan = plan_on(CPUS, unbuilt_config(comm={"wire": "bfloat16"}), replica_batch_sizes=(4, 4))
    text = strategy.describe_exchange(plan)
    assert text is not None
    assert (text.what, text.when) == (what, when)


def test_who_exchanges_nothing_has_no_text() -> None:
    plan = plan_on(CPUS, unbuilt_config(), replica_batch_sizes=(8,))
    assert Pipeline().describe_exchange(plan) is None
    assert Independent(merge=False).describe_exchange(plan) is None


def test_whose_training_hears_no_command_or_needs_all_its_devices(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "rank_0").mkdir(parents=True)
    for strategy in (Mean(), DDP(), Hybrid()):
        assert strategy.ignores_commands() == strategy.refuses_restart() == ""
        assert not strategy.resumes_ranks(tmp_path)
    assert "has no step at whose end all its devices exchange data" in LocalSGD().ignores_commands()
    assert LocalSGD().refuses_restart() == ""
    assert "trains a model on each device" in Independent().refuses_restart()


def test_one_process_refuses_ranks_that_are_there_already() -> None:
    assert DDP().check_external_ranks("torchrun", 2) == DP().check_external_ranks("torchrun", 1) == []
    (problem,) = DP().check_external_ranks("torchrun", 2)
    assert problem == (
        "`strategy` must be another than dp, which drives all cards from one process, since torchrun starts "
        "one for each, but is 'dp' instead."
    )


def test_hosts_of_a_hierarchy_stay_and_their_sums_are_paid_in_each_step() -> None:
    policy = Profiled()
    assert DDP().may_leave_out(policy) and LocalSGD().may_leave_out(policy)
    assert not DDP().may_leave_out(Profiled(drop_slower=False))
    hosts = HierarchicalSGD(sync_every=50, groups=[[0, 1], [2]])
    assert not hosts.may_leave_out(policy)
    plan = plan_on(CPUS, unbuilt_config())
    exchange = Exchange(((1.0, 10**8),), other_seconds=1.0)
    flat = LocalSGD(sync_every=50).step_exchange(exchange, plan, CPUS)
    synced = hosts.step_exchange(exchange, plan, CPUS)
    assert not flat.buckets and not synced.buckets
    assert synced.other_seconds > flat.other_seconds > 0.0
    assert Mean().step_exchange(exchange, plan, CPUS) is exchange
    assert Independent().step_exchange(exchange, plan, CPUS).other_seconds == 0.0


def test_only_auto_has_candidates() -> None:
    offered: dict[str, Strategy] = {
        "auto": Auto(),
        "ddp": DDP(),
        "local_sgd": LocalSGD(),
        "hierarchical_sgd": HierarchicalSGD(),
    }
    assert not DDP().candidates(lambda: pytest.fail("nothing is offered to it"), several_hosts=True)
    assert set(Auto().candidates(lambda: offered, several_hosts=False)) == {"ddp"}
    assert set(Auto().candidates(lambda: offered, several_hosts=True)) == {"ddp", "hierarchical_sgd"}
    assert set(Auto(between_hosts=False).candidates(lambda: offered, several_hosts=True)) == {"ddp"}


class Changed(DDP):
    """May change anything of a step."""


class Same(DDP):
    """Says that it does not."""

    exact = True


def test_no_strategy_inherits_that_it_is_exact() -> None:
    assert DDP.exact
    assert not Changed.exact
    assert not Changed().exact
    assert Same.exact
