"""Rows of strategies that cut the model, exchange seldom or never, or refuse."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from support import plan_on
from torch import nn

from hetexp.balancing.base import BalancingPolicy
from hetexp.balancing.equal import Equal
from hetexp.balancing.profiled import Profiled
from hetexp.balancing.tflops import Tflops
from hetexp.core.config import Config
from hetexp.core.cost.calibration import DeviceCalibration, Exchange
from hetexp.core.cost.speed import SpeedCurve
from hetexp.core.cost.step import Channel
from hetexp.core.device import GIB, DeviceSpec
from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.core.stage import Layer
from hetexp.plan.device_estimates import NOTHING, DeviceEstimates
from hetexp.plan.predict.as_json import prediction_json
from hetexp.plan.predict.inputs import PredictedRun, PredictionInputs
from hetexp.plan.predict.runs import Prediction, predict_runs
from hetexp.plan.stages.assign import assign_stages
from hetexp.plan.strategy import Strategy
from hetexp.strategy.ddp import DDP
from hetexp.strategy.independent import Independent
from hetexp.strategy.local_sgd import LocalSGD
from hetexp.strategy.pipeline.prediction import rows_of


class Bare(Strategy):
    """A strategy that is only predicted."""

    name: ClassVar[str] = "bare"

    def check(self, config: Config, devices: Sequence[DeviceSpec]) -> list[str]:
        return []

    def wrap(self, model: nn.Module, device: Any) -> nn.Module:
        return model

    def accumulate(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def gradient_divisor(self, world_size: int) -> int:
        return 1


class Facts:
    name, stages_a_rank, returns = "1F1B", 1, False


class Cutting(Bare):
    exact = True
    schedule = Facts()

    def num_microbatches(self, num_stages: int, num_ranks: int, num_samples: int) -> int:
        return 4

    def groups_on(self, devices: Sequence[DeviceSpec]) -> list[list[int]] | None:
        return [list(range(len(devices)))]

    def ranges_in(self, layers: Sequence[str]) -> None:
        return None

    def predict(self, inputs: PredictionInputs) -> list[PredictedRun]:
        return rows_of(inputs, self)


POLICIES: dict[str, BalancingPolicy] = {"equal": Equal(), "profiled": Profiled()}
LAYERS = (Layer("a layer", 0.25, 100, 100, 0, 0, 0, 200),) * 4


def plan_of(count: int, total: int = 64) -> Plan:
    devices = [
        DeviceSpec(
            f"cuda:{i}", "cuda", i, f"Card {i}", "nvidia", power_limit_watts=100.0, memory_bytes=8 * GIB
        )
        for i in range(count)
    ]
    return plan_on(devices, {"trainer": {"global_batch_size": total}})


def device(per_sample: float, update: float = 0.0) -> DeviceCalibration:
    return DeviceCalibration(SpeedCurve(0.0, per_sample, update_seconds=update), 0.5, 0.0, 0.0)


def ask(
    strategies: dict[str, Strategy],
    devices: Sequence[DeviceCalibration],
    exchange: Exchange,
    refusals: dict[str, str] | None = None,
    **others: Any,
) -> Prediction:
    plan = plan_of(len(devices))
    inputs = PredictionInputs(
        plan, DeviceEstimates.measured(plan.devices, devices, exchange), POLICIES, **others
    )
    return predict_runs(inputs, strategies, refusals=refusals or {})


def row(found: Prediction, strategy: str, policy: str | None) -> PredictedRun:
    (one,) = [one for one in found.rows if (one.strategy, one.policy) == (strategy, policy)]
    return one


SLOW = Exchange(((0.5, 1000), (1.0, 1000)), Channel(0.0, 1000.0))
"""2000 bytes at 1000 bytes a second: 2 s between two devices."""


def test_an_exchange_now_and_then_is_paid_in_parts() -> None:
    strategies: dict[str, Strategy] = {
        "rarely": LocalSGD(50),
        "often": LocalSGD(1),
        "short": LocalSGD(1, wire="bfloat16"),
        "never": Independent(),
        "ddp": DDP(),
    }
    found = ask(strategies, [device(0.01), device(0.03)], SLOW)
    work = 0.03 * 32
    assert row(found, "never", "equal").step_seconds == pytest.approx(work)
    assert row(found, "rarely", "equal").step_seconds == pytest.approx(work + 2 / 50)
    assert row(found, "often", "equal").step_seconds == pytest.approx(work + 2)
    assert row(found, "short", "equal").step_seconds == pytest.approx(work + 1)
    # The slow exchange makes DDP do without the second device; without an exchange it is worth having.
    assert row(found, "ddp", "profiled").counts == (64,)
    never = row(found, "never", "profiled")
    assert never.counts == (48, 16)
    assert never.step_seconds == pytest.approx(0.48)
    assert never.efficiency == never.ceiling == pytest.approx(1.0)
    assert row(found, "never", "equal").ceiling == pytest.approx(1.0)
    assert row(found, "often", "profiled").ranks == (0,)


def test_what_is_not_exact_is_not_recommended() -> None:
    found = ask({"ddp": DDP(), "never": Independent()}, [device(0.01), device(0.01)], SLOW)
    fastest = min((one for one in found.rows if one.predicted), key=lambda one: one.step_seconds or 0.0)
    assert fastest.strategy == "never"
    assert not fastest.exact
    assert found.best is not None
    assert found.best.strategy == "ddp"


def test_local_steps_by_speed_pay_more_updates() -> None:
    """48 and 16 samples: three steps of 16 and one; each has its update."""
    equal, speed = LocalSGD(10**9), LocalSGD(10**9, local_steps="speed")
    found = ask({"equal": equal, "speed": speed}, [device(0.01, 0.1), device(0.03, 0.1)], SLOW)
    assert row(found, "equal", "profiled").step_seconds == pytest.approx(0.58)
    assert row(found, "speed", "profiled").step_seconds == pytest.approx(0.78)


def test_stages_are_those_that_would_be_arranged() -> None:
    found = ask({"cut": Cutting()}, [device(0.01), device(0.03)], SLOW, layers=lambda: LAYERS)
    plan, known = found.plan, found.estimates
    strategy: Any = Cutting()
    for label, policy in POLICIES.items():
        expected = assign_stages(plan, strategy, policy, LAYERS, known)
        own = row(found, "cut", label)
        assert own.step_seconds == expected.step_seconds
        assert own.stages == expected.stages
        assert own.bubble == expected.bubble
        assert own.reasons == expected.reasons
        assert own.samples_per_second == pytest.approx(64 / (expected.step_seconds or 0.0))
    best = row(found, "cut", "profiled")
    assert [(s.first_layer, s.end_layer) for own in best.stages for s in own] == [(0, 3), (3, 4)]
    assert best.ceiling == best.efficiency == row(found, "cut", "equal").ceiling
    busy = [0.01 * 0.75 * 64, 0.03 * 0.25 * 64]
    assert best.joules_per_sample == pytest.approx(100.0 * sum(busy) / 64)
    assert found.best is best
    told = prediction_json(found, (), None, None)["rows"]
    ours = next(one for one in told if one["policy"] == "profiled")
    assert [part["stages"] for part in ours["split"]] == [
        [{"pipeline": 0, "index": 0, "layers": [0, 3]}],
        [{"pipeline": 0, "index": 1, "layers": [3, 4]}],
    ]
    assert ours["bubble"] == best.bubble


def test_what_does_not_fit_is_told_by_the_row() -> None:
    heavy = (replace(LAYERS[0], weight_bytes=3 * GIB, trained_bytes=3 * GIB),) * 4
    found = ask(
        {"cut": Cutting()},
        [device(0.01), device(0.03)],
        SLOW,
        layers=lambda: heavy,
        needs=lambda r, c: [0] * len(r),
    )
    problem = row(found, "cut", "profiled").problem
    assert problem is not None
    assert "no cut fits the devices' memory" in problem
    assert found.best is None
    without = ask({"cut": Cutting()}, [device(0.01), device(0.03)], SLOW, layers=lambda: heavy)
    assert row(without, "cut", "profiled").problem is None  # nobody wants memory estimated

    def refuse() -> Sequence[Layer]:
        raise ConfigError("it has no pieces")

    told = ask({"cut": Cutting()}, [device(0.01), device(0.03)], SLOW, layers=refuse)
    assert {one.problem for one in told.rows} == {"it has no pieces"}


def test_where_little_is_known() -> None:
    plan = plan_of(2)
    nothing = DeviceEstimates((None, device(0.01)), (NOTHING, NOTHING), plan.devices, Exchange())
    strategies: dict[str, Strategy] = {"cut": Cutting(), "never": Independent()}
    policies = POLICIES | {"tflops": Tflops()}
    inputs = PredictionInputs(plan, nothing, policies, layers=lambda: LAYERS)
    found = predict_runs(inputs, strategies)
    for strategy in strategies:
        assert "nothing is known of cuda:0" in (row(found, strategy, "profiled").problem or "")
        assert "`balancing` tflops must find" in (row(found, strategy, "tflops").problem or "")
    assert row(found, "cut", "equal").step_seconds is None
    assert len(row(found, "cut", "equal").stages) == 2
    assert row(found, "never", "equal").counts == (32, 32)
    assert row(found, "never", "equal").step_seconds is None


def test_a_strategy_that_refuses_is_told_once() -> None:
    found = ask({"ddp": DDP(), "other": Bare()}, [device(0.01)] * 2, SLOW, refusals={"ddp": "It cannot."})
    assert [(one.strategy, one.policy, one.problem) for one in found.rows] == [
        ("ddp", None, "It cannot."),
        ("other", None, "the cost model does not know this strategy"),
    ]
