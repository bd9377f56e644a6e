"""F6: every wrong value is refused before any process starts, by key and value, all at once, no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetexp.app import main

TWO = "hardware.devices=[cpu,cpu]"
WRONG = {
    "unknown group option": (["strategy=dpp"], ["`strategy` must be one of ddp, single", "'dpp'", "`ddp`"]),
    "unknown group": (["strateggy=ddp"], ["`strateggy`", "ddp", "Did you mean `strategy`?"]),
    "misspelt key": (["trainer.max_stps=5"], ["`trainer.max_stps`", "5", "Did you mean `max_steps`?"]),
    "key that does not exist, added": (["+trainer.speed=9"], ["`trainer.speed`", "9"]),
    "wrong type": (["trainer.max_steps=many"], ["`trainer.max_steps` must be an integer", "'many'"]),
    "a bool for a number": (["trainer.max_steps=true"], ["`trainer.max_steps` must be an integer", "True"]),
    "fraction for a whole number": (
        ["trainer.max_epochs=1.5"],
        ["`trainer.max_epochs` must be an integer", "1.5"],
    ),
    "global batch 0": (
        ["trainer.global_batch_size=0"],
        ["`trainer.global_batch_size` must be greater than 0", "0"],
    ),
    "infinite clip": (["trainer.clip_norm=inf"], ["`trainer.clip_norm` must be a finite number", "inf"]),
    "unknown precision": (
        ["trainer.precision=bf17"],
        ["`trainer.precision`", "'float32' or 'float64'", "'bf17'"],
    ),
    "unknown loss": (["trainer.loss=hinge"], ["`trainer.loss`", "cross_entropy, mse", "'hinge'"]),
    "no end": (["trainer.max_epochs=null"], ["`trainer.max_steps` or `trainer.max_epochs` must be given"]),
    "accumulate twice": (
        ["trainer.accumulate=2", "trainer.microbatch_size=8"],
        ["`trainer.accumulate` must be 1", "2", "microbatch_size"],
    ),
    "early stopping without evaluation": (
        ["trainer.early_stopping.patience=2"],
        ["`trainer.eval_every` must be above 0", "0"],
    ),
    "missing weights": (["balancing=manual"], ["`balancing.weights` must be given", "???"]),
    "??? typed": (["trainer.seed=???"], ["`trainer.seed` must be given", "???"]),
    "negative weight": (
        [TWO, "balancing=manual", "balancing.weights=[1,-0.3]"],
        ["`balancing.weights[1]` must be greater than or equal to 0", "-0.3"],
    ),
    "all weights zero": (
        [TWO, "balancing=manual", "balancing.weights=[0,0]"],
        ["`balancing.weights` must be", "above 0", "[0, 0]"],
    ),
    "wrong number of weights": (
        [TWO, "balancing=manual", "balancing.weights=[1,2,3]"],
        ["`balancing.weights` must be 2 numbers", "[1, 2, 3]", "cpu:0, cpu:1"],
    ),
    "weights without brackets": (
        [TWO, "balancing=manual", "balancing.weights=0.5,0.3"],
        ["`balancing.weights` must be one value", "'0.5,0.3'", "[…]"],
    ),
    "device twice": (["hardware.devices=[cpu:0,cpu:0]"], ["`hardware.devices`", "cpu:0 twice"]),
    "unknown device": (
        ["hardware.devices=[cuda:9]"],
        ["`hardware.devices[0].device` must be one of", "'cuda:9'"],
    ),
    "unknown card": (
        ["hardware.devices=[emulated:rtx_3091]"],
        ["`hardware.devices[0]`", "rtx_3091", "rtx_3090"],
    ),
    "no device": (["hardware.devices=[]"], ["`hardware.devices` must be a list with at least one entry"]),
    "vendor and device": (
        ["hardware.devices=[{device: cpu, vendor: nvidia}]"],
        ["`hardware.devices[0]` must name either", "both"],
    ),
    "vendor not there": (
        ["hardware.devices=[{vendor: amd}]", "hardware.missing=error"],
        ["`hardware.devices[0].vendor`", "'amd'", "hardware.missing=emulate"],
    ),
    "no interpreter": (
        ["hardware.devices=[{device: cpu, python: /no/such/python}]"],
        ["`hardware.devices[0].python` must be the path of an interpreter", "/no/such/python"],
    ),
    "two devices, single": ([TWO, "strategy=single"], ["`strategy` must be ddp", "'single'", "cpu:0, cpu:1"]),
    "static graph with accumulation": (
        ["strategy.static_graph=true", "trainer.accumulate=2", "trainer.drop_last=true"],
        ["`strategy.static_graph` must be false where gradients accumulate", "True"],
    ),
    "native group on the CPU": ([TWO, "comm=native"], ["`comm.backend` must be auto or gloo", "'native'"]),
    "card without fp64": (
        ["hardware.devices=[emulated:arc_a770]", "trainer.precision=float64"],
        ["`trainer.precision`", "Arc A770", "'float64'"],
    ),
    "missing data folder": (
        ["data=text", "data.folder=/no/such/folder"],
        ["`data.folder`", "/no/such/folder"],
    ),
    "unknown model argument": (["+model.depth=3"], ["`model.depth` is not an argument", "3"]),
    "wrong model argument": (["model.widths=[0]"], ["`model.widths[0]` must be greater than 0", "0"]),
    "model that is not there": (
        ["model._target_=my_models.Net"],
        ["`model._target_` must be an importable class", "'my_models.Net'"],
    ),
    "negative learning rate": (["optimizer.lr=-1"], ["`optimizer`", "learning rate", "-1"]),
    "resume from nowhere": (["resume=/no/such/run"], ["`resume`", "/no/such/run"]),
    "a path with =": (["resume=/runs/epoch=9.ckpt"], ["`resume`", "epoch=9.ckpt", "quotes"]),
    "port out of range": (
        ["launch.port=70000"],
        ["`launch.port` must be less than or equal to 65535", "70000"],
    ),
}


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path):  # type: ignore[no-untyped-def]
    """Type the overrides, expect a refusal, return what the screen shows."""

    def type_them(overrides: list[str]) -> str:
        def never(*_: object) -> None:
            raise AssertionError("a process was started")

        monkeypatch.setattr("hetexp.launch.launcher.start_rank", never)
        monkeypatch.setattr(sys, "argv", ["train.py", f"hydra.run.dir={tmp_path / 'run'}", *overrides])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code not in (0, None)
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        print("SCREEN", overrides, err)
        return err

    return type_them


@pytest.mark.parametrize(("overrides", "told"), WRONG.values(), ids=WRONG.keys())
def test_wrong_value_is_named(refused, overrides: list[str], told: list[str]) -> None:  # type: ignore[no-untyped-def]
    screen = refused(overrides)
    for part in told:
        assert part in screen, screen


def test_all_errors_at_once(refused) -> None:  # type: ignore[no-untyped-def]
    screen = refused(
        [
            "strategy=dpp",
            "trainer.max_stps=5",
            "trainer.global_batch_size=0",
            "optimizer.lr=-1",
            "balancing=manual",
            "model.widths=[]",
        ]
    )
    for part in ("6 configuration errors", "dpp", "max_stps", "global_batch_size", "balancing.weights"):
        assert part in screen, screen
