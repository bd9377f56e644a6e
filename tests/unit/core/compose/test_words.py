"""Words as people write them, turned into what Hydra reads."""

from __future__ import annotations

import pytest

from hetexp.core.compose.words import without_hyphens, written_out


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("gpu_ids=0,1", "hardware.gpu_ids=[0,1]"),
        ("hardware.gpu_ids=0,1", "hardware.gpu_ids=[0,1]"),
        ("cuda_ids=0,2", "hardware.cuda_ids=[0,2]"),
        ("gpu_ids=0", "hardware.gpu_ids=0"),
        ("gpu_ids=[0,1]", "hardware.gpu_ids=[0,1]"),
        ("gpu_ids=cuda:0,xpu:0", "hardware.gpu_ids=[cuda:0,xpu:0]"),
        ("gpu_ids=all", "hardware.gpu_ids=all"),
        ("gpu_ids=recommend:2", "hardware.gpu_ids=recommend:2"),
        ("gpu_ids='0,1'", "hardware.gpu_ids='0,1'"),
        ("gpu_ids=choice(0,1)", "hardware.gpu_ids=choice(0,1)"),
        ("hardware.devices=0,1", "hardware.devices=0,1"),
        ("--config-dir=gpu_ids", "--config-dir=gpu_ids"),
        ("strategy=none", "strategy=single"),
        ("strategy=dataparallel", "strategy=dp"),
        ("strategy=distributed", "strategy=ddp"),
        ("strategy.mode=distributed", "strategy=ddp"),
        ("strategy.mode=hybrid", "strategy=hybrid"),
        ("strategy.mode=auto", "strategy=auto"),
        ("strategy.mode=sideways", "strategy.mode=sideways"),  # and Hydra says that there is no such key
        ("strategy=ddp", "strategy=ddp"),
        ("strategy=none,pipeline", "strategy=single,pipeline"),
        ("strategy.schedule=none", "strategy.schedule=none"),
        ("strategy=dpp", "strategy=dpp"),
        ("+experiment=mine", "experiment=mine"),
        ("++experiment=[mine,yours]", "experiment=[mine,yours]"),
        ("+experiments=mine", "+experiments=mine"),
        ("+data.experiment=mine", "+data.experiment=mine"),
    ],
)
def test_outside_a_sweep(typed: str, read: str) -> None:
    assert written_out(["a=1", typed]) == ["a=1", read]


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_in_a_sweep_a_comma_sweeps(flag: str) -> None:
    assert written_out([flag, "gpu_ids=0,1", "gpu_ids=choice([0,1],[2])"]) == [
        flag,
        "hardware.gpu_ids=0,1",
        "hardware.gpu_ids=choice([0,1],[2])",
    ]


def test_keys_of_hetexp_in_a_group_need_no_sign() -> None:
    assert written_out(["model.weights=a.safetensors", "model.weights_strict=false", "model.width=3"]) == [
        "++model.weights=a.safetensors",
        "++model.weights_strict=false",
        "model.width=3",
    ]
    assert written_out(["+model.weights=null"]) == ["+model.weights=null"]


FLAGS = ("--multirun", "-m", "--cfg", "--config-dir", "--config-name", "--run", "--steps")


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("--trainer.seed=1", "trainer.seed=1"),
        ("--optimizer.lr=1e-05", "optimizer.lr=1e-05"),
        ("--balancing.weights=[0.7, 0.3]", "balancing.weights=[0.7, 0.3]"),
        ("--strategy=ddp", "strategy=ddp"),
        ("--resume=a=b", "resume=a=b"),
        ("--trainer.seed", "trainer.seed"),  # and Hydra says that it has no value
        ("--data.flags=--x=1", "data.flags=--x=1"),
        ("--cfg=job", "--cfg=job"),
        ("--conf=mine", "--conf=mine"),  # argparse's to complete
        ("--config-dir=mine", "--config-dir=mine"),
        ("--confgi-dir=mine", "--confgi-dir=mine"),
        ("--multirun", "--multirun"),
        ("--steps=3", "--steps=3"),
        ("--seed", "seed"),
        ("--sead", "--sead"),
        ("--batch-size=32", "batch_size=32"),
        ("-m", "-m"),
        ("trainer.seed=1", "trainer.seed=1"),
    ],
)
def test_hyphens_of_a_sweeps_agent(typed: str, read: str) -> None:
    assert without_hyphens([typed, "a=1"], FLAGS) == [read, "a=1"]


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["--hardware", "nvidia_arc", "a=1"], ["hardware=nvidia_arc", "a=1"]),
        (["--trainer.seed", "3"], ["trainer.seed=3"]),
        (["--batch-size", "32"], ["batch_size=32"]),
        (["--config-dir", "mine", "a=1"], ["--config-dir", "mine", "a=1"]),
        (["--steps", "3"], ["--steps", "3"]),
        (["--hardware", "a=1"], ["--hardware", "a=1"]),  # and argparse does not know it
        (["--hardware", "--run"], ["--hardware", "--run"]),
    ],
)
def test_a_value_after_a_key_with_hyphens(typed: list[str], read: list[str]) -> None:
    assert without_hyphens(typed, FLAGS) == read
