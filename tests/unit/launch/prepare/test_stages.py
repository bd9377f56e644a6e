"""Which rank gets which layers and samples, and what the model has against it."""

from __future__ import annotations

from typing import Any

import pytest
from support import plan_on, spec_on, unbuilt_config

from hetexp.core.errors import ConfigError
from hetexp.core.plan import Plan
from hetexp.core.stage import Stage
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.launch.prepare.preparation import Preparation
from hetexp.plan.run_spec import RunSpec

GPT = {"_target_": "hetexp.model.gpt.GPT", "num_layers": 6, "num_heads": 2, "embedding_size": 8}
TOKENS = {"_target_": "hetexp.data.synthetic.Synthetic", "kind": "tokens", "num_samples": 8}


def made(count: int, strategy: str, model: dict[str, Any] = GPT, **arguments: Any) -> tuple[Plan, RunSpec]:
    name = {"pipeline": "Pipeline", "hybrid": "Hybrid", "ddp": "DDP"}[strategy]
    node = {"_target_": f"hetexp.strategy.{strategy}.{name}", **arguments}
    raw = unbuilt_config(strategy=node, model=model, data=TOKENS, trainer={"global_batch_size": 10})
    shares = (0.5, *[0.5 / (count - 1)] * (count - 1))
    plan = plan_on([CpuBackend.describe(index) for index in range(count)], raw, shares=shares)
    return plan, spec_on(plan.devices, raw)


def with_stages(plan: Plan, spec: RunSpec) -> Plan:
    return spec.strategy.prepare(plan, Preparation(spec))


def model_problems(spec: RunSpec) -> list[str]:
    return spec.strategy.check_model(spec.config)


def test_a_pipeline_of_given_layers() -> None:
    plan = with_stages(*made(2, "pipeline", shard_plan=[[0, 4], [4, 6]]))
    assert plan.stages == ((Stage(0, 0, 0, 4),), (Stage(0, 1, 4, 6),))
    assert plan.replica_batch_sizes == (10,)
    assert plan.local_batch_sizes == (10, 10)
    assert sum(plan.shares) == pytest.approx(1)
    assert plan.shares[0] > plan.shares[1]
    assert any("layers 0–3 on cpu:0, layers 4–5 on cpu:1" in reason for reason in plan.reasons)


def test_stages_go_round_or_back() -> None:
    loop = with_stages(*made(2, "pipeline", schedule="Interleaved1F1B"))
    assert [[stage.index for stage in own] for own in loop.stages] == [[0, 2], [1, 3]]
    back = with_stages(*made(2, "pipeline", schedule="DualPipeV"))
    assert [[stage.index for stage in own] for own in back.stages] == [[0, 3], [1, 2]]


def test_pipelines_share_the_batch() -> None:
    cuts = [[[0, 4], [4, 6]], [[0, 6]]]
    plan = with_stages(*made(3, "hybrid", groups=[[0, 1], [2]], shard_plan=cuts))
    assert sum(plan.replica_batch_sizes) == 10
    assert plan.local_batch_sizes == tuple(plan.replica_batch_sizes[replica] for replica in (0, 0, 1))
    assert sum(plan.shares) == pytest.approx(1)
    assert [own[0].replica for own in plan.stages] == [0, 0, 1]


def test_the_plan_is_read_as_it_was_written(tmp_path: Any) -> None:
    plan = with_stages(*made(2, "pipeline"))
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


def test_other_strategies_are_left_alone() -> None:
    assert model_problems(made(2, "ddp")[1]) == []


def test_too_few_layers_are_told() -> None:
    with pytest.raises(ConfigError, match="at least 4 layers for as many stages on 4 devices"):
        with_stages(*made(4, "pipeline", GPT | {"num_layers": 2}))


@pytest.mark.parametrize(
    ("model", "arguments", "told"),
    [
        (GPT, {"shard_plan": [[0, 4], [4, 9]]}, "names layers 6–8 in [4, 9]"),
        (GPT, {"shard_plan": [[0, 4], [4, 5]]}, "leaves out layer 5 (blocks.5)"),
        ({"_target_": "torch.nn.Identity"}, {}, "must say where it may be cut"),
        ({"_target_": "pieced.Masked", "normalises": True}, {}, "must not normalise over the batch"),
    ],
)
def test_what_the_model_has_against_it(model: dict[str, Any], arguments: dict[str, Any], told: str) -> None:
    (problem,) = model_problems(made(2, "pipeline", model, **arguments)[1])
    assert told in problem
