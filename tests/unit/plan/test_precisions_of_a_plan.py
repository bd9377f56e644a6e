"""A plan holds one precision a rank, by its long name, and says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import spec_on, unbuilt_config

from hetexp.core.config import Config, read_config
from hetexp.core.device import DeviceSpec
from hetexp.core.plan import Plan
from hetexp.core.precision import SHORT_FORMS
from hetexp.core.summary import blank_summary
from hetexp.plan.planner import check_plan, make_plan

AMPERE = DeviceSpec(
    *("cuda:0", "cuda", 0, "RTX 3090", "nvidia"),
    precisions=("float64", "float32", "tf32", "bfloat16", "float16"),
)
TURING = replace(AMPERE, id="cuda:1", name="RTX 2080 Ti", precisions=("float64", "float32", "float16"))


def config(precision: str) -> Config:
    return read_config(unbuilt_config(trainer={"precision": precision}))


def plan_of(precision: str, *devices: DeviceSpec) -> Plan:
    return make_plan(spec_on(devices, unbuilt_config(trainer={"precision": precision, "seed": 0})))


@pytest.mark.parametrize(
    ("typed", "chosen", "wire"),
    [
        ("auto", ("bfloat16", "float16"), "float32"),
        ("auto_common", ("float16", "float16"), "float32"),
        ("fp16", ("float16", "float16"), "float32"),
        ("float32", ("float32", "float32"), "float32"),
        ("fp64", ("float64", "float64"), "float64"),
    ],
)
def test_one_a_rank_in_the_plan_its_file_and_the_summary(
    tmp_path: Path, typed: str, chosen: tuple[str, ...], wire: str
) -> None:
    plan = plan_of(typed, AMPERE, TURING)
    assert plan.precisions == chosen
    path = tmp_path / "plan.json"
    plan.write(path)
    assert Plan.read(path) == plan
    told = " ".join(plan.reasons)
    assert typed == "float32" or all(name in told for name in chosen)
    summary = blank_summary(plan, "failed")
    assert tuple(device["precision"] for device in summary["devices"]) == chosen
    assert summary["comm"]["wire_dtype"] == wire


@pytest.mark.parametrize("short", SHORT_FORMS)
def test_short_forms_are_the_long_ones(short: str) -> None:
    assert config(short) == config(SHORT_FORMS[short])
    assert config(short).trainer.precision == SHORT_FORMS[short]


def test_an_unfit_device_is_a_problem_of_the_plan() -> None:
    devices = [AMPERE, TURING, replace(TURING, id="cuda:2")]

    def problems_of(precision: str) -> list[str]:
        return check_plan(spec_on(devices, unbuilt_config(trainer={"precision": precision, "seed": 0})))

    (problem,) = problems_of("bf16")
    assert "cuda:1" in problem and "cuda:2" in problem and "cuda:0" not in problem
    assert problems_of("fp16") == []
    assert problems_of("auto") == []
