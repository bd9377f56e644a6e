"""The group `comm`: what is refused before any process starts."""

from __future__ import annotations

from typing import Any

import pytest
from support import unbuilt_config

from hetexp.core.config import Config, read_config
from hetexp.core.errors import ConfigError
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.plan.exchange_checks import check_collective, check_variables
from hetexp.plan.strategy import Strategy
from hetexp.strategy.ddp import DDP
from hetexp.strategy.hybrid import Hybrid
from hetexp.strategy.local_sgd import LocalSGD
from hetexp.strategy.pipeline import Pipeline
from hetexp.strategy.single import Single


def config(precision: str = "float32", **comm: Any) -> Config:
    return read_config(unbuilt_config(comm=comm, trainer={"precision": precision}))


def test_variables_are_texts() -> None:
    env = {"NCCL_P2P_DISABLE": 1, "NCCL_DEBUG": "INFO", "A": True, "B": False, "C": 0.5}
    read = config(env=env)
    assert read.comm.env == {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO", "A": "1", "B": "0", "C": "0.5"}
    assert check_variables(read) == []
    assert check_variables(config(env=None)) == []
    with pytest.raises(ConfigError, match=r"`comm.env.A` must be a string"):
        config(env={"A": None})


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"": "1"}, "`comm.env` must have names of letters, digits and `_`, but has '' instead."),
        ({"A=B": "1"}, "`comm.env` must have names of letters, digits and `_`, but has 'A=B' instead."),
        ({"RANK": 3}, "`comm.env.RANK` must be absent, as hetexp sets it, but is '3' instead. Ranks meet"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "but is '0' instead. `hardware.gpu_ids` chooses cards."),
        ({"OMP_NUM_THREADS": 4}, "`hardware.threads_per_rank` sets it."),
        ({"HETEXP_HOME": "/tmp"}, "`comm.env.HETEXP_HOME` must be absent, as hetexp sets it"),
        ({"A": "a\0b"}, "`comm.env.A` must be a text without a null character"),
    ],
)
def test_variables_that_are_refused(env: dict[str, Any], told: str) -> None:
    (problem,) = check_variables(config(env=env))
    assert told in problem


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (DDP(), None),
        (Hybrid(), None),
        (Single(), "`comm.wire` must be float32 where `strategy` is single, but is 'int8' instead."),
        (Pipeline(), "`comm.wire` must be float32 where `strategy` is pipeline, but is 'int8' instead."),
        (LocalSGD(), "is local_sgd, but is 'int8' instead. Write strategy.wire=int8."),
    ],
)
def test_who_takes_a_wire(strategy: Strategy, told: str | None) -> None:
    assert strategy.check_exchange(config()) == []
    problems = strategy.check_exchange(config(wire="int8"))
    assert len(problems) == (told is not None)
    assert told is None or told in problems[0]


def test_float64_travels_as_it_is() -> None:
    assert DDP().check_exchange(config("float64")) == []
    (problem,) = DDP().check_exchange(config("float64", wire="bfloat16"))
    assert problem.startswith(
        "`comm.wire` must be float32 (numbers as they are) where training is in float64"
    )


def test_native_where_there_is_no_library() -> None:
    devices = [CpuBackend.describe(i) for i in range(2)]
    (problem,) = check_collective(config(backend="native"), devices)
    assert problem.startswith("`comm.backend` must be auto, shm or gloo for these devices (cpu:0")
    for backend in ("auto", "shm", "gloo"):
        assert check_collective(config(backend=backend), devices) == []


@pytest.mark.parametrize(
    ("strategy", "precision", "told"),
    [
        (Pipeline(), "float32", None),
        (Hybrid(), "auto", None),
        (DDP(), "float32", "`comm.boundary_wire` must be float32 where `strategy` is ddp, but is 'int8'"),
        (Pipeline(), "float64", "`comm.boundary_wire` must be float32 (numbers as they are) where training"),
    ],
)
def test_what_stages_hand_on(strategy: Strategy, precision: str, told: str | None) -> None:
    problems = strategy.check_exchange(config(precision, boundary_wire="int8"))
    assert len(problems) == (told is not None)
    assert told is None or problems[0].startswith(told)
    assert strategy.check_exchange(config(precision)) == []
