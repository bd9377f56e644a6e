"""The choices of the group `logger`: what each builds, what it writes, and that none ends a training."""

from __future__ import annotations

import csv
import json
import logging
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from hetexp.app import compose_config, conf_dir
from hetexp.core.instantiate import check_component, instantiate
from hetexp.logger.base import Logger, NoLogger, RunInfo
from hetexp.logger.csv import CsvLogger
from hetexp.logger.guard import GuardedLogger
from hetexp.logger.multi import MultiLogger
from hetexp.logger.tensorboard import TensorBoardLogger
from hetexp.logger.wandb import WandbLogger

KINDS = {
    "wandb": WandbLogger,
    "none": NoLogger,
    "csv": CsvLogger,
    "tensorboard": TensorBoardLogger,
    "multi": MultiLogger,
}


def info(run_dir: Path) -> RunInfo:
    return RunInfo("id", run_dir, "lr=0.1", "sweep", "train", ("emulated",), {"lr": 0.1, "layers": [1, 2]})


def node_of(*overrides: str) -> dict[str, Any]:
    node: dict[str, Any] = OmegaConf.to_container(compose_config(list(overrides)).logger)  # type: ignore[assignment]
    return node


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_dir() / "logger").glob("*.yaml")))
def test_the_choices_of_the_logger_group_build(name: str) -> None:
    node = node_of(f"logger={name}")
    assert check_component("logger", node) == []
    built = instantiate(node)
    assert type(built) is KINDS[name]
    if name != "multi":
        own = {key: value for key, value in node.items() if key != "_target_"}
        assert {key: vars(built)[key] for key in own} == own


def test_wrong_arguments_are_told_by_key() -> None:
    node = node_of("logger=wandb")
    assert "_target_" in check_component("logger", {})[0]
    assert check_component("logger", node | {"mode": "ofline"})
    assert check_component("logger", node | {"finish_timeout_seconds": 0})
    (problem,) = check_component("logger", node_of("logger=multi", "logger.loggers.wandb.mode=ofline"))
    assert problem.startswith("`logger.loggers.wandb.mode` must be")


def test_several_at_once_without_one_of_them() -> None:
    built = instantiate(
        node_of("logger=multi", "logger.loggers.csv=null", "logger.loggers.wandb.mode=online")
    )
    assert [type(tracker) for tracker in built.trackers] == [WandbLogger, TensorBoardLogger]
    assert built.trackers[0].mode == "online"


def test_a_table_with_columns_that_come_later(tmp_path: Path) -> None:
    logger = CsvLogger()
    logger.start(info(tmp_path))
    logger.log({"train/loss": 0.1 + 0.2, "device/cpu:0/share": np.float64(1.0), "gone": None}, 1)
    logger.log({"train/loss": math.nan, "note": 'a "b", c\nd'}, 2)
    logger.log({"eval/loss": math.inf, "step": 99}, 2)
    logger.log({"train/loss": 1, "note": "e"}, 3)
    logger.finish({}, 0)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "train/loss", "device/cpu:0/share", "gone", "note", "eval/loss"]
    assert rows == [
        ["1", "0.30000000000000004", "1.0", "", "", ""],
        ["2", "nan", "", "", 'a "b", c\nd', ""],
        ["2", "", "", "", "", "inf"],
        ["3", "1", "", "", "e", ""],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_event_files_hold_each_point_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger()
    logger.start(info(tmp_path))
    share: Any = np.float32(0.5)
    for step in (10, 20, 30):
        loss = math.nan if step == 20 else step / 10
        logger.log({"train/loss": loss, "device/cuda:0/share": share, "gone": None}, step)
    logger.log({"eval/loss": 2.0, "phase": "end"}, 30)
    logger.finish({"status": "completed", "samples": 7}, 0)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == ["device/cuda_0/share", "eval/loss", "train/loss"]
    points = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert [step for step, _ in points] == [10, 20, 30]
    assert (points[0][1], math.isnan(points[1][1]), points[2][1]) == (1.0, True, 3.0)
    assert [(event.step, event.value) for event in read.Scalars("device/cuda_0/share")] == [
        (10, 0.5),
        (20, 0.5),
        (30, 0.5),
    ]

    def text(tag: str) -> str:
        (event,) = read.Tensors(f"{tag}/text_summary")
        return str(event.tensor_proto.string_val[0].decode())

    assert text("name") == "lr=0.1" and text("tags") == "emulated" and text("phase") == "end"
    assert json.loads(text("config")) == {"lr": 0.1, "layers": [1, 2]}
    assert json.loads(text("summary")) == {"status": "completed", "samples": 7}


def test_a_package_that_is_not_there_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    logger = MultiLogger({"tensorboard": TensorBoardLogger(), "csv": CsvLogger(), "none": None})
    with caplog.at_level(logging.WARNING):
        logger.start(info(tmp_path))
        logger.log({"loss": 1.0}, 1)
        logger.finish({}, 0)
    (record,) = caplog.records
    assert "TensorBoardLogger is off for the rest of this run" in record.getMessage()
    assert "pip install 'hetexp[tensorboard]', or logger=none" in record.getMessage()
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,1.0\n"


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_raises_is_given_up(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    class Raising(Logger):
        def start(self, run: RunInfo) -> None:
            self._do("start")

        def log(self, metrics: Mapping[str, float | int | str | None], step: int) -> None:
            self._do("log")

        def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
            self._do("finish")

        def _do(self, name: str) -> None:
            calls.append(name)
            if name == method:
                raise RuntimeError(f"no {name}\nand more")

    logger = GuardedLogger(Raising())
    with caplog.at_level(logging.WARNING):
        logger.start(info(tmp_path))
        logger.log({}, 1)
        logger.log({}, 2)
        logger.finish({}, 0)
    assert calls == {"start": ["start"], "log": ["start", "log"]}.get(
        method, ["start", "log", "log", "finish"]
    )
    (record,) = caplog.records
    assert f"it raised RuntimeError: no {method}. The training goes on" in record.getMessage()


def test_the_logger_of_the_guide_works(tmp_path: Path) -> None:
    """The class that the guide shows, as it is written there."""
    text = (conf_dir().parent / "docs" / "how-to" / "your-own.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_logger\.py.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    logger = GuardedLogger(names["Lines"](file="points.txt"))
    logger.start(info(tmp_path))
    logger.log({"train/loss": 0.5, "gone": None}, 3)
    logger.finish({"status": "completed"}, 0)
    assert (tmp_path / "points.txt").read_text() == "lr=0.1\n3 train/loss 0.5\ncompleted\n"
