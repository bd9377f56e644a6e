"""The plan: which collective, which name, and everything that speaks against it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import spec_on, unbuilt_config

from hetexp.core.config import read_config
from hetexp.core.device import DeviceSpec
from hetexp.hardware.backends.cpu import CpuBackend
from hetexp.hardware.catalogue import card
from hetexp.hardware.emulation.emulated import EmulatedBackend
from hetexp.hardware.selection.pool import Selection
from hetexp.plan.planner import check_plan, make_plan, run_id, run_name
from hetexp.plan.run_spec import Request, RunSpec

CPU = [CpuBackend.describe(i) for i in range(3)]
CUDA = [
    DeviceSpec(id=f"cuda:{i}", backend="cuda", index=i, name=f"Card {i}", vendor="nvidia") for i in range(2)
]
HIP, HIP_2 = (
    DeviceSpec(id=f"hip:{i}", backend="hip", index=i, name=f"Radeon {i}", vendor="amd") for i in range(2)
)
EMULATED = [
    EmulatedBackend.describe_card(0, card("rtx_3090")),
    EmulatedBackend.describe_card(1, card("arc_a770")),
]


def problems_of(selection: Selection, components: bool = True, **sections: Any) -> list[str]:
    spec = spec_on([], unbuilt_config(**sections)).replaced(selection=selection)
    return check_plan(spec, components)


def manual(*weights: float) -> dict[str, Any]:
    return {"_target_": "hetexp.balancing.manual.Manual", "weights": list(weights)}


# ---------------------------------------------------------------- the run's id and name

UNIQUE = Path("/work/outputs/2026-01-31/12-00-05-0a1b2c")


@pytest.mark.parametrize(
    ("folder", "made"),
    [
        (UNIQUE, "2026-01-31-12-00-05-0a1b2c"),
        (Path("/work/outputs/sweeps/2026-01-31/12-00-05-0a1b2c/3"), "2026-01-31-12-00-05-0a1b2c-3"),
    ],
)
def test_folders_that_hydra_makes_are_ids(folder: Path, made: str) -> None:
    assert run_id(folder) == made == run_id(folder)  # the same folder, the same id


def test_jobs_of_a_sweep_differ() -> None:
    sweep = UNIQUE.parent.parent / "sweeps" / UNIQUE.parent.name / UNIQUE.name
    assert len({run_id(sweep / str(job)) for job in range(12)}) == 12


@pytest.mark.parametrize(
    "folder", ["/tmp/run", "/work/mine/first try", "/x", "/", "/home/Übung/läuft", "/very/" + "long" * 60]
)
def test_a_persons_own_folder_gets_an_id_of_its_own_each_time(folder: str) -> None:
    ids = {run_id(Path(folder)) for _ in range(20)}
    assert len(ids) == 20
    for made in ids:
        assert re.fullmatch(r"[A-Za-z0-9-]*-?[0-9a-f]{6}", made)


@settings(deadline=None)
@given(
    parts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=50),
        min_size=1,
        max_size=4,
    )
)
def test_an_id_is_made_of_plain_characters(parts: list[str]) -> None:
    # What W&B, a shell and a file name take: letters, digits, single dashes inside, at most 128 characters.
    made = run_id(Path("/", *parts))
    assert re.fullmatch(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*", made), made
    assert len(made) <= 128


def request(**changes: Any) -> Request:
    return Request(**{"run_dir": UNIQUE, "working_dir": Path("/work"), **changes})


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (("model=mlp", "trainer.seed=3"), "model=mlp,trainer.seed=3"),
        (("hydra.run.dir=/tmp/x", "model=mlp"), "model=mlp"),
        (("hydra.run.dir=/tmp/x",), "cpu ddp equal mlp digits"),
        ((), "cpu ddp equal mlp digits"),
    ],
)
def test_a_run_is_named_by_what_was_typed(overrides: tuple[str, ...], name: str) -> None:
    choices = {
        "hardware": "cpu",
        "strategy": "ddp",
        "balancing": "equal",
        "model": "mlp",
        "data": "digits",
        "optimizer": "sgd",
    }
    assert run_name(request(overrides=overrides, choices=choices)) == name


def test_choices_that_are_not_there_are_left_out() -> None:
    assert run_name(request(choices={"model": "mlp", "data": ""})) == "mlp"


# ---------------------------------------------------------------- what speaks against a plan


def test_nothing_speaks_against_a_right_plan() -> None:
    assert problems_of(Selection(CPU)) == []
    assert problems_of(Selection(CPU), balancing=manual(3, 2, 0)) == []


@pytest.mark.parametrize(
    ("sections", "devices", "told"),
    [
        (
            {"strategy": {"_target_": "hetexp.strategy.single.Single"}},
            CPU[:2],
            ["`strategy` must be ddp for 2 devices (cpu:0, cpu:1), but is 'single' instead."],
        ),
        (
            {"balancing": manual(1)},
            CPU[:2],
            ["`balancing.weights` must be 2 numbers, one a device (cpu:0, cpu:1)"],
        ),
        (
            {"balancing": manual(0, 0)},
            CPU[:2],
            ["`balancing.weights` must be a list with at least one weight above 0"],
        ),
        (
            {"comm": {"backend": "native"}},
            CPU[:2],
            ["`comm.backend` must be auto, shm or gloo for these devices (cpu:0"],
        ),
        ({"comm": {"backend": "native"}}, [CUDA[0], CPU[0]], ["`comm.backend` must be auto, shm or gloo"]),
        ({"trainer": {"compile": True}}, CPU[:2], []),
        ({"debug": {"exchange": False}}, CPU[:2], []),
        (
            {
                "strategy": {"_target_": "hetexp.strategy.local_sgd.LocalSGD"},
                "debug": {"exchange": False},
            },
            CPU[:2],
            ["`debug.exchange` must be true where `strategy` is local_sgd, but is False instead."],
        ),
        (
            {"trainer": {"compile": True}},
            EMULATED,
            ["`trainer.compile` must be false where devices are emulated, slowed or limited in memory (emul"],
        ),
        (
            {
                "trainer": {"compile": "max-autotune"},
                "fault": {"events": [{"kind": "slow", "device": "cpu:1", "at_step": 2, "factor": 2.0}]},
            },
            CPU[:2],
            ["`trainer.compile` must be false where devices are emulated, slowed or limited in memory (cpu"],
        ),
        (
            {"trainer": {"precision": "float64"}},
            EMULATED,
            ["`trainer.precision` must be one that emulated:1 (Arc A770 (emulated)) computes in (float32"],
        ),
        (
            {
                "strategy": {"_target_": "hetexp.strategy.ddp.DDP", "static_graph": True},
                "balancing": manual(1),
                "trainer": {"precision": "float64", "accumulate": 2},
                "comm": {"backend": "native"},
            },
            EMULATED,
            ["`trainer.precision`", "`comm.backend`", "`strategy.static_graph`", "`balancing.weights`"],
        ),
    ],
)
def test_everything_that_speaks_against_it(
    sections: dict[str, Any], devices: list[DeviceSpec], told: list[str]
) -> None:
    problems = problems_of(Selection(devices), **sections)
    assert len(problems) == len(told), problems
    for problem, start in zip(problems, told, strict=True):
        assert problem.startswith(start)


def test_nccl_is_right_where_all_are_nvidias() -> None:
    assert problems_of(Selection(CUDA), comm={"backend": "native"}) == []


def test_problems_of_the_selection_come_first_and_hide_what_follows_from_them() -> None:
    selection = Selection(devices=CPU[:1], problems=["`hardware.devices[1]` must be something else."])
    # Two weights are right for the two devices that were asked for.
    assert problems_of(selection, balancing=manual(1, 1)) == selection.problems


def test_no_devices_no_consequences() -> None:
    selection = Selection(problems=["`hardware.devices` must select at least one device, but none is left."])
    assert problems_of(selection, comm={"backend": "native"}) == selection.problems


def test_parts_that_failed_their_own_check_are_not_built() -> None:
    broken = {"_target_": "no.such.Strategy"}
    assert problems_of(Selection(CPU), components=False, strategy=broken, balancing=broken) == []


# ---------------------------------------------------------------- the plan itself


def test_a_plan_tells_who_does_what_and_why() -> None:
    raw = unbuilt_config(balancing=manual(3, 1), hardware={"threads_per_rank": 2})
    selection = Selection(devices=CPU[:2], reasons=["Because."])
    asked = request(group="sweep", choices={"model": "mlp"})
    plan = make_plan(RunSpec(read_config(raw), raw, selection, asked))
    assert plan.devices == tuple(CPU[:2])
    assert plan.shares == (0.75, 0.25)
    assert plan.local_batch_sizes == (6, 2)
    assert plan.threads == (2, 2)
    assert (plan.strategy, plan.collective_backend, plan.group) == ("ddp", "gloo", "sweep")
    assert (plan.run_id, plan.name) == ("2026-01-31-12-00-05-0a1b2c", "mlp")
    assert plan.config is raw
    assert plan.reasons[0] == "Because."
    assert "Policy manual splits 8 samples a step: cpu:0 6, cpu:1 2." in plan.reasons
    assert "The exchange goes by shm, in memory that all ranks share (cpu)." in plan.reasons
    assert plan.import_paths[0] == "/work"
    assert all(Path(path).is_absolute() for path in plan.import_paths)
    assert len(set(plan.import_paths)) == len(plan.import_paths)


def test_a_name_that_was_given_wins() -> None:
    plan = make_plan(spec_on(CPU[:1], unbuilt_config(name="my run"), overrides=("model=mlp",)))
    assert plan.name == "my run"


@pytest.mark.parametrize(
    ("strategy", "wire", "exact"),
    [
        ("ddp.DDP", "float32", True),
        ("ddp.DDP", "bfloat16", False),
        ("hybrid.Hybrid", "int8", False),
        ("pipeline.Pipeline", "float32", True),
        ("local_sgd.LocalSGD", "float32", False),
    ],
)
def test_gradients_that_a_wire_rounds_are_not_exact(strategy: str, wire: str, exact: bool) -> None:
    sections = {"strategy": {"_target_": f"hetexp.strategy.{strategy}"}, "comm": {"wire": wire}}
    raw = unbuilt_config(**sections, balancing=manual(1, 1, 1))
    plan = make_plan(spec_on(CPU, raw))
    assert plan.exact is exact


@pytest.mark.parametrize(("device", "wrong"), [("cpu:1", False), ("cpu:2", True), ("emulated:0", True)])
def test_a_fault_is_of_a_device_of_the_plan(device: str, wrong: bool) -> None:
    events = [{"kind": "stall", "device": device, "at_step": 3}]
    problems = problems_of(Selection(devices=CPU[:2]), fault={"events": events})
    named = [problem for problem in problems if problem.startswith("`fault.events[0].device` must be one of")]
    assert bool(named) == wrong
