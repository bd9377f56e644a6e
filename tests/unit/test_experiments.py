"""Each shipped experiment is what its first line says, and every run of it could start."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hetexp.app import check, conf_dir, register_resolvers
from hetexp.core.compose.conf_folders import name_own_conf_dir
from hetexp.core.compose.words import written_out
from hetexp.core.sweep.grid import asks_to_sweep, compose_jobs
from hetexp.plan.run_spec import Request

EXPERIMENTS = sorted((conf_dir() / "experiment").glob("*.yaml"))
REQUEST = Request(Path.cwd(), Path.cwd())
SWEEPS = ("compare_balancing", "compare_strategies", "scaling", "weights_curve", "weights_search")
COMMAND = re.compile(r"# (?P<what>[^:]+): (?P<command>python train\.py .+)")


@pytest.fixture(autouse=True)
def shipped() -> None:
    register_resolvers()
    name_own_conf_dir(None)


def words_of(path: Path) -> list[str]:
    """Return what a person types, as the comment on top of an experiment says."""
    header, first, *_ = path.read_text(encoding="utf-8").splitlines()
    assert header == "# @package _global_"
    match = COMMAND.fullmatch(first)
    assert match is not None, first
    typed = shlex.split(match["command"])[2:]
    # Others' projects write +experiment; here the group is among the defaults.
    return [word.replace("+experiment=", "experiment=") for word in written_out(typed)]


def test_all_of_them_are_here() -> None:
    own = ("gpt_text", "lora_8b", "lora_small", "none", "sae_digits")
    assert [path.stem for path in EXPERIMENTS] == sorted((*SWEEPS, *own))


@pytest.mark.parametrize("path", [p for p in EXPERIMENTS if p.stem != "none"], ids=lambda path: path.stem)
def test_the_first_line_is_its_command(path: Path) -> None:
    words = words_of(path)
    assert f"experiment={path.stem}" in words
    sweeps = path.stem in SWEEPS
    assert ("-m" in words) == asks_to_sweep([f"experiment={path.stem}"]) == sweeps


@pytest.mark.parametrize("name", SWEEPS)
def test_every_run_of_it_could_start_and_is_fair(name: str) -> None:
    words = [word for word in words_of(conf_dir() / "experiment" / f"{name}.yaml") if word != "-m"]
    jobs, problems = compose_jobs(words)
    assert not problems
    assert len(jobs) >= 6
    fixed: list[dict[str, Any]] = []
    for job in jobs:
        found = check(job.config, REQUEST)
        assert not found.problems, job.label
        spec = found.accepted()
        raw = spec.raw
        assert all(device.emulated for device in spec.selection.devices)
        assert spec.selection.fallback is None
        trainer = dict(raw["trainer"])
        assert trainer["max_epochs"] is None
        trainer.pop("seed")
        if name == "weights_search":
            trainer.pop("global_batch_size")
        fixed.append(
            {"trainer": trainer, "model": raw["model"], "data": raw["data"], "optimizer": raw["optimizer"]}
        )
    assert all(one == fixed[0] for one in fixed)
    if name != "weights_search":
        assert {OmegaConf.select(job.config, "trainer.seed") for job in jobs} == {0, 1}


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (
            (
                "experiment=compare_strategies",
                "hardware.devices=[cpu,cpu]",
                "balancing=auto",
                "trainer.seed=0",
            ),
            4,
        ),
        (("experiment=compare_strategies", "strategy=ddp,independent", "trainer.seed=0", "model=mlp"), 4),
        (("experiment=compare_strategies", "model=gpt", "data=text", "strategy=ddp", "trainer.seed=0"), 2),
        (("experiment=scaling", "trainer.global_batch_size=null", "trainer.batch_size_per_device=16"), 8),
        (("experiment=weights_curve", "balancing.weights=[1,1],[2,1]", "trainer.seed=0"), 2),
    ],
)
def test_each_key_of_it_can_be_typed(words: tuple[str, ...], count: int) -> None:
    jobs, problems = compose_jobs(words)
    assert not problems
    assert len(jobs) == count
    for job in jobs:
        assert not check(job.config, REQUEST).problems, job.label


def test_weak_scaling_grows_the_batch() -> None:
    words = ("experiment=scaling", "trainer.global_batch_size=null", "trainer.batch_size_per_device=16")
    jobs, _ = compose_jobs((*words, "trainer.seed=0"))
    specs = [check(job.config, REQUEST).accepted() for job in jobs]
    assert [spec.config.trainer.global_batch_size for spec in specs] == [16, 32, 48, 64]
